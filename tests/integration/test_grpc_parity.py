"""The servers of gRPC side by side: what the same calls end with, and what each tells the service of them."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import struct
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import echo_handler as echo
import grpc
import grpc.aio
import grpc_wire
import pytest
from grpc_calls import LIMIT_S, SERVICE, infer_stub, raw, request, stream_stub
from grpc_fronts import FRONTS
from grpc_wire import fields

from charonia.errors import CharoniaError, ErrorCode, ResourceExhausted
from charonia.options.settings import GatewaySettings
from gateway.app import Front
from gateway.grpc.statuses import Status
from gateway.requests.delivery import ANYONE, Caller
from protos import grpc_service_pb2 as pb

SETTINGS = GatewaySettings(
    incarnation="test", grpc_address="127.0.0.1", grpc_port=0,
    grpc_restricted_protocol=((("logging",), "admin", "x"),),
)  # fmt: skip


class Recording(echo.EchoHandler):
    """Keeps the metadata of all calls that ask whose they are."""

    identifies = True  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.metadata: list[list[tuple[bytes, bytes]]] = []

    def identify(self, headers: Any) -> Caller:
        self.metadata.append(sorted(headers))
        return ANYONE


class Side:
    """One server, its handler, and a client of it."""

    def __init__(self, name: str, settings: GatewaySettings = SETTINGS) -> None:
        self.handler = Recording()
        self.front: Front = FRONTS[name](settings, self.handler)

    async def start(self) -> None:
        await self.front.start()
        options = [("grpc.max_receive_message_length", -1)]
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.front.port}", options)

    async def close(self) -> None:
        await self.channel.close()
        await self.front.close(0.0)


@pytest.fixture
async def sides() -> AsyncIterator[dict[str, Side]]:
    sides = {name: Side(name) for name in FRONTS}
    for side in sides.values():
        await side.start()
    yield sides
    for side in sides.values():
        await side.close()


Ending = tuple[Any, ...]


async def ending(call: Any) -> Ending:
    """Answer, status, details, metadata before and after of a call."""
    reply = None
    try:
        reply = await asyncio.wait_for(call, LIMIT_S)
    except grpc.aio.AioRpcError:
        pass
    before, after = await call.initial_metadata(), await call.trailing_metadata()
    return reply, await call.code(), await call.details(), sorted(before or ()), sorted(after or ())


async def alike(sides: dict[str, Side], ask: Callable[[Side], Awaitable[Ending]]) -> Ending:
    """What both end with."""
    native, other = [await ask(side) for side in sides.values()]
    assert native == other
    return native


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("metadata", {"metadata": [("a", "1"), ("b", "x  y,z;~"), ("a", "2"), ("empty", "")]}),
    ("binary metadata", {"metadata": [("k-bin", bytes(range(256))), ("k-bin", b"again"), ("empty-bin", b"")]}),
    ("long metadata", {"metadata": [(f"key-{number}", "v" * 200) for number in range(30)]}),
    ("gzip", {"compression": grpc.Compression.Gzip}),
    ("deflate", {"compression": grpc.Compression.Deflate}),
]


@pytest.mark.parametrize("options", [options for _, options in CALLS], ids=[name for name, _ in CALLS])
async def test_answers_and_metadata(sides: dict[str, Side], options: dict[str, Any]) -> None:
    message = request("r", size=4096)
    reply, code, *_ = await alike(sides, lambda side: ending(infer_stub(side.channel)(message, **options)))
    assert (code, reply.id, reply.raw_output_contents) == (grpc.StatusCode.OK, "r", [b"\x01" * 4096])
    native, other = [side.handler.metadata for side in sides.values()]
    assert native == other
    (seen,) = native
    sent = [(k.encode(), v if isinstance(v, bytes) else v.encode()) for k, v in options.get("metadata", [])]
    assert [each for each in seen if each[0] != b"user-agent"] == sorted(sent)
    assert dict(seen)[b"user-agent"].startswith(b"grpc-python-asyncio/")


@pytest.mark.parametrize("timeout_s", [0.5, 30, 7200, 1e6, 1e9])
async def test_timeouts(sides: dict[str, Side], timeout_s: float) -> None:
    left_s = []
    for side in sides.values():
        while not side.handler.requests:  # as often as a busy machine is too slow for it
            with contextlib.suppress(grpc.aio.AioRpcError):
                await infer_stub(side.channel)(request(), timeout=timeout_s)
        left_s.append(side.handler.requests[0].deadline_ns / 1e9 - time.time())
    assert left_s[0] == pytest.approx(left_s[1], rel=0.01, abs=5)


async def test_every_error(sides: dict[str, Side]) -> None:
    for code in ErrorCode:
        for side in sides.values():
            side.handler.failure = CharoniaError.of(code, f"100% wrong:\n\t'{code.name}' ü \U0001f41a")
        _, status, details, _, _ = await alike(sides, lambda side: ending(infer_stub(side.channel)(request())))
        assert status is not grpc.StatusCode.OK
        assert details == f"100% wrong:\n\t'{code.name}' ü \U0001f41a"
    full = ResourceExhausted("full")
    full.retry_after_s = 7
    for failure in (full, RuntimeError("secret"), CharoniaError.of(ErrorCode.INTERNAL, "x" * 20_000)):
        for side in sides.values():
            side.handler.failure = failure
        *_, after = await alike(sides, lambda side: ending(infer_stub(side.channel)(request())))
        assert after == ([("retry-after-ms", "7000")] if failure is full else [])


@pytest.mark.parametrize(
    ("path", "message", "code"),
    [
        (SERVICE + "ServerLive", b"", grpc.StatusCode.OK),
        (SERVICE + "ServerMetadata", b"", grpc.StatusCode.OK),
        (SERVICE + "ServerMetadata", b"\xff", grpc.StatusCode.INTERNAL),
        (SERVICE + "ModelInfer", b"\xff", grpc.StatusCode.INTERNAL),
        (SERVICE + "ModelInfer", b"", grpc.StatusCode.NOT_FOUND),
        (SERVICE + "ModelConfig", pb.ModelConfigRequest(name="nope").SerializeToString(), grpc.StatusCode.NOT_FOUND),
        (SERVICE + "LogSettings", b"", grpc.StatusCode.UNAVAILABLE),
        (SERVICE + "SystemSharedMemoryRegister", b"", grpc.StatusCode.UNIMPLEMENTED),
        (SERVICE + "Nothing", b"", grpc.StatusCode.UNIMPLEMENTED),
        ("/of.Another/ModelInfer", b"", grpc.StatusCode.UNIMPLEMENTED),
        ("/grpc.health.v1.Health/Check", b"", grpc.StatusCode.OK),
        ("/grpc.health.v1.Other/Check", b"", grpc.StatusCode.UNIMPLEMENTED),
        ("no path", b"", grpc.StatusCode.UNIMPLEMENTED),
    ],
)
async def test_every_kind_of_method(sides: dict[str, Side], path: str, message: bytes, code: grpc.StatusCode) -> None:
    assert (await alike(sides, lambda side: ending(side.channel.unary_unary(path)(message))))[1] is code


async def test_streams(sides: dict[str, Side]) -> None:
    async def ask(side: Side, *metadata: tuple[str, str]) -> Ending:
        side.handler.scripts["s"] = [1, 2, None]
        stream = stream_stub(side.channel)(metadata=metadata)
        answers = []
        try:
            for message in (request("a"), request("s", "stream", 4), request("b", "nope")):
                await stream.write(message)
                answers.append(await stream.read())
                if message.id == "s":
                    answers.append(await stream.read())
            await stream.done_writing()
            answers.append(await stream.read())
        except grpc.aio.AioRpcError:
            pass
        return answers, await stream.code(), await stream.details(), sorted(await stream.trailing_metadata())

    assert (await alike(sides, ask))[1] is grpc.StatusCode.OK
    answers, code, details, _ = await alike(sides, lambda side: ask(side, ("triton_grpc_error", "true")))
    assert (len(answers), code) == (3, grpc.StatusCode.NOT_FOUND)
    assert details == "Request for unknown model: 'nope' is not found"


async def test_a_stream_of_nothing_and_one_while_the_server_drains(sides: dict[str, Side]) -> None:
    async def ask(side: Side) -> Ending:
        stream = stream_stub(side.channel)()
        await stream.done_writing()
        return await stream.code(), await stream.details(), sorted(await stream.trailing_metadata())

    assert (await alike(sides, ask))[0] is grpc.StatusCode.OK
    for side in sides.values():
        await side.front.stop_accepting()
    assert (await alike(sides, ask))[0] is grpc.StatusCode.UNAVAILABLE
    assert (await alike(sides, lambda side: ending(raw(side.channel, "ServerReady")(b""))))[0] == b""


async def test_large_answers_to_a_client_with_narrow_windows(sides: dict[str, Side]) -> None:
    options = [
        ("grpc.http2.lookahead_bytes", 1024),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_receive_message_length", -1),
    ]

    async def ask(side: Side) -> Ending:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{side.front.port}", options) as channel:
            calls = [ending(infer_stub(channel)(request(str(size), size=size))) for size in (0, 16_380, 400_000)]
            return tuple(await asyncio.gather(*calls))

    for size, (reply, *_) in zip((0, 16_380, 400_000), await alike(sides, ask), strict=True):
        assert reply.raw_output_contents == [b"\x01" * size]


# -- what no client of gRPC sends -------------------------------------------------------------------------------------

INFER = SERVICE + "ModelInfer"
MESSAGE = request("x", size=400).SerializeToString()
PACKED = gzip.compress(MESSAGE, mtime=0)


def whole(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BL", flag, len(message)) + message


@pytest.mark.parametrize(
    ("headers", "data", "status"),
    [
        (fields(INFER), whole(MESSAGE), Status.OK),
        (fields(INFER, content_type="application/grpc+proto"), whole(MESSAGE), Status.OK),
        (fields(INFER, scheme="https"), whole(MESSAGE), Status.OK),
        (fields(INFER, grpc_timeout="99999999H"), whole(MESSAGE), Status.OK),
        (fields(INFER, grpc_timeout="soon"), whole(MESSAGE), Status.INTERNAL),
        (fields(INFER, k_bin="AAE"), whole(MESSAGE), Status.OK),
        (fields(INFER, k_bin="AAE="), whole(MESSAGE), Status.OK),
        (fields(INFER, k_bin="!"), whole(MESSAGE), Status.INTERNAL),
        (fields(INFER, grpc_encoding="gzip"), whole(PACKED, 1), Status.OK),
        (fields(INFER, grpc_encoding="deflate"), whole(zlib.compress(MESSAGE), 1), Status.OK),
        (fields(INFER, grpc_encoding="gzip"), whole(MESSAGE), Status.OK),
        (fields(INFER, grpc_encoding="gzip"), whole(b"", 1), Status.NOT_FOUND),
        (fields(INFER, grpc_encoding="gzip"), whole(PACKED + b"more", 1), Status.INTERNAL),
        (fields(INFER, grpc_encoding="gzip"), whole(PACKED[:-4], 1), Status.INTERNAL),
        (fields(INFER, grpc_encoding="gzip"), whole(MESSAGE, 1), Status.INTERNAL),
        (fields(INFER), whole(PACKED, 1), Status.INTERNAL),
        (fields("/"), whole(MESSAGE), Status.UNIMPLEMENTED),
    ],
)
async def test_statuses_of_odd_calls(sides: dict[str, Side], headers: Any, data: bytes, status: Status) -> None:
    """The texts differ where they are the server's own, those of the service do not."""
    native, other = [await grpc_wire.told(side.front.port, headers, data) for side in sides.values()]
    assert (native.status[0], native.data, native.reset) == (str(int(status)), other.data, None)
    assert other.status[0] == native.status[0]
    assert native.headers[":status"] == other.headers[":status"] == "200"
    metadata = [side.handler.metadata for side in sides.values()]
    assert metadata[0] == metadata[1]


