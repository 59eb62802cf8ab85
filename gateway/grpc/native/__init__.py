"""Our own gRPC server: HTTP/2 in the gateway's event loop, without threads (docs/adr/0014).

May import the rest of `grpc`, but not grpcio. Begin reading at `native_server`, then `connection` and
`connection_calls`.
"""
