"""The native gRPC front as gRPC sees it: what calls of every shape are answered with (G26, G29)."""

from __future__ import annotations

import asyncio
import base64
import gzip
import tracemalloc
import urllib.parse
import zlib
from typing import Any

import http2_client as http2
import pytest
from grpc_calls import LIMIT_S, LIVE, SERVICE, infer
from http2_client import DATA, END_STREAM, RST_STREAM, Wire, data_frames, message, open_call, raw

from protos import grpc_service_pb2 as pb
from protos.health import SERVICE_NAME

MOST_BYTES = 1 << 20
OK, DEADLINE_EXCEEDED, NOT_FOUND = 0, 4, 5
RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 8, 12, 13
NOT_ONE = "the method takes exactly one message"
WITHIN = "the stream ended within a message"
LATE = ((1, "300m"), (3, "3S"), (5, "20S"))
"""Calls and their timeouts, of which a later one is for a busy machine that did not begin the one before in time."""
UNNAMED = "message is marked as compressed, but its call names no compression"


@pytest.fixture
def options() -> dict[str, Any]:
    return {
        "http_max_input_size": MOST_BYTES,
        "grpc_header_forward_pattern": "x-.*",
        "grpc_infer_response_compression_level": "low",
    }


class TestRefusals:
    @pytest.mark.parametrize(
        "path",
        ["/", "/a", "ServerLive", SERVICE, SERVICE + "serverlive", SERVICE + "ServerLive/", SERVICE + "ServerLive?a"],
    )
    async def test_a_method_nobody_knows(self, wire: Wire, path: str) -> None:
        answer = await wire.call(1, path=path)
        assert (answer.status, answer.details) == (UNIMPLEMENTED, "Method not found!")
        assert answer.headers == {
            ":status": "200", "content-type": "application/grpc",
            "grpc-status": "12", "grpc-message": "Method not found!",
        }  # fmt: skip

    @pytest.mark.parametrize(
        "kind",
        [None, "", "application/json", "application/grpc-web", "application/grpcx", "text/plain; application/grpc"],
    )
    async def test_another_content_type(self, wire: Wire, kind: str | None) -> None:
        answer = await wire.call(1, content_type=kind)
        assert (answer.headers, answer.blocks, answer.data, answer.ended) == ({":status": "415"}, 1, b"", True)

    @pytest.mark.parametrize("kind", ["application/grpc+proto", "application/grpc;charset=utf-8", "application/grpc+x"])
    async def test_content_types_of_grpc(self, wire: Wire, kind: str) -> None:
        assert (await wire.call(1, content_type=kind)).status == OK

    @pytest.mark.parametrize("method", ["GET", "PUT", "post", "OPTIONS", ""])
    async def test_another_verb(self, wire: Wire, method: str) -> None:
        wire.write(open_call(1, method=method), data_frames(1, b""), raw(DATA, END_STREAM, 1))
        answer = await wire.answer(1)
        assert (answer.headers, answer.ended) == ({":status": "405"}, True)

    @pytest.mark.parametrize(
        ("body", "status", "details"),
        [
            (b"", UNIMPLEMENTED, NOT_ONE),
            (message() + message(), UNIMPLEMENTED, NOT_ONE),
            (message() * 3, UNIMPLEMENTED, NOT_ONE),
            (b"\0", INTERNAL, WITHIN),
            (b"\0\0\0\0", INTERNAL, WITHIN),
            (message(b"abc")[:-1], INTERNAL, WITHIN),
            (message(), OK, ""),
            (message(b"abc"), INTERNAL, "failed to parse the ServerLiveRequest message"),
            (message(b"", 1), INTERNAL, UNNAMED),
            (message(b"", 2), INTERNAL, UNNAMED),
            (b"\0\x80\0\0\0", RESOURCE_EXHAUSTED, "Received message larger than max (2147483648 vs. 65536)"),
            (b"\0\xff\xff\xff\xff", RESOURCE_EXHAUSTED, "Received message larger than max (4294967295 vs. 65536)"),
        ],
    )
    @pytest.mark.parametrize("piece", [1, 5, 1 << 14])
    async def test_messages_in_pieces(self, wire: Wire, body: bytes, status: int, details: str, piece: int) -> None:
        wire.write(open_call(1), *(raw(DATA, 0, 1, body[at : at + piece]) for at in range(0, len(body), piece)))
        wire.write(raw(DATA, END_STREAM, 1))
        answer = await wire.answer(1)
        assert (answer.status, answer.details) == (status, details)
        assert answer.data == (message(LIVE) if status == OK else b"")
        assert await wire.settle() in ([], [(RST_STREAM, 0, 1, bytes(4))])
        assert (await wire.call(3)).status == OK

    async def test_a_second_message_is_not_waited_for(self, wire: Wire) -> None:
        wire.write(open_call(1), raw(DATA, 0, 1, message()), raw(DATA, 0, 1, message()))
        assert (await wire.answer(1)).status == UNIMPLEMENTED
        assert (await wire.until(RST_STREAM, 1)).word == http2.NO_ERROR

    async def test_words_are_percent_encoded(self, wire: Wire) -> None:
        answer = await wire.call(1, "ModelInfer", infer(model="50% né\n\x7f☃ "))
        assert answer.status == NOT_FOUND
        assert answer.details == "Request for unknown model: '50%25 n%C3%A9%0A%7F%E2%98%83 ' is not found"
        assert urllib.parse.unquote(answer.details) == "Request for unknown model: '50% né\n\x7f☃ ' is not found"

    async def test_an_error_is_of_trailers_alone(self, wire: Wire) -> None:
        answer = await wire.call(1, "ModelInfer", infer(model="nobody"))
        assert (answer.blocks, answer.data, answer.ended) == (1, b"", True)
        assert (answer.headers[":status"], answer.headers["content-type"]) == ("200", "application/grpc")

    async def test_health_is_answered_by_its_own_service(self, wire: Wire) -> None:
        answer = await wire.call(1, f"/{SERVICE_NAME}/Check")
        assert (answer.status, answer.data) == (OK, message(b"\x08\x01"))


