"""A gateway with the express lane answers gRPC like one without it, to the byte, whatever is sent and however."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import grpc.aio
import http2_client as h2
import pytest
import redis
from example_counts import examples
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_pair import DEADLY, DEATHS, INPUTS, UNLUCKY, LanePair, cut, passed, raw_inputs

from charonia.wire import WaveReply
from gateway.grpc.native.connection_calls import Calls
from gateway.grpc.native.grpc_lane import GrpcSignature
from gateway.grpc.native.outbox import Outbox
from gateway.lane.door import Call
from protos import grpc_service_pb2 as pb

pytestmark = pytest.mark.integration

CONTEXT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-0{}"
FORMS = [("one", ""), ("one", "id-1"), ("two", ""), ("two", "a.b:c"), ("picky", ""), ("picky", "p")]
NO_TABLE = b"\x20"
"""Header blocks mean the same whenever they come once the client has given up its table."""
SAID = dict[int, list[tuple[int, int, bytes]]]
"""What came on each stream: kind, flags and payload of its frames; data that follows data is joined."""


@pytest.fixture(scope="module", params=["memory", "redis"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanePair]:
    url = ""
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        with redis.Redis.from_url(url) as client:
            client.flushall()
    with LanePair(tmp_path_factory.mktemp("models"), url) as pair:
        yield pair


@pytest.fixture(autouse=True)
def learnt(pair: LanePair) -> None:
    """What nobody asks for is forgotten after a while."""
    pair.run(learn(pair))


def infer(model: str, value: int, request_id: str = "", **more: Any) -> bytes:
    """A serialised `ModelInferRequest`."""
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    for name, datatype, shape, _ in INPUTS.get(model, INPUTS["one"]):
        request.inputs.add(name=name, datatype=datatype, shape=more.get("shape") or shape)
    request.raw_input_contents.extend(more.get("raw") or raw_inputs(model if model in INPUTS else "one", value))
    for name, parameter in more.get("parameters", {}).items():
        field = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(parameter)]
        setattr(request.parameters[name], field, parameter)
    for name in more.get("outputs", ()):
        request.outputs.add(name=name)
    return request.SerializeToString(deterministic=True)


def headers(stream: int, *more: tuple[str, str], first: bool = False, flags: int = h2.END_HEADERS) -> bytes:
    block = h2.block(h2.call_fields("ModelInfer", *more))
    return h2.raw(h2.HEADERS, flags, stream, (NO_TABLE if first else b"") + block)


def data(stream: int, message: bytes, flags: int = h2.END_STREAM) -> bytes:
    return h2.raw(h2.DATA, flags, stream, h2.message(message))


def call(stream: int, message: bytes) -> bytes:
    return headers(stream) + data(stream, message)


def opening(*values: tuple[int, int], table: bytes = NO_TABLE) -> bytes:
    """The client's first words and a call that, unless `table` is empty, tells the server that blocks use no table."""
    hello = h2.block(h2.call_fields("ServerLive"))
    first = h2.raw(h2.HEADERS, h2.END_HEADERS, 1, table + hello)
    return h2.PREFACE + h2.settings(*values) + first + h2.raw(h2.DATA, h2.END_STREAM, 1, h2.message())


async def learn(pair: LanePair) -> None:
    """Ask in every known form until it is recognised."""
    wire = await h2.Wire.connect(pair.grpc_port(pair.with_lane), opening())
    stream = 1
    for model, request_id in FORMS:
        before = pair.ridden()
        async with asyncio.timeout(30):
            while pair.ridden() == before:
                stream += 2
                wire.write(call(stream, infer(model, 1, request_id)))
                assert (await wire.answer(stream)).status == 0
    wire.write(headers(stream + 2, ("traceparent", CONTEXT.format(0))), data(stream + 2, infer("one", 1)))
    assert (await wire.answer(stream + 2)).status == 0
    wire.write(added(stream + 4), data(stream + 4, infer("one", 1)))
    assert (await wire.answer(stream + 4)).status == 0
    wire.close()


