"""The HTTP front: inference on a fast path of its own, all else over FastAPI.

May import `handler` and below, and nothing of `grpc`. Begin reading at `fastpath`, then `protocol`, the wire side.
"""
