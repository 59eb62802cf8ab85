"""One HTTP connection over a transport in memory: requests in turn, limits, flow control both ways, its end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import weakref
from typing import Any

import pytest
from http_wire import App, Wire, echo, responses, summary, whole_body

from gateway.http import protocol
from gateway.http.bodies import CLIENT_LEFT, EXCHANGE, RAW_HEADERS, Receive, Scope, Send, reply_whole
from gateway.http.codec.response_codec import response_head
from gateway.http.exchanges import HIGH_WATER_BYTES, MAX_WAITING

GET = b"GET /a?chunked HTTP/1.1\r\nHost: x\r\n\r\n"


def post(body: bytes, *lines: bytes, target: bytes = b"/a") -> bytes:
    head = [b"POST " + target + b" HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def refusal(data: bytes) -> tuple[int, str]:
    ((status, headers, body),) = responses(data, ["GET"])
    assert headers["connection"] == "close"
    return status, json.loads(body)["error"]


class Gate:
    """An application whose answers wait."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun = 0
        self.left: list[bool] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.left.append(bool(scope["state"].get(CLIENT_LEFT)))
            return
        await reply_whole(send, 200, [], b"")


# -- requests and responses --------------------------------------------------------------------------------------------


async def test_the_scope_says_what_was_asked() -> None:
    seen: list[Scope] = []

    async def keep(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await reply_whole(send, 204, [], b"")

    await Wire(App(keep)).exchange(b"PATCH /a%20b/%C3%A9?c=%20 HTTP/1.1\r\nHost: x\r\nX-Y: Z\r\n\r\n")
    (scope,) = seen
    assert scope["state"].pop(EXCHANGE)
    assert scope == {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
        "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 40000), "root_path": "", "method": "PATCH",
        "path": "/a b/é", "raw_path": b"/a%20b/%C3%A9", "query_string": b"c=%20",
        "headers": [(b"host", b"x"), (b"x-y", b"Z")], "state": {},
    }  # fmt: skip


async def test_names_as_sent_are_kept_for_forwarding_alone() -> None:
    seen: list[Any] = []

    async def keep(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["state"].get(RAW_HEADERS))
        await reply_whole(send, 200, [], b"")

    await Wire(App(keep, forwards_headers=True)).exchange(b"GET / HTTP/1.1\r\nHost: x\r\nMy-Key: a\r\n\r\n" * 2)
    await Wire(App(keep)).exchange(GET)
    assert seen == [[(b"Host", b"x"), (b"My-Key", b"a")]] * 2 + [None]


@pytest.mark.parametrize("way", ["chunked", "length"])
async def test_a_head_request_gets_no_body(way: str) -> None:
    head = f"HEAD /a?{way} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    (first, second) = responses(await Wire(App(echo)).exchange(head, GET), ["HEAD", "GET"])
    assert (first[0], first[2]) == (200, b"")
    assert second[2] == summary("GET", "/a", 1, b"")


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_that_have_no_body(status: int) -> None:
    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body"})

    data = await Wire(App(nothing)).exchange(GET, GET)
    assert data.count(b"\r\n\r\n") == 2
    assert b"transfer-encoding" not in data
    assert [status for status, _, _ in responses(data, ["GET", "GET"])] == [status] * 2


async def test_a_status_without_a_name() -> None:
    async def odd(scope: Scope, receive: Receive, send: Send) -> None:
        await reply_whole(send, 299, [], b"")

    assert (await Wire(App(odd)).exchange(GET)).startswith(b"HTTP/1.1 299 \r\n")


@pytest.mark.parametrize(
    ("request_bytes", "closes"),
    [
        (GET, False),
        (GET.replace(b"1.1", b"1.0"), True),
        (GET.replace(b"1.1", b"1.0").replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"), True),
        (GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), True),
        (post(b"{}", b"Connection: close", target=b"/a?quick"), True),
        # one that asks for another protocol, too: it is answered in HTTP/1.1
        (GET.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"), False),
        (GET.replace(b"\r\n\r\n", b"\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"), True),
        (post(b"{}", b"Connection: Upgrade\r\nConnection: close\r\nUpgrade: h2c", target=b"/a?quick"), True),
        (GET.replace(b"1.1\r\n", b"1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"), True),
    ],
)
async def test_who_asks_for_the_end_gets_it(request_bytes: bytes, closes: bool) -> None:
    wire = Wire(App(echo))
    await wire.send(request_bytes)
    await wire.rest()
    assert wire.transport.closing is closes
    assert (b"\r\nconnection: close\r\n" in wire.transport.written) is closes
    assert b" 200 OK" in wire.transport.written
    await wire.leave()


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked",
        b"transfer-encoding: identity, Chunked \r\ncontent-length: 999",
    ],
)
async def test_chunks_go_before_a_length_and_end_the_connection(lines: bytes) -> None:
    """RFC 9112, 6.1: what follows may be the body of another reader's request, so it is not served."""
    seen: list[Scope] = []

    async def keep(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await reply_whole(send, 200, [], (await whole_body(receive))[0])

    wire = Wire(App(keep))
    head = b"POST /a HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n\r\n"
    data = await wire.exchange(head + b"5\r\nhello\r\n0\r\n\r\n" + GET)
    ((status, headers, body),) = responses(data, ["POST"])
    assert (status, headers["connection"], body) == (200, "close", b"hello")
    assert wire.transport.closing
    (scope,) = seen
    assert b"content-length" not in dict(scope["headers"])


@pytest.mark.parametrize("coding", [b"gzip", b"identity", b"xchunked", b"chunked, gzip"])
async def test_a_length_beside_another_coding_is_refused(coding: bytes) -> None:
    request = post(b"abc", b"Transfer-Encoding: " + coding)
    assert refusal(await Wire(App(echo)).exchange(request)) == (400, "Invalid HTTP request received.")


@pytest.mark.parametrize("coding", [b"gzip", b"identity", b"xchunked", b"chunked;q=1"])
async def test_a_body_whose_end_cannot_be_known_is_refused_at_once(coding: bytes) -> None:
    """RFC 9112, 6.3: without a length, a coding that is not chunked last ends with the connection."""
    wire = Wire(App(echo))
    data = await wire.exchange(b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: " + coding + b"\r\n\r\n")
    assert refusal(data) == (400, "Invalid HTTP request received.")
    assert wire.transport.closing


@pytest.mark.parametrize("lines", [b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked", b"x , identity,chunked"])
async def test_a_body_that_is_coded_in_another_way_too_is_refused(lines: bytes) -> None:
    wire = Wire(App(echo))
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: " + lines + b"\r\n\r\n"
    assert refusal(await wire.exchange(head + b"5\r\nhello\r\n0\r\n\r\n")) == (501, "Unsupported transfer coding")
    assert wire.transport.closing


CHUNKED = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"


@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"])
async def test_chunks_before_http_1_1_end_the_connection(connection: bytes) -> None:
    """RFC 9112, 6.1: a proxy of that age may have passed the coding on without knowing it."""
    wire = Wire(App(echo))
    request = CHUNKED.replace(b"/1.1\r\n", b"/1.0\r\n" + connection) + b"\r\n"
    ((status, headers, _),) = responses(await wire.exchange(request + GET), ["POST"])
    assert (status, headers["connection"]) == (200, "close")


async def test_trailers_do_not_pass_for_headers() -> None:
    """RFC 9110, 6.5.1: what stands in front of the server may have checked the headers alone."""
    seen: list[Any] = []

    async def keep(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        seen.append((scope["headers"], scope["state"][RAW_HEADERS]))
        await reply_whole(send, 204, [], b"")

    app = App(keep)
    app.forwards_headers = True
    await Wire(app).exchange(CHUNKED, b"Content-Encoding: gzip\r\nX-Tenant: a\r\n\r\n")
    assert seen == [
        (
            [(b"host", b"x"), (b"transfer-encoding", b"chunked")],
            [(b"Host", b"x"), (b"Transfer-Encoding", b"chunked")],
        )
    ]


@pytest.mark.parametrize(
    "piece",
    [b"x-a: b\r\n" * 100, b"x" * 1000],
    ids=["many", "long"],
)
async def test_trailers_without_end_are_refused(piece: bytes) -> None:
    wire = Wire(App(echo))
    await wire.send(CHUNKED)
    for _ in range(protocol.MAX_HEADER_BYTES // len(piece) + 2):
        await wire.send(piece)
    assert refusal(await wire.exchange()) == (431, "request trailers exceed 65536 bytes")


async def test_an_application_may_end_the_connection() -> None:
    async def close(scope: Scope, receive: Receive, send: Send) -> None:
        await reply_whole(send, 503, [(b"Connection", b"Close")], b"")

    data = await Wire(App(close)).exchange(GET + GET)
    assert data.lower().count(b"connection: close") == 1
    assert len(responses(data.replace(b"Close", b"close"), ["GET", "GET"])) == 1


async def test_a_body_is_asked_for_when_it_is_wanted() -> None:
    wire = Wire(App(echo))
    sent = post(b"abc", b"Expect: 100-Continue")
    await wire.send(sent[:-3])
    await wire.rest()
    assert wire.transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.transport.written.clear()
    assert responses(await wire.exchange(b"abc"), ["POST"])[0][2] == summary("POST", "/a", 4 - 1, b"abc")
    # who is refused without it is not asked
    wire = Wire(App(echo))
    await wire.send(post(b"abc", b"Expect: 100-continue", target=b"/a?deaf")[:-3])
    await wire.rest()
    assert wire.transport.written.startswith(b"HTTP/1.1 200")
    await wire.leave()


async def test_a_request_that_was_answered_before_its_body_came() -> None:
    wire = Wire(App(echo))
    sent = post(bytes(300_000), target=b"/a?deaf")
    await wire.send(sent[:100])
    await wire.rest()
    data = await wire.exchange(sent[100:200_000], sent[200_000:] + GET)
    assert [body for _, _, body in responses(data, ["POST", "GET"])] == [
        summary("POST", "/a", 2, b""), summary("GET", "/a", 1, b"")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "broken",
    [
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",  # as its headers end
    ],
)
async def test_a_refusal_waits_for_the_answers_to_what_came_before(broken: bytes) -> None:
    gate = Gate()
    wire = Wire(App(gate))
    await wire.send(GET + GET + broken)
    await wire.send(GET)  # the client does not read the answer
    await wire.rest()
    assert not wire.transport.written
    for _ in range(2):
        wire.connection.sweep(protocol.IDLE_TIMEOUT_S)
    gate.open.set()
    await wire.rest()
    assert wire.transport.closing
    assert [status for status, _, _ in responses(bytes(wire.transport.written), ["GET"] * 3)] == [200, 200, 400]
    assert gate.begun == 2
    await wire.leave()


async def test_a_body_that_breaks_at_once_is_not_asked_for() -> None:
    """The refusal ends what may be written: no 100 Continue comes behind it."""
    wire = Wire(App(echo))
    head = b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    written = await wire.exchange(head + b"G")
    assert [status for status, _, _ in responses(written, ["POST"])] == [400]


async def test_a_large_answer_is_written_in_slices() -> None:
    """A transport that gets all of it at once writes on for as long as the client reads as fast."""
    body = bytes(9 << 20)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"%d" % len(body))]
        assert not scope["state"][EXCHANGE].respond(response_head(headers, len(body)), body)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    wire = Wire(App(answer))
    sizes = []
    write = wire.transport.write
    wire.transport.write = lambda data: (sizes.append(len(data)), write(data))[1]  # type: ignore[method-assign]
    await wire.send(GET)
    async with asyncio.timeout(30):
        while len(wire.transport.written) < len(body):
            await wire.rest()
    assert responses(await wire.exchange(), ["GET"])[0][2] == body
    assert max(sizes) <= 1 << 20


async def test_a_body_that_breaks_behind_the_head_of_its_answer_gets_no_second_answer() -> None:
    go_on = asyncio.Event()

    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await go_on.wait()

    wire = Wire(App(early))
    await wire.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    await wire.rest()
    written = len(wire.transport.written)
    await wire.send(b"zz\r\n")
    assert wire.transport.closing
    assert len(wire.transport.written) == written
    await wire.leave()
    # nor one that stalls behind it
    wire = Wire(App(echo))
    await wire.send(post(b"abc", target=b"/a?deaf")[:-1])
    await wire.rest()
    wire.connection.sweep(protocol.BODY_STALL_S)
    assert wire.transport.closing
    assert len(responses(bytes(wire.transport.written), ["POST"])) == 1
    await wire.leave()


# -- what applications do wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ([], b"500"),
        (["body"], b"500"),
        (["start"], b""),
        (["start", "start"], b""),
        (["start", "body", "body"], b"200"),
        (["start", "more"], b"200"),
        (["bad name"], b""),
        (["bad value"], b""),
        (["too long", "body"], b"200"),
        (["too short", "body"], b"200"),
    ],
)
async def test_an_application_that_does_not_keep_to_asgi_loses_its_connection(
    caplog: pytest.LogCaptureFixture, messages: list[str], answer: bytes
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "start": {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]},
        "too long": {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]},
        "too short": {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]},
        "bad name": {"type": "http.response.start", "status": 200, "headers": [(b"a b", b"c")]},
        "bad value": {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b\r\nc: d")]},
        "body": {"type": "http.response.body", "body": b"x"},
        "more": {"type": "http.response.body", "body": b"x", "more_body": True},
    }

    async def wrong(scope: Scope, receive: Receive, send: Send) -> None:
        for name in messages:
            await send(kinds[name])

    wire = Wire(App(wrong))
    await wire.send(GET)
    await wire.rest()
    assert wire.transport.closing
    assert wire.transport.written[9:12] in (answer, b"200")
    assert b"c: d" not in wire.transport.written
    assert caplog.records
    assert caplog.records[-1].levelno == logging.ERROR
    await wire.leave()