def added(stream: int) -> bytes:
    """Headers that are added to the table, if there is one."""
    return h2.raw(h2.HEADERS, h2.END_HEADERS, stream, h2.block(h2.call_fields("ModelInfer"), 0x40))


def from_table(stream: int) -> bytes:
    """The headers that `added` has put into the table."""
    count = len(h2.call_fields("ModelInfer"))
    return h2.raw(h2.HEADERS, h2.END_HEADERS, stream, bytes(0x80 | 61 + at for at in range(count, 0, -1)))


async def said(
    port: int,
    segments: Sequence[bytes],
    awaited: Sequence[int],
    *,
    first: bytes = b"",
    perhaps: Sequence[int] = (),
    rest: Callable[[], Awaitable[None]] | None = None,
    grant: int = 0,
) -> SAID | tuple[int, str]:
    """What a server says to these segments on each stream, until those `awaited` have ended, or how it hangs up.

    `perhaps` are streams that may never end; what is said there in a moment counts, once all is at `rest`. With `grant`
    the client's windows are widened by so much at a time.
    """
    wire = await h2.Wire.connect(port, first or opening())
    try:
        await wire.answer(1)
        for segment in segments:
            wire.write(segment)
            await passed()
        for stream in awaited:
            while not (found := wire.answers.get(stream, h2.Answer())).ended and found.reset is None:
                if grant:
                    wire.write(h2.window_update(stream, grant), h2.window_update(0, grant))
                frame = await wire.frame()
                if frame is None or frame.kind == h2.GOAWAY:
                    return _gone(wire)
        if rest is not None:
            await rest()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.25 if perhaps else 0):
                for stream in perhaps:
                    await wire.answer(stream)
        if awaited:  # else the server may be within a frame
            await wire.settle()
        return _by_stream(wire)
    except (AssertionError, ConnectionError):
        return _gone(wire)
    finally:
        wire.close()
        await passed()


def _gone(wire: h2.Wire) -> tuple[int, str]:
    last = [frame for frame in wire.frames if frame.kind == h2.GOAWAY]
    assert last, "the connection ended without a word"
    return int.from_bytes(last[-1].payload[4:8]), last[-1].payload[8:].decode()


def _by_stream(wire: h2.Wire) -> SAID:
    found: SAID = {}
    for kind, flags, stream, payload in wire.frames:
        if not stream or kind == h2.WINDOW_UPDATE:
            continue
        frames = found.setdefault(stream, [])
        if kind == h2.DATA and frames and frames[-1][0] == h2.DATA:
            frames[-1] = (kind, flags, frames[-1][2] + payload)
        else:
            frames.append((kind, flags, payload))
    return found


async def both(pair: LanePair, segments: Sequence[bytes], awaited: Sequence[int], **more: Any) -> Any:
    on, off = await asyncio.gather(
        *(said(pair.grpc_port(app), segments, awaited, **more) for app in (pair.with_lane, pair.without))
    )
    assert on == off
    return on


def test_known_calls_ride_and_are_answered_alike(pair: LanePair) -> None:
    for model, request_id in FORMS:
        before = pair.ridden()
        segments = [call(3, infer(model, 5, request_id)), call(5, infer(model, 6, request_id))]
        answers = pair.run(both(pair, segments, [3, 5]))
        assert [kind for kind, _, _ in answers[3]] == [h2.HEADERS, h2.DATA, h2.HEADERS]
        reply = pb.ModelInferResponse.FromString(answers[5][1][2][5:])
        assert (reply.model_name, reply.id) == (model, request_id)
        assert pair.ridden() == before + 2
    pair.run(pair.settled())


