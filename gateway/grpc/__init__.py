"""The gRPC front: methods of the inference service, over our own HTTP/2 server or over grpcio.

May import `handler` and below, and nothing of `http`. Begin reading at `servicer`; servers are `native` and
`grpcio_server`.
"""