@pytest.mark.parametrize(
    ("headers", "data", "native", "other"),
    [
        # grpcio takes the first
        (fields(SERVICE + "ServerLive"), whole(b"") * 2, Status.UNIMPLEMENTED, Status.OK),
        # it takes nine digits; the protocol has eight
        (fields(INFER, grpc_timeout="123456789S"), whole(MESSAGE), Status.INTERNAL, Status.OK),
        # it does not part values of one header, as the protocol asks
        (fields(INFER, k_bin="AAE,AQ"), whole(MESSAGE), Status.OK, Status.INTERNAL),
        # it has another status than the protocol for compressions that it does not know, and none for unknown flags
        (fields(INFER, grpc_encoding="br"), whole(MESSAGE, 1), Status.UNIMPLEMENTED, Status.INTERNAL),
        (fields(INFER), whole(MESSAGE, 2), Status.INTERNAL, Status.NOT_FOUND),
        # it does not look whether it is gRPC
        (fields(INFER, content_type="application/json"), whole(MESSAGE), 415, Status.OK),
        (fields(INFER, content_type=None), whole(MESSAGE), 415, Status.OK),
    ],
)
async def test_known_differences(sides: dict[str, Side], headers: Any, data: bytes, native: int, other: int) -> None:
    told = [await grpc_wire.told(side.front.port, headers, data) for side in sides.values()]
    found = [int(each.status[0] or each.headers[":status"]) for each in told]
    assert found == [native, other]