# -- pipelining and flow control ---------------------------------------------------------------------------------------


async def test_requests_are_served_in_turn_and_few_are_read_ahead() -> None:
    gate = Gate()
    wire = Wire(App(gate))
    count = 3 * MAX_WAITING
    sending = asyncio.create_task(_one_by_one(wire, [GET] * count))
    await wire.rest()
    assert gate.begun == 1
    assert wire.transport.paused
    assert len(wire.connection.pipeline) == MAX_WAITING
    gate.open.set()
    await sending
    await wire.rest()
    assert gate.begun == count
    assert len(responses(bytes(wire.transport.written), ["GET"] * count)) == count
    assert wire.state.total_requests == count
    await wire.leave()


async def _one_by_one(wire: Wire, pieces: list[bytes]) -> None:
    for piece in pieces:
        await wire.send(piece)


async def test_of_a_body_nobody_asks_for_little_is_read() -> None:
    go_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        body, complete = await whole_body(receive)
        await reply_whole(send, 200, [], b"%d %d" % (len(body), complete))

    wire = Wire(App(slow))
    sent = post(bytes(1_000_000))
    pieces = [sent[at : at + 20_000] for at in range(0, len(sent), 20_000)]
    sending = asyncio.create_task(_one_by_one(wire, pieces))
    await wire.rest()
    assert wire.transport.paused
    assert wire.connection.pipeline.serving is not None
    assert len(wire.connection.pipeline.serving[0].body) <= HIGH_WATER_BYTES + 20_000
    for _ in range(3):
        wire.connection.sweep(protocol.BODY_STALL_S)  # it is not the client that stalls
    assert not wire.transport.closing
    go_on.set()
    await sending
    assert responses(await wire.exchange(), ["POST"])[0][2] == b"1000000 1"


