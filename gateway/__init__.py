"""The gateway: turns HTTP and gRPC calls into requests in the log, and answers from it into responses.

Rooms and modules import downwards, in this order: `app`; `http2`, `clouds` and `openai`, which put other interfaces
before the HTTP front; the fronts `http` and `grpc`, and beside them `service`; `reports` and `deferral`; `handler`;
`lane` and `jobs`; `entrances`; `metrics`; `dataplane`; `access` and `releases`; and at the bottom
`requests`, `listening`, `regions`, `tls`, `tracing` and `webhooks`, which import no other room. From outside the
package they import the kernel and `protos`. Begin reading at `handler`, the interface behind every front, then
`service`.

A letter with a number, as H55 or W4, is an item of Triton's interface: docs/interface.md says what it asks for and
which tests hold it. All packages cite them.
"""
