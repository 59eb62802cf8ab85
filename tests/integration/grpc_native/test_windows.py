"""The native gRPC front and the windows of HTTP/2: what it may send, and what it lets clients send (RFC 9113, 5.2)."""

from __future__ import annotations

import asyncio
from typing import Any

import http2_client as http2
from grpc_calls import LIMIT_S, LIVE, echoed, infer, request
from http2_client import (
    DATA,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    Wire,
    message,
    open_call,
    raw,
    settings,
    whole_call,
    window_update,
)


class TestSendWindows:
    async def test_no_window_and_then_byte_by_byte(self, dial: http2.Dial) -> None:
        wire = await dial(PREFACE + settings((http2.INITIAL_WINDOW, 0)) + whole_call(1))
        await wire.until(HEADERS, 1)
        assert await wire.settle() == []
        for _ in message(LIVE):
            wire.write(window_update(1, 1))
            assert len((await wire.until(DATA, 1)).payload) == 1
        answer = await wire.answer(1)
        assert (answer.data, answer.status) == (message(LIVE), 0)

    async def test_settings_are_acknowledged_before_what_they_let_go(self, dial: http2.Dial) -> None:
        wire = await dial(PREFACE + settings((http2.INITIAL_WINDOW, 0)) + whole_call(1))
        await wire.until(HEADERS, 1)
        wire.write(settings((http2.INITIAL_WINDOW, 3)))
        first, second = await wire.frame(), await wire.frame()
        assert first is not None
        assert second is not None
        assert (first.kind, first.flags) == (SETTINGS, http2.ACK)
        assert (second.kind, len(second.payload)) == (DATA, 3)

    async def test_windows_become_negative(self, wire: Wire) -> None:
        wire.write(whole_call(1, "ModelInfer", infer(400_000)))
        await wire.data(65_535)
        wire.write(settings((http2.INITIAL_WINDOW, 1_000)), window_update(0, 1 << 20), window_update(1, 64_535))
        assert [frame.kind for frame in await wire.settle()] == [SETTINGS]
        wire.write(window_update(1, 1))
        assert len((await wire.until(DATA, 1)).payload) == 1
        wire.write(settings((http2.INITIAL_WINDOW, 500_000)))
        assert echoed((await wire.answer(1)).data) == b"\x01" * 400_000

    async def test_the_connection_has_a_window_too(self, wire: Wire) -> None:
        wire.write(settings((http2.INITIAL_WINDOW, 1 << 20)))
        wire.write(*(whole_call(number, "ModelInfer", infer(60_000)) for number in (1, 3, 5)))
        await wire.data(65_535)
        assert [frame for frame in await wire.settle() if frame.kind == DATA] == []
        # what needs no window is not held up by what does
        wire.write(open_call(7, "/nobody/knows"))
        assert (await wire.answer(7)).status == 12
        wire.write(*[window_update(0, 50_000)] * 3, window_update(0, 1 << 20))
        assert [echoed((await wire.answer(number)).data) for number in (1, 3, 5)] == [b"\x01" * 60_000] * 3

    async def test_frames_are_as_long_as_the_client_takes(self, wire: Wire) -> None:
        wire.write(settings((http2.INITIAL_WINDOW, 1 << 24)), window_update(0, 1 << 24))
        for number, longest in ((1, 16_384), (3, 100_000)):
            if number == 3:
                wire.write(settings((http2.MAX_FRAME, longest)))
            assert echoed((await wire.call(number, "ModelInfer", infer(400_000))).data) == b"\x01" * 400_000
            sizes = {len(frame.payload) for frame in wire.frames if (frame.kind, frame.stream) == (DATA, number)}
            assert max(sizes) == longest

    async def test_long_words_are_cut_to_what_every_client_takes(self, wire: Wire) -> None:
        body = request(model="☃" * 5_000).SerializeToString()  # each of them nine bytes, percent-encoded
        answer = await wire.call(1, "ModelInfer", body)
        assert answer.status == 5
        assert answer.details.startswith("Request for unknown model: '%E2%98%83")
        assert all(len(frame.payload) <= 8_192 for frame in wire.frames)


class TestReceiveWindows:
    async def test_credit_comes_while_a_message_does(self, wire: Wire) -> None:
        wire.write(open_call(1, "ModelInfer"))
        left, body = 1 << 20, message(infer(5 << 20))
        at = 0
        while at < len(body):
            size = min(16_000, left, len(body) - at)
            if not size:
                left += (await wire.until(WINDOW_UPDATE, 1)).word
                continue
            wire.write(raw(DATA, END_STREAM if at + size == len(body) else 0, 1, body[at : at + size]))
            at, left = at + size, left - size
        wire.write(settings((http2.INITIAL_WINDOW, 1 << 24)), window_update(0, 1 << 24))
        assert echoed((await wire.answer(1)).data) == b"\x01" * (5 << 20)

    async def test_more_than_the_window_is_refused(self, wire: Wire, handler: Any) -> None:
        """A stream takes so many requests at once; with others waiting it is given no more credit."""
        handler.gate.clear()
        wire.write(open_call(1, "ModelStreamInfer"), raw(DATA, 0, 1, message(infer()) * 300))
        while len(handler.requests) < 256:
            handler.waiting.clear()
            await asyncio.wait_for(handler.waiting.wait(), LIMIT_S)
        wire.write(raw(DATA, 0, 1, message(bytes(4 << 20))[:100_000]), raw(DATA, 0, 1, bytes(100_000)) * 10)
        assert (await wire.answer(1)).reset == http2.FLOW_CONTROL_ERROR
        assert (await wire.call(3)).status == 0
        while len(handler.cancelled_ids) < 256:
            handler.cancelled.clear()
            await asyncio.wait_for(handler.cancelled.wait(), LIMIT_S)