async def test_a_client_that_does_not_read_holds_the_application_back() -> None:
    sent = 0

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while sent < 10:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            sent += 1
        await send({"type": "http.response.body"})

    wire = Wire(App(endless))
    wire.connection.pause_writing()
    await wire.send(GET)
    await wire.rest()
    assert not wire.transport.written
    wire.connection.resume_writing()
    await wire.rest()
    assert sent == 10
    wire.connection.pause_writing()
    await wire.send(GET)
    await wire.rest()
    written = len(wire.transport.written)
    await wire.leave()  # frees the writer that waits
    assert len(wire.transport.written) == written


# -- clients that leave, servers that stop -----------------------------------------------------------------------------


async def test_a_client_that_leaves_ends_its_request_and_those_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    wire = Wire(App(gate))
    await wire.send(GET * 3)
    await wire.rest()
    await wire.leave()
    assert gate.left == [True]
    assert gate.begun == 1
    assert not wire.transport.written
    assert not caplog.records


async def test_a_body_that_does_not_come_whole_is_a_disconnect() -> None:
    seen: list[tuple[bytes, bool]] = []

    async def keep(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            seen.append(await whole_body(receive))
        except asyncio.CancelledError:
            seen.append(await whole_body(receive))

    wire = Wire(App(keep))
    await wire.send(post(b"0123456789")[:-5])
    await wire.rest()
    await wire.leave()
    assert seen == [(b"", False)]


async def test_a_connection_that_is_over_leaves_nothing_to_the_garbage_collector() -> None:
    wire = Wire(App(echo))
    gone = weakref.ref(wire.connection)
    gc.collect()
    gc.disable()
    try:
        await wire.exchange(GET * 3)
        del wire
        assert gone() is None
    finally:
        gc.enable()


async def test_shutdown_ends_idle_connections_at_once_and_others_behind_their_last_request() -> None:
    gate = Gate()
    idle, busy = Wire(App(gate)), Wire(App(gate))
    await busy.send(GET * 2)
    await busy.rest()
    for wire in (idle, busy):
        wire.connection.shutdown()
    assert idle.transport.closing
    assert not busy.transport.closing
    gate.open.set()
    await busy.rest()
    assert busy.transport.closing
    first, second = responses(bytes(busy.transport.written), ["GET"] * 2)
    assert ("connection" in first[1], second[1]["connection"]) == (False, "close")
    for wire in (idle, busy):
        await wire.leave()


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 256 + b"\r\n", (431, "request has more than 256 headers")),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 70_000, (431, "request headers exceed 65536 bytes")),
        (b"GET /" + b"a" * 70_000, (431, "request headers exceed 65536 bytes")),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 70_000 + b"\r\n\r\n", (431, "request headers exceed 65536 bytes")),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", (400, "this server is no proxy")),
        (b"nonsense\r\n\r\n", (400, "Invalid HTTP request received.")),
        (b"GET nowhere HTTP/1.1\r\nHost: x\r\n\r\n", (400, "Invalid HTTP request received.")),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", (400, "Invalid HTTP request received.")),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", (400, "Invalid HTTP request received.")),
    ],
)
@pytest.mark.parametrize("size", [1 << 20, 1000, 7])
async def test_what_is_no_request_is_refused(sent: bytes, answer: tuple[int, str], size: int) -> None:
    wire = Wire(App(echo))
    data = await wire.exchange(*(sent[at : at + size] for at in range(0, len(sent), size)))
    assert wire.transport.closing
    assert refusal(data) == answer


