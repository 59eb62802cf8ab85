"""The HTTP connection answers a stream of bytes alike however it is cut, and stands whatever comes."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from example_counts import examples
from http_wire import App, Wire, echo, responses, summary
from hypothesis import given, settings
from hypothesis import strategies as st

WAYS = ["", "quick", "chunked", "deaf"]
_JSON = b'{"inputs":[]}'


def _request(
    method: str, way: str, body: bytes, chunks: list[int] | None, extra: int, large: bool, wish: bool
) -> tuple[bytes, str, bytes]:
    """The bytes of a request, its method, and what `echo` answers."""
    target = "/v2/models/m/infer" if large else "/a/b"
    lines = ["Host: x", *(f"X-{number}: {'y' * number}" for number in range(extra))]
    if wish:
        lines += ["Connection: Upgrade", "Upgrade: h2c"]
    if large:
        body = _JSON + body + bytes(70_000)
        lines.append(f"Inference-Header-Content-Length: {len(_JSON)}")
    if method in ("GET", "HEAD"):
        body, chunks = b"", None
    if chunks is None:
        if method not in ("GET", "HEAD"):
            lines.append(f"Content-Length: {len(body)}")
        wire = body
    else:
        lines.append("Transfer-Encoding: chunked")
        edges = sorted({0, len(body), *(at % (len(body) + 1) for at in chunks)})
        wire = b"".join([b"%x\r\n%b\r\n" % (end - at, body[at:end]) for at, end in pairwise(edges)]) + b"0\r\n\r\n"
    head = "\r\n".join([f"{method} {target}?{way} HTTP/1.1", *lines]) + "\r\n\r\n"
    seen = len(lines) - wish  # the wish for another protocol is taken out
    return head.encode() + wire, method, summary(method, target, seen, b"" if way == "deaf" else body)


_small_or_odd = st.builds(
    _request,
    st.sampled_from(["GET", "POST", "PUT", "HEAD"]),
    st.sampled_from(WAYS),
    st.binary(max_size=40) | st.integers(0, 90_000).map(bytes),
    st.none() | st.lists(st.integers(0, 1 << 16), max_size=5),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
)
_large = st.builds(
    _request,
    *(st.just("POST"), st.sampled_from(WAYS), st.binary(max_size=40), st.none()),
    *(st.integers(0, 5), st.just(True), st.just(False)),
)
_requests = _small_or_odd | _large
_edges = st.lists(st.integers(0, 1 << 20).map(lambda at: at * 7919), max_size=12)
"""Where the stream is cut, far and near."""


async def _answers(data: bytes, edges: list[int], *, has_room: bool, slowly: bool) -> bytes:
    wire = Wire(App(echo, has_room=has_room))
    places = sorted({0, len(data), *(at % (len(data) + 1) for at in edges)})
    for at, end in pairwise(places):
        await wire.send(data[at:end])
        if slowly:
            await wire.rest()
    await wire.rest()
    await wire.rest()
    closed = wire.transport.closing
    await wire.leave()
    assert not closed
    return bytes(wire.transport.written)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(_requests, min_size=1, max_size=6), _edges, st.booleans(), st.booleans())
def test_requests_cut_anywhere_get_the_same_answers(
    requests: list[tuple[bytes, str, bytes]], edges: list[int], has_room: bool, slowly: bool
) -> None:
    data = b"".join(wire for wire, _, _ in requests)
    written = asyncio.run(_answers(data, edges, has_room=has_room, slowly=slowly))
    found = responses(written, [method for _, method, _ in requests])
    assert [status for status, _, _ in found] == [200] * len(requests)
    for (_, method, expected), (_, _, body) in zip(requests, found, strict=True):
        assert body == (b"" if method == "HEAD" else expected)


@settings(max_examples=examples(60), deadline=None)
@given(_requests, st.data())
def test_a_request_that_comes_byte_by_byte(request: tuple[bytes, str, bytes], data: st.DataObject) -> None:
    wire, method, expected = request
    head = wire.index(b"\r\n\r\n") + 4
    edges = list(range(min(len(wire), head + 40)))
    written = asyncio.run(_answers(wire, edges, has_room=True, slowly=False))
    ((status, _, body),) = responses(written, [method])
    assert (status, body) == (200, b"" if method == "HEAD" else expected)


_junk = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: 5, 5\r\n\r\n",
            b"CONNECT x:1 HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n folded\r\n\r\n",
            b"\r\n\r\n\r\n",
            b"\0",
        ]
    ),
)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(_requests, max_size=3),
    st.lists(_requests | _junk.map(lambda junk: (junk, "", b"")), max_size=3),
    _edges,
    st.booleans(),
)
def test_whatever_comes_ends_in_order(
    first: list[tuple[bytes, str, bytes]], then: list[tuple[bytes, str, bytes]], edges: list[int], slowly: bool
) -> None:
    """What came before it is answered all the same; a refusal is the last that is written."""

    async def run() -> tuple[bytes, bool]:
        wire = Wire(App(echo, has_room=True))
        data = b"".join(part for part, _, _ in first + then)
        places = sorted({0, len(data), *(at % (len(data) + 1) for at in edges)})
        for at, end in pairwise(places):
            await wire.send(data[at:end])
            if slowly:
                await wire.rest()
        for _ in range(2):
            await wire.rest()
        closed = wire.transport.closing
        if not closed:
            for _ in range(2):
                wire.connection.sweep(1000)
            assert wire.transport.closing or wire.connection.flow.read_paused
        await wire.leave()
        return bytes(wire.transport.written), closed

    written, closed = asyncio.run(run())
    plain = asyncio.run(_answers(b"".join(part for part, _, _ in first), [], has_room=True, slowly=False))
    assert written.startswith(plain)
    if closed:
        assert b"connection: close\r\n" in written
    if b"HTTP/1.1 400 " in written:
        assert written.count(b'{"error":') == 1
        assert written.endswith(b'"}')
