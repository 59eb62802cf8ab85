"""The gateway: turns HTTP and gRPC calls into requests in the log, and answers from it into responses.

Rooms import downwards, in this order: `http2` and `clouds`, which put other protocols before the HTTP front; the fronts
`http` and `grpc`; `reports`; `lane` and `jobs`; `access`; and at the bottom `requests`, `regions`, `tracing` and
`webhooks`, which import no other room. Of the modules beside them, `service` and `handler` stand between the fronts and
`lane`, `dataplane` between `lane` and `access`. From outside the package they import the kernel and `protos`. Begin
reading at `handler`, the interface behind every front, then `service`.

A letter with a number, as H55 or W4, is an item of Triton's interface: docs/interface.md says what it asks for and
which tests hold it. All packages cite them.
"""
