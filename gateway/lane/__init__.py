"""The express lane: requests that look like earlier ones, admitted by comparing bytes, sent and answered in waves.

A front recognises a request by the bytes around its tensor data (`signatures`) and hands it to a `door`, where requests
of one kind gather into waves; `pending_waves` follows those to their answers. Anything unusual leaves the lane for the
full way (`gateway.service`) and gets the same answer there. Begin with `door`; the fronts' parts are
`gateway.grpc.native.grpc_lane` and `gateway.http.http_lane`.
"""
