"""The HTTP front: answers inference itself, and control requests with FastAPI.

May import `handler` and below, and nothing of `grpc`. Begin reading at `protocol`, the wire side. It offers bytes to
`http_lane` first, which recognises requests; the others are parsed and go through `exchanges` to `http_application`.
"""
