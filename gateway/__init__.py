"""The gateway: turns HTTP and gRPC calls into requests in the log, and answers from it into responses.

Rooms import downwards: `http` and `grpc`, `handler`, then `lane` and `jobs`, then `dataplane`, `access` and
`requests`; from outside the package they import the kernel only. Begin reading at `handler`, the interface behind
every front, then `service`.
"""
