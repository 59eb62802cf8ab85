"""The HTTP front: answers inference itself, and control requests with FastAPI.

May import `handler` and below, and nothing of `grpc`. Begin reading at `protocol`, the wire side, then `exchanges` and
`http_application`.
"""
