"""Time limits of calls over a socket: what a call does after its time is over, and before its process is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgpack
import pytest

from charonia.backend import InstanceDied
from executors.backends.python.frame_calls import FrameCalls
from executors.backends.python.protocol.frames import Frame, Kind

REASON = "it ran longer than 10 s (a limit)"


class Clock:
    """The event loop's clock and timers, turned by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._timers: list[tuple[float, asyncio.Handle]] = []
        self.create_future = asyncio.get_running_loop().create_future

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[..., Any], *arguments: Any) -> asyncio.Handle:
        handle = asyncio.Handle(callback, arguments, asyncio.get_running_loop())
        self._timers.append((self.now_s + delay_s, handle))
        return handle

    def turn(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while due := [timer for timer in self._timers if timer[0] <= end_s and not timer[1].cancelled()]:
            first = min(due, key=lambda timer: timer[0])
            self._timers.remove(first)
            self.now_s = first[0]
            first[1]._run()
        self.now_s = end_s


class Transport:
    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 1

    def write(self, _data: Any) -> None: ...


class Calls(FrameCalls):
    """Keeps what it is asked to do to its process."""

    def __init__(self) -> None:
        super().__init__("m_0")
        self.clock = Clock()
        self._loop = cast(asyncio.AbstractEventLoop, self.clock)
        self._transport = cast(asyncio.Transport, Transport())
        self.done: list[str] = []

    @property
    def pid(self) -> int:
        return 1

    def last_lines(self) -> str:
        return ""

    def kill(self, reason: str) -> None:
        self.done.append(f"kill: {reason}")

    async def close(self, finalize_timeout_s: float) -> None: ...

    def connection_ended(self) -> None: ...

    def _print_tracebacks(self, reason: str) -> None:
        self.done.append("print")

    def _withdraw_reason(self) -> None:
        self.done.append("withdraw")

    def start(self) -> tuple[int, asyncio.Future[Frame]]:
        return self.begin(Kind.EXECUTE, b"\xc0", ceiling_s=10, ceiling="a limit")

    def say(self, kind: Kind, number: int) -> None:
        self.frame_received(Frame(kind, number, msgpack.packb(None), memoryview(b"")))


@pytest.fixture
async def calls() -> Calls:
    return Calls()


async def test_a_call_without_end_has_its_process_killed_after_its_tracebacks(calls: Calls) -> None:
    _, reply = calls.start()
    calls.clock.turn(9.9)
    assert calls.done == []
    calls.clock.turn(0.2)
    assert calls.done == ["print"]
    calls.clock.turn(60)
    assert calls.done == ["print", f"kill: {REASON}"]
    assert not reply.done()


async def test_a_call_that_ends_before_the_kill_is_excused(calls: Calls) -> None:
    number, reply = calls.start()
    calls.clock.turn(10.1)
    calls.say(Kind.DONE, number)
    assert (calls.done, reply.done()) == (["print", "withdraw"], True)
    calls.clock.turn(60)
    assert calls.done == ["print", "withdraw"]


async def test_another_call_that_does_not_end_is_not(calls: Calls) -> None:
    first, _ = calls.start()
    calls.start()
    calls.clock.turn(10.1)
    calls.say(Kind.DONE, first)
    calls.clock.turn(60)
    assert calls.done == ["print", "print", "withdraw", f"kill: {REASON}"]


async def test_a_response_before_the_kill_restarts_the_limit(calls: Calls) -> None:
    number, _ = calls.start()
    calls.clock.turn(10.1)
    calls.say(Kind.RESPONSE, number)
    calls.clock.turn(9.9)
    assert calls.done == ["print", "withdraw"]
    calls.clock.turn(60)
    assert calls.done == ["print", "withdraw", "print", f"kill: {REASON}"]


async def test_the_end_of_the_process_ends_the_limits(calls: Calls) -> None:
    _, reply = calls.start()
    calls.clock.turn(10.1)
    calls._end(InstanceDied("gone"))
    calls.clock.turn(60)
    assert calls.done == ["print"]
    assert isinstance(reply.exception(), InstanceDied)
