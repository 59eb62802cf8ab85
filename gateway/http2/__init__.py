"""HTTP/2 on the HTTP port: the connections of `gateway.grpc.native`, whose streams are requests for `gateway.http`.

May import both fronts. Begin reading at `http_connection`.
"""
