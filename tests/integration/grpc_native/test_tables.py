"""The native gRPC front and the header tables of its clients (RFC 7541): what is remembered is never mistaken."""

from __future__ import annotations

from typing import Any

import hpack
import http2_client as http2
from grpc_calls import LIVE
from http2_client import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Wire,
    block,
    call_fields,
    literal,
    message,
    raw,
)


class TestHeaderTables:
    """Clients use their table until they know that we want none; what we remember of blocks must not be mistaken."""

    async def test_tables_are_each_connections_own(self, dial: http2.Dial, handler: Any) -> None:
        handler.is_ready = False
        wires = [await dial() for _ in range(3)]
        methods = ["ServerReady", "ServerLive", "ServerReady"]
        replies = {"ServerReady": message(), "ServerLive": message(LIVE)}
        same = b"\x83\x86\xbe" + block(call_fields()[4:])  # 62 is what came into the table last
        for wire, method in zip(wires, methods, strict=True):
            path = dict(call_fields(method))[":path"].encode()
            first = b"\x83\x86" + literal(b":path", path, 0x40) + block(call_fields()[4:])
            wire.write(raw(HEADERS, END_HEADERS, 1, first), raw(DATA, END_STREAM, 1, message()))
            assert (await wire.answer(1)).data == replies[method]
        for number in (3, 5):
            for wire, method in zip(wires, methods, strict=True):
                wire.write(raw(HEADERS, END_HEADERS, number, same), raw(DATA, END_STREAM, number, message()))
                assert (await wire.answer(number)).data == replies[method]

    async def test_a_table_that_was_given_up_comes_back(self, dial: http2.Dial, handler: Any) -> None:
        """Blocks are remembered while there is no table; then the same bytes mean something else."""
        handler.is_ready = False
        one, other = await dial(), await dial()
        numbers = iter(range(1, 99, 2))

        async def ask(wire: Wire, fields: bytes) -> http2.Answer:
            number = next(numbers)
            wire.write(raw(HEADERS, END_HEADERS, number, fields), raw(DATA, END_STREAM, number, message()))
            return await wire.answer(number)

        fields = block(call_fields("ServerLive"), 0x40)  # would enter a table
        same = b"\x83\x86\xbe" + block(call_fields()[4:])
        assert (await ask(one, b"\x20" + fields)).data == message(LIVE)
        for _ in range(3):
            assert (await ask(one, fields)).data == message(LIVE)
        ready = literal(b":path", dict(call_fields("ServerReady"))[":path"].encode(), 0x40)
        first = b"\x3f\xe1\x1f\x83\x86" + ready + block(call_fields()[4:])  # a table of 4096 bytes again
        for wire in (one, other):
            assert (await ask(wire, first)).data == message()
            assert (await ask(wire, same)).data == message()
            assert (await ask(wire, fields)).data == message(LIVE)  # and enters the table now
            assert (await ask(wire, b"\xc3\xc2\xc1" + block(call_fields()[3:]))).data == message(LIVE)
        third = await dial()
        assert (await ask(third, b"\x20" + fields)).data == message(LIVE)
        third.write(raw(HEADERS, END_HEADERS, 97, same))  # which means something to the others alone
        assert (await third.end())[0] == http2.COMPRESSION_ERROR

    async def test_a_table_is_kept_through_refusals_trailers_and_evictions(self, wire: Wire) -> None:
        encoder = hpack.Encoder()
        for number in range(1, 121, 2):
            fields = call_fields(
                "ServerLive" if number % 3 else "Nobody", ("note", "n" * number * 7), ("same", "value")
            )
            wire.write(raw(HEADERS, END_HEADERS, number, encoder.encode(fields)))
            if number % 5:
                wire.write(raw(DATA, END_STREAM, number, message()))
            else:
                wire.write(raw(DATA, 0, number, message()))
                trailers = encoder.encode([("trailing", "t" * number), ("same", "value")])
                wire.write(raw(HEADERS, END_HEADERS | END_STREAM, number, trailers))
        for number in range(1, 121, 2):
            assert (await wire.answer(number)).status == (0 if number % 3 else 12)
