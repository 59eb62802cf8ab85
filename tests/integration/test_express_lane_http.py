"""A gateway with the express lane answers HTTP like one without it, to the byte, whatever is sent and however."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from example_counts import examples
from http_calls import read_reply
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_pair import FILLER, LAST, UNLUCKY, LanePair, cut, http_answers, http_request, passed

from gateway.http.exchanges import Pipeline
from gateway.http.http_lane import HttpLane, LaneConnection
from gateway.http.protocol import BoundedHttpProtocol

pytestmark = pytest.mark.integration

CONTEXT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-0{}"
TRACED = f"traceparent: {CONTEXT.format(0)}\r\n"
FORMS = [("one", ""), ("one", "id-1"), ("two", ""), ("two", "a.b:c"), ("picky", ""), ("picky", "p")]


@pytest.fixture(scope="module", params=["memory", "redis"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanePair]:
    url = ""
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        with redis.Redis.from_url(url) as client:
            client.flushall()
    directory: Path = tmp_path_factory.mktemp("models")
    with LanePair(directory, url) as pair:
        yield pair


@pytest.fixture(autouse=True)
def learnt(pair: LanePair) -> None:
    """What nobody asks for is forgotten after a while."""
    pair.run(learn(pair))


async def learn(pair: LanePair) -> None:
    """Ask in every known form until it is recognised."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.http_port(pair.with_lane))
    for model, request_id in FORMS:
        before = pair.ridden()
        async with asyncio.timeout(30):
            while pair.ridden() == before:
                for head in ("", TRACED):
                    writer.write(http_request(model, 1, request_id, head=head))
                    status, _, _ = await read_reply(reader)
                    assert status == 200
    writer.close()
    await writer.wait_closed()


async def both(pair: LanePair, segments: list[bytes]) -> tuple[bytes, bytes]:
    """What the gateway with the lane says to the same segments, and what the one without it says."""
    on, off = await asyncio.gather(
        *(http_answers(pair.http_port(app), segments) for app in (pair.with_lane, pair.without))
    )
    return on, off


def test_known_requests_ride_and_are_answered_alike(pair: LanePair) -> None:
    for model, request_id in FORMS:
        before = pair.ridden()
        segments = [http_request(model, 5, request_id), http_request(model, 6, request_id), LAST]
        on, off = pair.run(both(pair, segments))
        assert on == off
        assert on.count(b"HTTP/1.1 200") == 3
        assert pair.ridden() > before
    pair.run(pair.settled())


def test_requests_with_answers_in_json_ride(pair: LanePair, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    read = HttpLane.read

    def noting(lane: HttpLane, connection: LaneConnection, data: bytes) -> object:
        found.append(read(lane, connection, data))
        return found[-1]

    monkeypatch.setattr(HttpLane, "read", noting)
    wanted = {"outputs": [{"name": "y", "parameters": {"binary_data": False}}]}

    async def learn_it() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.http_port(pair.with_lane))
        while not any(found):
            writer.write(http_request("one", 1, "t", more=wanted))
            await read_reply(reader)
        writer.close()

    pair.run(learn_it())
    found.clear()
    on, off = pair.run(both(pair, [http_request("one", value, "t", more=wanted) for value in (5, 6)] + [LAST]))
    assert on == off
    assert b'"data":[6,' in on
    assert b'"data":[7,' in on
    assert any(found)


@pytest.mark.parametrize(
    ("head", "version"), [("Connection: close\r\n", "1.1"), ("", "1.0"), ("Connection: close\r\n", "1.0")]
)
def test_a_connection_that_is_to_end_ends_each_time(pair: LanePair, head: str, version: str) -> None:
    asked = http_request("one", 5, head=head).replace(b"HTTP/1.1", f"HTTP/{version}".encode())

    async def ask() -> None:
        for _ in range(4):  # it was recognised from the second one on, and answered on an open connection
            for app in (pair.with_lane, pair.without):
                answer = await http_answers(pair.http_port(app), [asked])
                assert answer.startswith(b"HTTP/1.1 200")
                assert b"connection: close" in answer.lower()

    pair.run(ask())


def test_many_callers_share_waves(pair: LanePair) -> None:
    async def ask() -> None:
        counts = pair.service._dataplane.counts
        entries, before = counts.entries, pair.ridden()
        calls = [both(pair, [http_request("one", value)] * 2 + [LAST]) for value in range(32)]
        for on, off in await asyncio.gather(*calls):
            assert on == off
            assert on.count(b"HTTP/1.1 200") == 3
        assert pair.ridden() >= before + 32
        assert counts.entries - entries < pair.ridden() - before, "none shared an entry"

    pair.run(ask())


