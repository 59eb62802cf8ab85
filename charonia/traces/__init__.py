"""Traces of requests: the context that travels with a request, the report that returns, and their file formats.

Pure; may import tensors, data types and errors. Begin reading at `contexts`.
"""
