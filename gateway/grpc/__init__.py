"""The gRPC front: the methods of the inference service, over our own HTTP/2 server or grpcio.

May import `handler` and below, and nothing of `http`. Begin reading at `servicer`; the servers are `native` and
`grpcio_server`.
"""