class TestStreaming:
    async def test_messages_of_all_sizes(self, wire: Wire) -> None:
        wire.write(open_call(1, "ModelStreamInfer"))
        sizes = [64, 4, 100_000, 64, 70_000]
        sent = b"".join(message(infer(size)) for size in sizes)
        wire.write(http2.settings((http2.INITIAL_WINDOW, 1 << 24)), http2.window_update(0, 1 << 24))
        wire.write(data_frames(1, sent))
        answer = await wire.answer(1)
        assert answer.status == OK
        at, found = 0, []
        while at < len(answer.data):
            end = at + 5 + int.from_bytes(answer.data[at + 1 : at + 5])
            reply = pb.ModelStreamInferResponse.FromString(answer.data[at + 5 : end])
            found.append(len(reply.infer_response.raw_output_contents[0]))
            at = end
        assert found == sizes

    async def test_a_stream_of_nothing(self, wire: Wire) -> None:
        wire.write(raw(http2.HEADERS, 5, 1, http2.block(http2.call_fields("ModelStreamInfer"))))
        answer = await wire.answer(1)
        assert (answer.status, answer.data, answer.blocks) == (OK, b"", 1)

    async def test_a_broken_message_ends_the_stream_after_what_was_answered(self, wire: Wire) -> None:
        wire.write(open_call(1, "ModelStreamInfer"), raw(DATA, 0, 1, message(infer())))
        await wire.until(DATA, 1)
        wire.write(raw(DATA, 0, 1, b"\x01\0\0\0\0"))
        answer = await wire.answer(1)
        assert (answer.status, answer.details, answer.blocks) == (INTERNAL, UNNAMED, 2)
        assert (await wire.until(RST_STREAM, 1)).word == http2.NO_ERROR


class TestCompression:
    @pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
    async def test_requests_are_decompressed(self, wire: Wire, handler: Any, encoding: str, pack: Any) -> None:
        sent = pack(infer())
        wire.write(open_call(1, "ModelInfer", grpc_encoding=encoding), data_frames(1, message(sent, 1)))
        assert (await wire.answer(1)).status == OK
        # not each message has to be
        assert (await wire.call(3, "ModelInfer", infer(), grpc_encoding=encoding)).status == OK
        assert [bytes(one.inputs[0].data) for one in handler.requests] == [b"\x01" * 64] * 2

    @pytest.mark.parametrize("encoding", ["snappy", "br", "gzip, deflate", ""])
    async def test_other_compressions(self, wire: Wire, encoding: str) -> None:
        answer = await wire.call(1, grpc_encoding=encoding)
        assert (answer.status, answer.details) == (
            UNIMPLEMENTED, f"Compression algorithm '{encoding}' is not supported.",
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("encoding", "packed"),
        [
            ("gzip", b"no gzip at all"),
            ("gzip", gzip.compress(infer())[:-9]),
            ("gzip", zlib.compress(infer())),
            ("deflate", zlib.compress(infer())[:-5]),
            ("gzip", gzip.compress(infer())[:-8] + bytes(8)),
            ("gzip", gzip.compress(infer()) + b"more"),
            ("identity", gzip.compress(infer())),
        ],
        ids=["nothing", "cut", "of another kind", "deflated and cut", "of a wrong sum", "followed", "not named"],
    )
    async def test_what_cannot_be_decompressed(self, wire: Wire, encoding: str, packed: bytes) -> None:
        wire.write(open_call(1, "ModelInfer", grpc_encoding=encoding), data_frames(1, message(packed, 1)))
        answer = await wire.answer(1)
        assert answer.status == INTERNAL
        assert answer.details.startswith("failed to decompress the message: " if encoding != "identity" else UNNAMED)

    async def test_a_bomb_is_never_held(self, wire: Wire) -> None:
        packed = gzip.compress(bytes(64 * MOST_BYTES))
        await wire.settle()
        tracemalloc.start()
        try:
            wire.write(open_call(1, "ModelInfer", grpc_encoding="gzip"), data_frames(1, message(packed, 1)))
            answer = await wire.answer(1)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert answer.status == RESOURCE_EXHAUSTED
        assert answer.details == (
            f"decompressed request exceeds the maximum allowed input size of {MOST_BYTES} bytes. Use "
            "--http-max-input-size to increase the limit."
        )
        assert most < 8 * MOST_BYTES

    async def test_answers_are_compressed_for_who_takes_it(self, wire: Wire) -> None:
        answer = await wire.call(1, "ModelInfer", infer(4096), grpc_accept_encoding="identity, deflate,gzip")
        assert (answer.status, answer.headers["grpc-encoding"], answer.data[0]) == (OK, "gzip", 1)
        reply = pb.ModelInferResponse.FromString(gzip.decompress(answer.data[5:]))
        assert reply.raw_output_contents == [b"\x01" * 4096]
        answer = await wire.call(3, "ModelInfer", infer(4096), grpc_accept_encoding="identity,deflate")
        assert (answer.status, answer.data[0]) == (OK, 0)
        assert "grpc-encoding" not in answer.headers