async def test_chunks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_CHUNKS", 10)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = await Wire(App(echo)).exchange(head, b"1\r\na\r\n" * 9 + b"0\r\n\r\n", head, b"1\r\na\r\n" * 9, b"0\r\n\r\n")
    assert [body for _, _, body in responses(data, ["POST"] * 2)] == [summary("POST", "/", 2, b"a" * 9)] * 2
    data = await Wire(App(Gate())).exchange(head, b"1\r\na\r\n" * 10, b"0\r\n\r\n")
    assert refusal(data) == (400, "request body has more than 10 chunks")


async def test_a_large_body_may_have_more_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it needs where these have a KiB on average; tiny ones are few, whatever came before them."""
    monkeypatch.setattr(protocol, "MAX_CHUNKS", 10)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"400\r\n" + b"a" * 1024 + b"\r\n"
    for sent in ((head + chunk * 200 + b"0\r\n\r\n",), (head, *[chunk] * 200, b"0\r\n\r\n")):
        data = await Wire(App(echo)).exchange(*sent)
        assert [body for _, _, body in responses(data, ["POST"])] == [summary("POST", "/", 2, b"a" * 204_800)]
    data = await Wire(App(Gate())).exchange(head, chunk * 20, b"1\r\na\r\n" * 10, b"0\r\n\r\n")
    assert refusal(data) == (400, "request body has more than 10 chunks")
    # what another request of the connection brought allows none
    data = await Wire(App(echo)).exchange(head, chunk * 20 + b"0\r\n\r\n", head, b"1\r\na\r\n" * 11)
    assert data.endswith(b'{"error":"request body has more than 10 chunks"}')


# -- stalling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beginning", "limit_s", "answer"),
    [
        (b"", protocol.IDLE_TIMEOUT_S, b""),
        (GET[:-1], protocol.HEADERS_TIMEOUT_S, b"HTTP/1.1 408 "),
        (b"G", protocol.HEADERS_TIMEOUT_S, b"HTTP/1.1 408 "),
        (post(b"0123456789")[:-1], protocol.BODY_STALL_S, b"HTTP/1.1 408 "),
    ],
)
async def test_stalled_connections_end(beginning: bytes, limit_s: float, answer: bytes) -> None:
    wire = Wire(App(echo))
    await wire.send(beginning)
    await wire.rest()
    wire.connection.sweep(limit_s - 0.5)
    assert not wire.transport.closing
    wire.connection.sweep(0.5)
    assert wire.transport.closing
    assert wire.transport.written[: len(answer)] == answer
    assert bool(wire.transport.written) == bool(answer)
    await wire.leave()


async def test_trickling_headers_do_not_count_as_progress_and_bodies_must_come_faster() -> None:
    wire = Wire(App(echo))
    for at in range(protocol.HEADERS_TIMEOUT_S):
        assert not wire.transport.closing
        await wire.send(GET[at : at + 1])
        wire.connection.sweep(1)
    assert wire.transport.closing
    await wire.leave()
    fast, slow = Wire(App(echo)), Wire(App(echo))
    for wire, size in ((fast, protocol.BODY_MIN_BYTES), (slow, 10)):
        await wire.send(post(bytes(100_000))[:-100_000])
        for _ in range(2 * protocol.BODY_STALL_S):
            await wire.send(bytes(size))
            wire.connection.sweep(1)
        assert wire.transport.closing is (wire is slow)
        await wire.leave()


async def test_a_request_under_way_is_no_stall_and_begins_the_idle_time_anew() -> None:
    gate = Gate()
    wire = Wire(App(gate))
    wire.connection.sweep(protocol.IDLE_TIMEOUT_S - 1)
    await wire.send(GET)
    await wire.rest()
    wire.connection.sweep(10 * protocol.IDLE_TIMEOUT_S)
    gate.open.set()
    await wire.rest()
    wire.connection.sweep(protocol.IDLE_TIMEOUT_S - 1)
    assert not wire.transport.closing
    await wire.leave()