async def counted(port: int) -> tuple[int, int, int, int, int]:
    """Channelz of a connection: riding calls, one refused, and one reset and one open before their messages came."""
    wire = await h2.Wire.connect(port, opening())
    await wire.answer(1)
    wire.write(b"".join(call(stream, infer("one", stream)) for stream in range(3, 23, 2)), call(23, infer("nobody", 1)))
    wire.write(headers(25), h2.raw(h2.RST_STREAM, 0, 25, bytes(4)), headers(27))
    for stream in (*range(3, 23, 2), 23):
        await wire.answer(stream)
    mine = "127.0.0.1:" + str(wire.writer.get_extra_info("sockname")[1])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        refs = (await stub.GetServerSockets(channelz_pb2.GetServerSocketsRequest(server_id=1))).socket_ref
        (number,) = [ref.socket_id for ref in refs if ref.name == mine]
        found = (await stub.GetSocket(channelz_pb2.GetSocketRequest(socket_id=number))).socket.data
    wire.close()
    streams = (found.streams_started, found.streams_succeeded, found.streams_failed)
    return *streams, found.messages_received, found.messages_sent


def test_riding_calls_are_counted_like_others(pair: LanePair) -> None:
    before = pair.ridden()
    on, off = (pair.run(counted(pair.grpc_port(app))) for app in (pair.with_lane, pair.without))
    assert pair.ridden() >= before + 10
    assert on == off == (14, 12, 1, 12, 11)
    pair.run(pair.settled())


