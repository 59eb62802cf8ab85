"""The express lane: requests that look like earlier ones, admitted by comparing bytes, sent and answered in waves.

May import `entrances`, `dataplane` and below; the fronts' parts, `gateway.grpc.native.grpc_lane` and
`gateway.http.http_lane`, import it. A front recognises a request by the bytes around its tensor data and hands it to a
`door`, where requests of one kind gather into waves; `pending_waves` follows those to their answers. Anything unusual
takes the full way (`gateway.service`) and gets the same answer there. Begin reading at `door`.
"""
