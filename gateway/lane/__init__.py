"""Waves, and the express lane: the fronts' parts of it recognise requests by their bytes.

May import `entrances`, `dataplane` and below; the fronts' parts, `gateway.grpc.native.grpc_lane` and
`gateway.http.http_lane`, import it. A front compares a request with known signatures, the bytes around its tensor data,
and puts it at a `door`, where requests alike gather into waves; `gateway.service` brings parsed requests there.
`pending_waves` tracks waves until their answers. Any other request takes the full way and gets the same answer. Begin
reading at `door`, then `doors`.
"""
