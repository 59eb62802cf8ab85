"""Requests that were read in full and share waves all the same: each has a coroutine that waits for its answer."""

from __future__ import annotations

import asyncio

from charonia.errors import CharoniaError, shed
from charonia.tensors import Buffer
from charonia.wire import ResponseRecord, WaveReply

from .door import Door
from .lane_calls import Call
from .pending_waves import response_in


class AwaitedCall(Call):
    """A request whose answer is a future's result: a response record, or None where it has to go by itself."""

    __slots__ = ("future",)

    def __init__(self, signature: Awaited, data: tuple[Buffer, ...], client_id: bytes, deadline_ns: int) -> None:
        super().__init__(signature, data, client_id)
        self.deadline_ns = deadline_ns
        self.future: asyncio.Future[ResponseRecord | None] = asyncio.get_running_loop().create_future()


class Awaited:
    """The requests of one door that are awaited; see `gateway.lane.lane_calls.Signature`."""

    __slots__ = ("door",)

    counts_itself = False

    def __init__(self, door: Door) -> None:
        self.door = door

    async def infer(self, data: tuple[Buffer, ...], client_id: bytes, deadline_ns: int) -> ResponseRecord | None:
        """The response record of a request that is in no wave yet; None where it has to go by itself.

        Raises `DeadlineExceeded` at its deadline and `LogUnavailable` where the outcome is unknown. Cancelling the
        caller cancels the request.
        """
        door = self.door
        held_bytes = door.held_bytes
        if held_bytes and not door.waves.hold(held_bytes):
            return None  # the full way says why
        call = AwaitedCall(self, data, client_id, deadline_ns)
        door.waiting.append(call)
        door.gathering.came(door)
        if deadline_ns:
            door.waves.expiry.watch(deadline_ns)
        try:
            return await call.future
        except asyncio.CancelledError:
            call.abandon()
            raise
        except CharoniaError as error:
            raise shed(error) from None
        finally:
            if held_bytes:
                door.waves.release(held_bytes)

    def answer(self, calls: list[Call], start: int, reply: WaveReply) -> None:
        for index, call in enumerate(calls, start):
            assert isinstance(call, AwaitedCall)
            if not call.gone and not call.future.done():
                call.future.set_result(response_in(reply, index))

    def respond(self, call: Call, record: ResponseRecord) -> None:
        assert isinstance(call, AwaitedCall)
        if not call.future.done():
            call.future.set_result(record)

    def fail(self, call: Call, error: CharoniaError) -> None:
        """The request has no outcome that is known."""
        assert isinstance(call, AwaitedCall)
        if not call.future.done():
            call.future.set_exception(error)

    def leave(self, call: Call) -> None:
        assert isinstance(call, AwaitedCall)
        if not call.future.done():
            call.future.set_result(None)
