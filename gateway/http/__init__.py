"""The HTTP front: inference on a fast path of its own, all else over FastAPI.

May import `handler` and below, and nothing of `grpc`. Begin reading at `protocol`, the wire side, then `asgi` and
`fastpath`.
"""
