"""HTTP/2 on the HTTP port: connections of `gateway.grpc.native` whose streams are requests to `gateway.http`.

May import both fronts. Begin reading at `http_connection`.
"""
