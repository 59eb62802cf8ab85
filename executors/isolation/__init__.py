"""Runs a native model in its own process, so that its crash costs one instance only.

May import `backends`, `configuration` and `host`. Begin reading at `isolated_instance`.
"""