_more = st.sampled_from(
    [
        {},
        {},
        {"parameters": {"binary_data_output": True, "priority": 2}},
        {"parameters": {"binary_data_output": True, "timeout": 1_000_000}},
        {"parameters": {"binary_data_output": True, "custom": "é"}},
        {"parameters": {}},
        {"outputs": [{"name": "nothing"}]},
        {"outputs": [{"name": "y", "parameters": {"binary_data": False}}]},
    ]
)
_head = st.sampled_from(
    [
        *("", "Accept-Encoding: gzip\r\n", "Connection: keep-alive\r\n", TRACED, TRACED.upper(), TRACED * 2),
        *(f"Traceparent: {CONTEXT.format(1)}\r\n", f"x: {TRACED}", f"traceparent: {CONTEXT.format(1)[:-4]}\r\nx:\r\n"),
    ]
)
_requests = st.one_of(
    st.builds(
        lambda form, value, last: http_request(form[0], value, form[1], head=TRACED.replace("-00", last)),
        st.sampled_from(FORMS),
        st.sampled_from([1, 2, UNLUCKY]),
        st.sampled_from(["-00", "-01", "-f2", "-zz", "\r\n-", "-0\0"]),
    ),
    st.builds(
        lambda form, value: http_request(form[0], value, form[1]),
        st.sampled_from(FORMS),
        st.sampled_from([1, 2, UNLUCKY]),
    ),
    st.builds(
        http_request,
        st.sampled_from(["one", "two", "picky"]),
        st.sampled_from([3, UNLUCKY]),
        st.sampled_from(["", "id-2", "with space", "é"]),
        more=_more,
        head=_head,
        raw=st.sampled_from([None, None, [b"abcd"], [b""], [bytes(8)], [bytes(16)]]),
        path=st.sampled_from(["", "", "/v2/models/none/infer", "/v2/models/one/versions/1/infer"]),
    ),
    st.sampled_from([b"GET /v2/models/one HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n"]),
)


@settings(max_examples=examples(60))
@given(st.lists(_requests, min_size=1, max_size=5), st.lists(st.integers(0, 1 << 16), max_size=6), st.booleans())
def test_any_requests_in_any_segments(
    pair: LanePair, requests: list[bytes], places: list[int], one_by_one: bool
) -> None:
    data = b"".join(requests) + LAST
    edges = [sum(map(len, requests[:count])) for count in range(len(requests) + 1)] if one_by_one else []
    on, off = pair.run(both(pair, cut(data, [*places, *edges])))
    assert on == off


@pytest.mark.parametrize("pair", ["memory"], indirect=True)
@pytest.mark.parametrize("change", [1, 0x20, 0x80])
@pytest.mark.parametrize(
    ("model", "request_id", "head"), [("one", "id-1", ""), ("two", "", ""), ("picky", "p", ""), ("one", "", TRACED)]
)
def test_a_request_that_differs_in_one_byte(
    pair: LanePair, model: str, request_id: str, head: str, change: int
) -> None:
    async def ask(at: int) -> None:
        data = bytearray(http_request(model, 7, request_id, head=head))
        data[at] ^= change
        # what is said to be longer than it is ends within the filler
        on, off = await both(pair, [bytes(data), FILLER])
        assert on == off, (at, bytes(data))

    async def ask_all() -> None:
        size = len(http_request(model, 7, request_id, head=head))
        for first in range(0, size, 40):
            await asyncio.gather(*(ask(at) for at in range(first, min(size, first + 40))))

    pair.run(ask_all(), 300)
    pair.run(pair.settled())


