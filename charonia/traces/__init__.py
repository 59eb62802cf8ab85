"""Traces of requests: what travels with a traced one, what comes back, and how either is written.

Pure; may import tensors, data types and errors. Begin reading at `contexts`.
"""