@pytest.fixture
def recognised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls that were not read in full each wave has."""
    found: list[int] = []
    answer = GrpcSignature.answer

    def noting(signature: GrpcSignature, calls: list[Call], start: int, reply: WaveReply) -> None:
        found.append(len(calls))
        answer(signature, calls, start, reply)

    monkeypatch.setattr(GrpcSignature, "answer", noting)
    return found


def test_a_connection_that_leaves_ends_with_its_last_call(pair: LanePair, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    answer = GrpcSignature.answer

    def leaving(signature: GrpcSignature, calls: list[Call], start: int, reply: WaveReply) -> None:
        for one in calls:
            left.append(one.id)  # type: ignore[attr-defined]
            one.connection.ending._leave()  # type: ignore[attr-defined]
        answer(signature, calls, start, reply)

    async def ask() -> None:
        wire = await h2.Wire.connect(pair.grpc_port(pair.with_lane), opening())
        await wire.answer(1)
        monkeypatch.setattr(GrpcSignature, "answer", leaving)
        wire.write(call(3, infer("one", 5)))
        assert (await wire.answer(3)).status == 0
        while await wire.frame() is not None:
            pass
        wire.close()
        await passed()

    pair.run(ask())
    assert left == [3]


def test_typed_floats_ride(pair: LanePair, recognised: list[int]) -> None:
    request = pb.ModelInferRequest(model_name="real", id="t")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    tensor.contents.fp32_contents.extend([1.5, -2.0])

    async def learn_it() -> None:
        while not recognised:
            await both(pair, [call(3, request.SerializeToString())], [3])

    pair.run(learn_it())
    recognised.clear()
    answers = pair.run(both(pair, [call(3, request.SerializeToString())], [3]))
    reply = pb.ModelInferResponse.FromString(answers[3][1][2][5:])
    assert reply.raw_output_contents[0] == struct.pack("<2f", 2.5, -1.0)
    assert recognised == [1]


def test_calls_with_deadlines_ride(pair: LanePair, recognised: list[int]) -> None:
    timed = ("grpc-timeout", "50S")
    learning = headers(3, timed) + data(3, infer("one", 1))
    calls = [headers(stream, timed) + data(stream, infer("one", stream)) for stream in (5, 7)]
    pair.run(said(pair.grpc_port(pair.with_lane), [learning], [3]))
    recognised.clear()
    answers = pair.run(both(pair, [b"".join(calls)], [5, 7]))
    assert [kind for kind, _, _ in answers[7]] == [h2.HEADERS, h2.DATA, h2.HEADERS]
    assert sum(recognised) == 2
    pair.run(pair.settled())


def test_a_call_whose_message_does_not_come_ends_at_its_deadline(pair: LanePair) -> None:
    timed = ("grpc-timeout", "200m")
    pair.run(said(pair.grpc_port(pair.with_lane), [headers(3, timed) + data(3, infer("one", 1))], [3]))
    answers = pair.run(both(pair, [headers(5, timed)], [5]))
    assert b"Deadline Exceeded" in answers[5][0][2]


def test_clients_that_say_nothing_of_their_table_ride_until_they_use_it(pair: LanePair, recognised: list[int]) -> None:
    first = opening(table=b"")
    pair.run(both(pair, [call(3, infer("one", 5))], [3], first=first))
    assert recognised == [1]
    segments = [
        call(3, infer("one", 5)), added(5) + data(5, infer("one", 6)), call(7, infer("one", 7)),
        from_table(9) + data(9, infer("one", 8)),
    ]  # fmt: skip
    answers = pair.run(both(pair, segments, [3, 5, 7, 9], first=first))
    assert all([kind for kind, _, _ in answers[stream]] == [h2.HEADERS, h2.DATA, h2.HEADERS] for stream in (3, 5, 7, 9))
    pair.run(pair.settled())


def test_calls_in_one_segment_share_a_wave(pair: LanePair) -> None:
    counts = pair.service._dataplane.counts
    entries, before = counts.entries, pair.ridden()
    calls = [call(2 * n + 3, infer("one", n)) for n in range(40)]
    pair.run(both(pair, [b"".join(calls)], [2 * n + 3 for n in range(40)]))
    assert pair.ridden() == before + 40
    assert counts.entries - entries < 20


def test_errors_of_single_requests_are_theirs(pair: LanePair) -> None:
    before = pair.ridden()
    values = [1, UNLUCKY, 2, UNLUCKY, 3]
    calls = [call(2 * n + 3, infer("picky", value, "p")) for n, value in enumerate(values)]
    answers = pair.run(both(pair, [b"".join(calls)], [2 * n + 3 for n in range(5)]))
    assert [len(answers[2 * n + 3]) for n in range(5)] == [3, 1, 3, 1, 3]
    assert pair.ridden() == before + 5


def test_only_the_culprit_of_a_death_fails(pair: LanePair) -> None:
    DEATHS.clear()
    before = pair.ridden()
    calls = [call(2 * n + 3, infer("picky", value, "p")) for n, value in enumerate([1, 2, DEADLY, 3])]
    port = pair.grpc_port(pair.with_lane)
    answers = pair.run(said(port, [b"".join(calls)], [3, 5, 7, 9]))
    assert pair.ridden() == before + 4
    assert isinstance(answers, dict)
    assert [len(answers[stream]) for stream in (3, 5, 7, 9)] == [3, 3, 1, 3]
    assert sorted(DEATHS, reverse=True) == DEATHS
    assert DEATHS.count(DEATHS[0]) == 1, "they ran together again"
    pair.run(pair.settled())


_message = st.one_of(
    st.builds(
        lambda form, value: infer(form[0], value, form[1]),
        st.sampled_from(FORMS),
        st.sampled_from([1, 2, UNLUCKY]),
    ),
    st.builds(
        infer,
        st.sampled_from(["one", "two", "picky", "none"]),
        st.sampled_from([3, UNLUCKY]),
        st.sampled_from(["", "id-2", "with space", "é"]),
        shape=st.sampled_from([None, None, [1], [2, 2], [1, 3]]),
        raw=st.sampled_from([None, None, [b"abcd"], [b""], [bytes(8)], [bytes(8), bytes(8)]]),
        parameters=st.sampled_from([{}, {"priority": 2}, {"timeout": 10**9}, {"k": "v"}, {"sequence_id": 5}]),
        outputs=st.sampled_from([(), (), ("y",), ("q", "p"), ("nothing",)]),
    ),
    st.just(b"\xff\xff"),
)
_how = st.sampled_from(["plain", "plain", "plain", "padded", "split", "continued", "trailers", "deadline", "ends"])
_TRACED = ["-00", "-01", "-zz", "-0", "-0\0", "-000"]
_how |= st.sampled_from(_TRACED)


def frames_of_call(stream: int, message: bytes, how: str) -> tuple[bytes, bytes]:
    """A call as its headers and what follows them, in one of the ways in which clients may send it."""
    head, body = headers(stream), data(stream, message)
    if how == "padded":
        body = h2.raw(h2.DATA, h2.END_STREAM | h2.PADDED, stream, b"\x03" + h2.message(message) + b"\0\0\0")
    elif how == "split":
        whole = h2.message(message)
        body = h2.raw(h2.DATA, 0, stream, whole[:7]) + h2.raw(h2.DATA, h2.END_STREAM, stream, whole[7:])
    elif how == "continued":
        block = h2.block(h2.call_fields("ModelInfer"))
        head = h2.raw(h2.HEADERS, 0, stream, block[:9]) + h2.raw(h2.CONTINUATION, h2.END_HEADERS, stream, block[9:])
    elif how == "trailers":
        body = data(stream, message, 0) + h2.raw(h2.DATA, h2.END_STREAM, stream)
    elif how == "deadline":
        head = headers(stream, ("grpc-timeout", "50S"))
    elif how in _TRACED:
        head = headers(stream, ("traceparent", CONTEXT[:-4] + how))
    elif how == "ends":
        head = headers(stream, flags=h2.END_HEADERS | h2.END_STREAM)
        body = b""
    return head, body


@settings(max_examples=examples(70))
@given(
    calls=st.lists(st.tuples(_message, _how, st.integers(0, 5)), min_size=1, max_size=6),
    places=st.lists(st.integers(0, 1 << 16), max_size=6),
    window=st.sampled_from([65_535, 65_535, 20, 8]),
    table=st.sampled_from(["none", "given up", "empty", "used"]),
)
def test_any_calls_in_any_frames(
    pair: LanePair, calls: list[tuple[bytes, str, int]], places: list[int], window: int, table: str
) -> None:
    """Bodies come in another order than headers, answers into windows that are small."""
    heads, bodies = [], []
    for number, (message, how, order) in enumerate(calls):
        head, body = frames_of_call(2 * number + 3, message, how)
        heads.append(head)
        bodies.append((order, number, body))
    if calls[0][2] % 2:
        stream = b"".join(heads) + b"".join(body for _, _, body in sorted(bodies))
    else:
        stream = b"".join(head + body for head, (_, _, body) in zip(heads, bodies, strict=True))
    first = opening((h2.INITIAL_WINDOW, window), table=b"" if table in ("empty", "used") else NO_TABLE)
    awaited = list(range(3, 3 + 2 * len(calls), 2))
    if table == "given up":  # in the middle
        used = h2.raw(h2.HEADERS, h2.END_HEADERS, 101, NO_TABLE + h2.block(h2.call_fields("ModelInfer")))
        stream += used + data(101, infer("one", 1))
        awaited.append(101)
    elif table == "used":
        stream += b"".join(
            head(number) + data(number, infer("one", 1)) for number, head in ((101, added), (103, from_table))
        )
        awaited += [101, 103]
    pair.run(both(pair, cut(stream, places), awaited, first=first, grant=64 if window < 100 else 0))


@settings(max_examples=examples(25))
@given(
    fates=st.lists(
        st.sampled_from(["answer", "answer", "reset", "reset early", "late window"]), min_size=2, max_size=8
    ),
    places=st.lists(st.integers(0, 1 << 16), max_size=4),
    hangs_up=st.booleans(),
)
def test_calls_that_are_given_up(pair: LanePair, fates: list[str], places: list[int], hangs_up: bool) -> None:
    """The others are answered as if nothing were, and nothing of those that were given up is left."""
    parts, awaited = [], []
    for number, fate in enumerate(fates):
        stream = 2 * number + 3
        head, body = headers(stream), data(stream, infer("one", number))
        if fate == "reset early":
            parts.append(head + h2.rst_stream(stream))
        elif fate == "reset":
            parts.append(head + body + h2.rst_stream(stream))
        else:
            parts.append(head + (h2.window_update(stream, 5) if fate == "late window" else b"") + body)
            awaited.append(stream)
    segments = cut(b"".join(parts), places)

    async def run() -> None:
        if hangs_up:
            wire = await h2.Wire.connect(pair.grpc_port(pair.with_lane), opening())
            await wire.answer(1)
            for segment in segments:
                wire.write(segment)
                await passed()
            wire.close()
        else:
            on, off = await asyncio.gather(
                *(said(pair.grpc_port(app), segments, awaited) for app in (pair.with_lane, pair.without))
            )
            assert isinstance(on, dict)
            assert isinstance(off, dict)
            assert {s: on[s] for s in awaited} == {s: off[s] for s in awaited}
        await pair.settled()

    pair.run(run())


@pytest.mark.parametrize("pair", ["memory"], indirect=True)
@pytest.mark.parametrize("change", [1, 0x20])
@pytest.mark.parametrize(("model", "request_id"), [("one", "id-1"), ("two", "")])
def test_a_call_that_differs_in_one_byte(pair: LanePair, model: str, request_id: str, change: int) -> None:
    frames = call(3, infer(model, 7, request_id))

    async def ask(at: int) -> None:
        changed = bytearray(frames)
        changed[at] ^= change
        # what is said to be longer than it is ends within what follows, or waits for more
        more = b"".join(call(stream, infer("one", 1)) for stream in range(41, 49, 2))
        waits = at % len(headers(3)) < 3
        on, off = await asyncio.gather(
            *(
                said(pair.grpc_port(app), [bytes(changed), more], [] if waits else [47], perhaps=[3], rest=pair.rests)
                for app in (pair.with_lane, pair.without)
            )
        )
        assert on == off, (at, bytes(changed))

    async def ask_all() -> None:
        for first in range(0, len(frames), 32):
            await asyncio.gather(*(ask(at) for at in range(first, min(len(frames), first + 32))))

    pair.run(ask_all(), 300)
    pair.run(pair.settled())


def test_what_cannot_be_leased_goes_the_full_way(pair: LanePair) -> None:
    async def ask() -> None:
        await pair.settled()
        with no_lease(pair, "one"):
            before = pair.ridden()
            for request_id in ("", "id-1"):
                answers = await both(pair, [call(3, infer("one", 9, request_id))], [3])
                assert len(answers[3]) == 3, "it failed"
            assert pair.ridden() == before

    pair.run(ask())


def test_words_about_delivery_are_heard_each_time(pair: LanePair) -> None:
    """A request with an idempotency key is one execution, however often it is asked for."""

    async def ask() -> None:
        before = pair.ridden()
        message = infer("one", 9, parameters={"charonia_idempotency_key": "key-1"})
        for _ in range(4):
            await both(pair, [call(3, message)], [3])
        assert pair.ridden() == before

    pair.run(ask())


def test_failures_are_counted(pair: LanePair) -> None:
    def failures() -> int:
        page = pair.service.metrics.render().decode().splitlines()
        found = [line for line in page if line.startswith("nv_inference_request_failure") and 'model="picky"' in line]
        return sum(int(float(line.rpartition(" ")[2])) for line in found)

    before, ridden = failures(), pair.ridden()
    pair.run(both(pair, [call(3, infer("picky", UNLUCKY))], [3]))
    assert pair.ridden() == ridden + 1
    assert failures() == before + 1


@contextlib.contextmanager
def no_lease(pair: LanePair, model: str) -> Iterator[None]:
    """Every call of a model leaves the lane."""
    lease = pair.waves.leases._held[model]
    held, lease.held_requests = lease.held_requests, 0
    lease._asking = True  # for more, which does not come
    try:
        yield
    finally:
        lease.held_requests, lease._asking = held, False


def failing(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int) -> None:
    """Have a method of calls raise for stream `number`."""
    method = getattr(owner, name)

    def fails(self: Any, stream: Any, *more: Any) -> Any:
        if (stream if isinstance(stream, int) else stream.id) == number:
            raise ValueError("a defect")
        return method(self, stream, *more)

    monkeypatch.setattr(owner, name, fails)


async def three(pair: LanePair, message: bytes, *values: tuple[int, int], grant: int = 0) -> list[h2.Answer]:
    """What calls 3, 5 and 7 of a connection, in one segment, are answered."""
    wire = await h2.Wire.connect(pair.grpc_port(pair.with_lane), opening(*values))
    try:
        if grant:
            wire.write(h2.window_update(1, grant))
        await wire.answer(1)
        wire.write(b"".join(call(stream, message) for stream in (3, 5, 7)))
        if grant:
            wire.write(*(h2.window_update(stream, grant) for stream in (3, 5, 7)))
        return [await wire.answer(stream) for stream in (3, 5, 7)]
    finally:
        wire.close()


@pytest.mark.parametrize("method", ["adopt", "end"])
def test_a_call_that_cannot_leave_fails_at_once_and_others_go_on(
    pair: LanePair, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def ask() -> None:
        await pair.settled()
        failed = pair.service.metrics.counts("one", 1).failures["OTHER"]
        with no_lease(pair, "one"):
            if method == "adopt":  # it has replaced the call among the streams when it fails
                adopt, tried = Calls.adopt, []

                def adopting(self: Calls, lane_call: Any, *, ended: bool) -> Any:
                    stream = adopt(self, lane_call, ended=ended)
                    if stream.id == 5 and not tried:
                        tried.append(stream)
                        raise ValueError("a defect")
                    return stream

                monkeypatch.setattr(Calls, "adopt", adopting)
            else:
                failing(monkeypatch, Calls, method, 5)
            before = pair.ridden()
            answers = await three(pair, infer("one", 9))
            assert pair.ridden() == before
        assert [answer.status for answer in answers] == [0, 13, 0]
        assert "ValueError: a defect" in answers[1].details
        assert pair.service.metrics.counts("one", 1).failures["OTHER"] == failed + 1
        await pair.settled()

    pair.run(ask())


@pytest.mark.parametrize("small_windows", [False, True])
def test_an_answer_that_cannot_be_written_fails_its_call_and_others_go_on(
    pair: LanePair, monkeypatch: pytest.MonkeyPatch, small_windows: bool
) -> None:
    """By the template of the wave's answers, or slowly, within small windows."""
    if small_windows:
        failing(monkeypatch, Calls, "answer", 5)
    else:
        put, written = Outbox.put_answer, []

        def fails(self: Outbox, packed: bytes, size: int) -> None:
            written.append(packed)
            if len(written) == 2:
                raise ValueError("a defect")
            put(self, packed, size)

        monkeypatch.setattr(Outbox, "put_answer", fails)

    async def ask() -> None:
        await pair.settled()
        before = pair.ridden()
        grant = 10_000 if small_windows else 0
        answers = await three(pair, infer("one", 9), *[(4, 3)] * small_windows, grant=grant)
        assert pair.ridden() == before + 3
        # of a run of answers those behind the one that failed fail too
        assert [answer.status for answer in answers] == [0, 13, 13]
        assert "ValueError: a defect" in answers[1].details
        await pair.settled()

    pair.run(ask())
