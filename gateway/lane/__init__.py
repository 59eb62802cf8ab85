"""The express lane: recognises requests by their bytes, and sends and answers them in waves.

May import `entrances`, `dataplane` and below; the fronts' parts, `gateway.grpc.native.grpc_lane` and
`gateway.http.http_lane`, import it. A front compares a request with known signatures, the bytes around its tensor data,
and puts it at a `door`, where requests of one kind gather into waves. `pending_waves` tracks waves until their answers.
Any other request takes the full way (`gateway.service`) and gets the same answer. Begin reading at `door`.
"""