class TestMetadata:
    async def test_words_and_bytes_come_as_they_were(self, wire: Wire, handler: Any) -> None:
        binary = bytes(range(256))
        padded = base64.b64encode(binary).decode()
        given = {"x-word": "a, b;c", "x-one-bin": padded, "x-bare-bin": padded.rstrip("="), "x-none-bin": "", "y": "z"}
        answer = await wire.call(1, "ModelInfer", infer(), **given)
        assert answer.status == OK
        forwarded = binary.decode("latin-1")
        assert handler.requests[0].parameters == {
            "x-word": "a, b;c", "x-one-bin": forwarded, "x-bare-bin": forwarded, "x-none-bin": "",
        }  # fmt: skip

    async def test_bytes_that_are_not_in_base64(self, wire: Wire) -> None:
        answer = await wire.call(1, **{"x-bin": "a*b"})
        assert (answer.status, answer.details) == (INTERNAL, "metadata 'x-bin' is not in base64")


class TestTimeouts:
    @pytest.mark.parametrize("word", ["99999999H", "0099999S", "10M", "5S", "90000m", "99999999u", "99999999n"])
    async def test_all_units_are_known(self, wire: Wire, word: str) -> None:
        found = (await wire.call(1, grpc_timeout=word)).status
        assert found == OK or (found == DEADLINE_EXCEEDED and word.endswith("n")), (
            "a tenth of a second may be too little"
        )

    @pytest.mark.parametrize("word", ["", "S", "5", "5s", "-5S", "+5S", "5 S", "123456789S", "1.5S", "0x1S", "٣S"])
    async def test_what_is_no_timeout(self, wire: Wire, word: str) -> None:
        answer = await wire.call(1, grpc_timeout=word.encode().decode("latin-1"))
        assert answer.status == INTERNAL
        assert answer.details.startswith("malformed grpc-timeout '")

    @pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
    async def test_a_call_that_is_late_ends(self, wire: Wire, handler: Any, method: str) -> None:
        handler.gate.clear()
        for number, timeout in LATE:
            begins = open_call(number, method, grpc_timeout=timeout)
            wire.write(begins, raw(DATA, method == "ModelInfer", number, message(infer())))
            answer = await wire.answer(number)
            assert (answer.status, answer.details, answer.blocks) == (DEADLINE_EXCEEDED, "Deadline Exceeded", 1)
            if handler.requests:
                break
        await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)

    async def test_a_call_without_any_time_is_not_begun(self, wire: Wire, handler: Any) -> None:
        answer = await wire.call(1, "ModelInfer", infer(), grpc_timeout="0n")
        assert (answer.status, answer.details) == (DEADLINE_EXCEEDED, "Deadline Exceeded")
        assert handler.requests == []

    async def test_a_call_that_never_ends_its_request_ends(self, wire: Wire) -> None:
        wire.write(open_call(1, "ModelInfer", grpc_timeout="1n"), raw(DATA, 0, 1, message(infer())[:20]))
        assert (await wire.answer(1)).status == DEADLINE_EXCEEDED
        assert (await wire.until(RST_STREAM, 1)).word == http2.NO_ERROR

    async def test_half_an_answer_is_cut(self, wire: Wire) -> None:
        """Its end cannot be said in a stream of which a message is begun."""
        wire.write(http2.settings((http2.INITIAL_WINDOW, 10)))
        for number, timeout in LATE:
            wire.write(http2.whole_call(number, "ModelInfer", infer(), grpc_timeout=timeout))
            answer = await wire.answer(number)
            if answer.reset is not None:
                break
        assert (len(answer.data), answer.reset) == (10, http2.CANCEL)

    async def test_a_client_that_cancels_is_not_waited_for(self, wire: Wire, handler: Any) -> None:
        handler.gate.clear()
        wire.write(http2.whole_call(1, "ModelInfer", infer()))
        await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        await wire.settle()
        wire.write(http2.rst_stream(1))
        await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)
        assert await wire.settle() == []
