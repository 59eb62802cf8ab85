"""Converts bodies and paths of the HTTP interface to neutral values and back.

Pure; may import the values of `handler` and `requests`. Begin reading at `request_codec` and `response_codec`.
"""