def test_clients_that_leave_take_nothing_with_them(pair: LanePair) -> None:
    async def leave(value: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", pair.http_port(pair.with_lane))
        data = http_request("one", value)
        writer.write(data if value % 3 else data[: len(data) - value % 7])
        for _ in range(value % 5):
            await asyncio.sleep(0)
        writer.transport.abort()

    async def ask() -> None:
        answers = asyncio.gather(*(both(pair, [http_request("one", value), LAST]) for value in range(10)))
        await asyncio.gather(*(leave(value) for value in range(40)))
        for on, off in await answers:
            assert on == off
            assert on.count(b"HTTP/1.1 200") == 2
        await pair.settled()

    pair.run(ask())


def test_what_cannot_be_leased_goes_the_full_way(pair: LanePair) -> None:
    async def ask() -> None:
        await pair.settled()
        lease = pair.waves.leases._held["one"]
        held, lease.held_requests = lease.held_requests, 0
        lease._asking = True  # for more, which does not come
        try:
            before = pair.ridden()
            for request_id in ("", "id-1"):
                on, off = await both(pair, [http_request("one", 9, request_id), LAST])
                assert on == off
                assert on.count(b"HTTP/1.1 200") == 2
            assert pair.ridden() == before
        finally:
            lease.held_requests, lease._asking = held, False

    pair.run(ask())


@pytest.mark.parametrize("place", ["before its pipeline", "behind its pipeline", "outside the parser"])
def test_a_request_that_cannot_leave_fails_at_once(pair: LanePair, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    owner, name = (BoundedHttpProtocol, "_parse") if place == "outside the parser" else (Pipeline, "add")
    method = getattr(owner, name)

    def fails(*words: Any) -> None:
        if place == "behind its pipeline":
            method(*words)
        monkeypatch.setattr(owner, name, method)
        raise ZeroDivisionError("a defect")

    async def ask() -> None:
        await pair.settled()
        lease = pair.waves.leases._held["one"]
        held, lease.held_requests = lease.held_requests, 0
        lease._asking = True  # for more, which does not come
        monkeypatch.setattr(owner, name, fails)
        try:
            answer = await http_answers(pair.http_port(pair.with_lane), [http_request("one", 9)])
        finally:
            lease.held_requests, lease._asking = held, False
        assert answer.startswith(b"HTTP/1.1 500"), answer
        assert answer.count(b"HTTP/1.1") == 1
        assert answer.endswith(b'{"error":"internal server error"}')
        await pair.settled()

    pair.run(ask())


def test_an_id_that_is_said_twice_is_the_last(pair: LanePair) -> None:
    async def ask() -> None:
        data = http_request("one", 9, "first").replace(b',"inputs"', b',"\\u0069d":"first","inputs"', 1)
        data = _lengthened(data, len(b',"\\u0069d":"first"'))
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.http_port(pair.with_lane))
        for _ in range(4):
            writer.write(data)
            status, _, body = await read_reply(reader)
            assert (status, b'"id":"first"' in body) == (200, True)
        writer.close()
        on, off = await both(pair, [data.replace(b'"first"', b'"other"', 1), LAST])
        assert on == off

    pair.run(ask())


def test_json_that_ends_like_a_tensor_is_no_tensor(pair: LanePair) -> None:
    async def ask() -> None:
        text = (
            b'{"parameters":{"binary_data_output":true},"inputs":[{"name":"b","shape":[1,3],"datatype":"INT32",'
            b'"parameters":{"binary_data_size":12}},{"name":"a","shape":[1,1],"datatype":"FP32","data":[%b]}]}'
        )
        number = struct.unpack("<f", b"]}]}")[0]  # whose bytes are the last of the text
        text = text.replace(b"%b", repr(number).encode())
        data = (
            b"POST /v2/models/two/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(text), len(text) + 12, text)
        ) + b"]}]}" * 3
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.http_port(pair.with_lane))
        for _ in range(4):
            writer.write(data)
            status, _, _ = await read_reply(reader)
            assert status == 200
        writer.close()
        broken = data.replace(b"]}]}", b"]}]]", 1)
        on, off = await both(pair, [broken, LAST])
        assert on == off

    pair.run(ask())


def test_a_client_that_does_not_read_is_not_answered_without_end(pair: LanePair) -> None:
    async def ask() -> None:
        data = http_request("one", 9)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", pair.http_port(pair.with_lane)))
        _, writer = await asyncio.open_connection(sock=sock)
        writer.transport.pause_reading()
        connection, transport = await server_side(pair, writer)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        transport.set_write_buffer_limits(high=4096)
        before = pair.ridden()
        for _ in range(2000):
            if connection.flow.write_paused:
                break
            answered = connection.server_state.total_requests
            writer.write(data)
            while connection.server_state.total_requests == answered:
                await asyncio.sleep(0)
        assert connection.flow.write_paused
        assert pair.ridden() > before
        unread, ridden = transport.get_write_buffer_size(), pair.ridden()
        for _ in range(100):
            writer.write(data)
            await passed()
        assert pair.ridden() <= ridden + 1, "more than the one that is read in full"
        assert transport.get_write_buffer_size() < unread + 1000, "it holds all answers"
        writer.transport.abort()
        await pair.settled()

    pair.run(ask(), 60)


async def server_side(pair: LanePair, writer: asyncio.StreamWriter) -> tuple[Any, Any]:
    """A connection as the gateway with the lane has it, and its transport."""
    mine = writer.get_extra_info("sockname")
    front: Any = pair.with_lane._fronts["http"][1]
    async with asyncio.timeout(30):
        while True:
            for connection in front._state.connections:
                if connection.transport.get_extra_info("peername") == mine:
                    return connection, connection.transport
            await asyncio.sleep(0)


def test_the_beginning_of_a_known_request_is_read_though_nothing_follows(pair: LanePair) -> None:
    """Held back for the rest of it to come, it is the parser's with the next sweep."""

    async def ask() -> None:
        data = http_request("one", 9)
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.http_port(pair.with_lane))
        connection, _ = await server_side(pair, writer)
        sweep, connection.sweep = connection.sweep, lambda _elapsed_s: None  # the server's own sweeps do not count
        writer.write(data[:-3])
        async with asyncio.timeout(30):
            while not connection._held:
                await asyncio.sleep(0)
        sweep(1.0)
        assert not connection._held
        sweep(9.5)
        writer.write(data[-3:])
        status, _, _ = await read_reply(reader)
        assert status == 200
        writer.write(data[:-3])
        async with asyncio.timeout(30):
            while not connection._held:
                await asyncio.sleep(0)
        for _ in range(3):
            sweep(6.0)
        status, _, _ = await read_reply(reader)
        assert status == 408
        writer.close()

    pair.run(ask())


def _lengthened(data: bytes, by: int) -> bytes:
    """A request whose JSON text has grown."""
    lines = []
    head, _, body = data.partition(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        name, colon, value = line.partition(b": ")
        lines.append(name + colon + (b"%d" % (int(value) + by) if name.endswith(b"Content-Length") else value))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