@pytest.mark.parametrize(
    ("headers", "data", "status"),
    [
        (fields(INFER), b"", (Status.UNIMPLEMENTED, "the method takes exactly one message")),
        (fields(INFER), whole(MESSAGE)[:-1], (Status.INTERNAL, "the stream ended within a message")),
        (fields(INFER), whole(MESSAGE)[:3], (Status.INTERNAL, "the stream ended within a message")),
    ],
)
async def test_what_grpcio_does_not_answer(headers: Any, data: bytes, status: tuple[int, str]) -> None:
    side = Side("native")
    await side.start()
    code, text = (await grpc_wire.told(side.front.port, headers, data)).status
    assert (int(code or -1), text) == status
    await side.close()


@pytest.mark.parametrize("level", ["none", "low", "medium", "high"])
@pytest.mark.parametrize("accepted", [None, "gzip", "identity, deflate ,gzip", "deflate", "br"])
async def test_answers_are_compressed_for_who_takes_it(level: str, accepted: str | None) -> None:
    side = Side("native", replace(SETTINGS, grpc_infer_response_compression_level=level))
    await side.start()
    told = await grpc_wire.told(side.front.port, fields(INFER, grpc_accept_encoding=accepted), whole(MESSAGE))
    await side.close()
    flag, size = struct.unpack(">BL", told.data[:5])
    assert size == len(told.data) - 5
    packs = level != "none" and "gzip" in (accepted or "")
    assert (flag, told.headers.get("grpc-encoding")) == ((1, "gzip") if packs else (0, None))
    answer = pb.ModelInferResponse.FromString(gzip.decompress(told.data[5:]) if flag else told.data[5:])
    assert answer.raw_output_contents == [b"\x01" * 400]
