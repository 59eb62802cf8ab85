"""Keeps lanes busy: a closed loop with so many requests in flight, or an open one that sends at given times.

In an open loop latency counts from the time at which a request was to be sent, so that a slow server cannot hide what
waited for it; the time from its real sending is kept apart.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .encoded_requests import Turn
from .window_figures import Tally

RECONNECT_AFTER_S = 0.05
_DRAIN_S = 30.0
_LATE_NS = 1_000_000
_CLOCK_MONOTONIC = 1
_NONBLOCK = 0o4000


class Lane(Protocol):
    """`http1_lane.Http1Lane` or `http2_lane.Http2Lane`."""

    call: Any
    first_ns: int

    @property
    def is_open(self) -> bool: ...
    async def open(self) -> None: ...
    def send(self, message: bytes) -> None: ...
    def close(self) -> None: ...


class Requests(Protocol):
    def message(self, stream: int, step: int, turn: Turn | None) -> bytes: ...


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Sequences of one worker: it takes each `stride`-th correlation id from `first` on, up to `end` (0: no end)."""

    length: int
    variation_percent: float
    first: int
    stride: int
    end: int


class Sequences:
    """Begins sequences: their ids, lengths and streams of data in turn. A length of 0 is that of the stream."""

    def __init__(self, plan: SequencePlan, lengths: list[int], seed: int) -> None:
        self._plan, self._lengths = plan, lengths
        self._random = np.random.default_rng(seed)
        self._next_id = plan.first
        self._begun = 0
        self._active: set[int] = set()

    def begin(self) -> Sequence:
        """The next one. An id that is in use is passed over."""
        while self._next_id in self._active:
            self._advance()
        found = self._next_id
        self._advance()
        self._active.add(found)
        stream = self._begun % len(self._lengths)
        self._begun += 1
        length = self._plan.length
        if length:
            part = self._plan.variation_percent / 100
            length = max(1, round(length * (1 + float(self._random.uniform(-part, part)))))
        return Sequence(found, length or self._lengths[stream], stream)

    def _advance(self) -> None:
        self._next_id += self._plan.stride
        if self._plan.end and self._next_id >= self._plan.end:
            self._next_id = self._plan.first

    def end(self, sequence: Sequence) -> None:
        self._active.discard(sequence.correlation_id)


@dataclass(slots=True)
class Sequence:
    """A sequence that is under way: `sent` of its `length` requests."""

    correlation_id: int
    length: int
    stream: int
    sent: int = 0

    def turn(self, *, last: bool = False) -> Turn:
        """The place of the next request."""
        self.sent += 1
        return Turn(self.correlation_id, self.sent == 1, last or self.sent >= self.length)


@dataclass(slots=True)
class Call:
    """A lane's request in flight, and what the lane is to send next."""

    intended_ns: int = 0
    started_ns: int = 0
    sent_ns: int = 0
    response_ns: int = 0
    responses: int = 0
    counts: bool = True
    busy: bool = False
    reopens: bool = False
    sequence: Sequence | None = None
    due: deque[int] = field(default_factory=deque)


class LoadLoop:
    """The lanes of one process. `steps` is the number of requests in each stream of data."""

    def __init__(
        self, requests: Requests, steps: list[int], make_lane: Callable[[LoadLoop], Lane], sequences: Sequences | None,
        max_lanes: int, offset: int,
    ) -> None:  # fmt: skip
        self._requests, self._steps, self._make_lane = requests, steps, make_lane
        self._sequences, self._max_lanes = sequences, max_lanes
        self._step = offset
        self._lanes: list[Lane] = []
        self._free: list[Lane] = []
        self._due: deque[int] = deque()
        self._times: Iterator[int] | None = None
        self._next_ns = self._begin_ns = 0
        self._opening = 0
        self._turn = self._sequence_lanes = 0
        self._left: int | None = None
        self._runs = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._timer = PreciseTimer(self._wake)
        self._tasks: set[asyncio.Task[None]] = set()
        self.tally = Tally(0, 0)

    # -- levels --------------------------------------------------------------------------------------------------------

    async def start_closed(self, lanes: int, limit: int | None) -> None:
        """Keeps one request of each lane in flight, `limit` requests in all. Raises `OSError` when the server cannot be
        reached."""
        await self._grow(lanes)
        self._begin(None, limit)
        for lane in self._lanes[:lanes]:
            self._next(lane)

    async def start_open(self, lanes: int, times: Iterator[int], limit: int | None) -> None:
        """Sends at `times`, in nanoseconds from now, on as many lanes as it takes, `lanes` at first; sequences have
        one each. Raises `OSError`."""
        await self._grow(lanes)
        self._turn, self._sequence_lanes = 0, lanes
        if self._sequences is None:  # those of the level before are used again
            self._lanes = [lane for lane in self._lanes if lane.is_open]
            self._free = list(self._lanes)
        self._due.clear()
        self._begin(times, limit)
        self._begin_ns = time.perf_counter_ns()
        self._next_ns = self._begin_ns + next(times)
        self._wake()

    def _begin(self, times: Iterator[int] | None, limit: int | None) -> None:
        self._runs, self._times, self._left = True, times, limit
        now_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        self.tally = Tally(now_ns, cpu_ns)
        if limit == 0:  # a worker without a share of the requests has no window either
            self.tally.finish(now_ns, cpu_ns)

    async def stop(self) -> None:
        """Sends no more, ends what sequences are under way, and waits for the answers, at most 30 s."""
        self._runs = False
        self._timer.set(0)
        self._due.clear()
        if self._tasks:  # a lane that one of them opened in the next level would be there twice
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            self._opening = 0
        for lane in self._lanes:
            lane.call.reopens = False
            lane.call.due.clear()
            if not lane.call.busy:
                self._end_sequence(lane)
        if self._in_flight:
            self._idle.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _DRAIN_S)
        for lane in self._lanes:
            if lane.call.busy:  # its answer never came: the connection is of no more use
                lane.close()
                lane.call.busy = False
                self._in_flight -= 1
        self._free.clear()

    def cut(self) -> dict[str, Any]:
        """The figures since the last cut."""
        now_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        tally, self.tally = self.tally, Tally(now_ns, cpu_ns)
        tally.finish(now_ns, cpu_ns)
        return tally.packed(is_open=self._times is not None)

    @property
    def ended_requests(self) -> int:
        """Requests since the last cut that have their answer, or none will come."""
        return len(self.tally.latencies) + self.tally.errors.total()

    def close(self) -> None:
        self._runs = False
        self._timer.close()
        for lane in self._lanes:
            lane.close()
        for task in self._tasks:
            task.cancel()

    async def _grow(self, lanes: int) -> None:
        while len(self._lanes) < lanes:
            self._lanes.append(self._make_lane(self))
            self._lanes[-1].call = Call()
        for lane in self._lanes[:lanes]:
            if not lane.is_open:
                await lane.open()

    # -- sending -------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        times = self._times
        if not self._runs or times is None:
            return
        try:
            while self._left != 0 and self._next_ns <= time.perf_counter_ns():
                due_ns, self._next_ns = self._next_ns, self._begin_ns + next(times)
                self._dispatch(due_ns)
        finally:  # one request that cannot be sent does not end the load
            self._timer.set(self._next_ns if self._left != 0 else 0)

    def _dispatch(self, due_ns: int) -> None:
        self.tally.due += 1
        if self._sequences is not None:
            lane = self._lanes[self._turn % self._sequence_lanes]
            self._turn += 1
            lane.call.due.append(due_ns)
            self._next(lane)
            return
        self._due.append(due_ns)
        if self._free:
            self._next(self._free.pop())
        elif len(self._lanes) + self._opening < self._max_lanes:
            self._opening += 1
            self._spawn(self._open_another())

    async def _open_another(self) -> None:
        lane = self._make_lane(self)
        lane.call = Call()
        try:
            await lane.open()
        except OSError as error:
            self.tally.failed(f"cannot connect: {error}")
            return
        finally:
            self._opening -= 1
        self._lanes.append(lane)
        self._next(lane)

    def _send(self, lane: Lane, due_ns: int, *, last: bool = False) -> None:
        call: Call = lane.call
        if self._left is not None and not last:
            if not self._left:
                return
            self._left -= 1
        if self._sequences is not None:
            if call.sequence is None:
                call.sequence = self._sequences.begin()
            sequence = call.sequence
            stream, step = sequence.stream, sequence.sent % self._steps[sequence.stream]
            message = self._requests.message(stream, step, sequence.turn(last=last))
        else:
            message = self._requests.message(0, self._step % self._steps[0], None)
            self._step += 1
        call.intended_ns, call.response_ns, call.responses = due_ns, 0, 0
        call.busy, call.counts = True, not last
        self._in_flight += 1
        call.started_ns = time.perf_counter_ns()
        lane.send(message)
        call.sent_ns = time.perf_counter_ns()

    def responded(self, lane: Lane, now_ns: int) -> None:
        """A response of a stream came."""
        call: Call = lane.call
        if call.counts:
            if call.responses:
                self.tally.gaps.append(now_ns - call.response_ns)
            else:
                self.tally.first.append(now_ns - call.intended_ns)
            self.tally.responses += 1
        call.response_ns = now_ns
        call.responses += 1

    def ended(self, lane: Lane, error: str | None) -> None:
        """A request has its answer, or will have none."""
        now_ns = time.perf_counter_ns()
        call: Call = lane.call
        call.busy = False
        self._in_flight -= 1
        if call.counts:
            self._record(call, lane.first_ns or now_ns, now_ns, error)
            if self._left == 0 and not self._in_flight:
                self.tally.finish(now_ns, time.process_time_ns())
        sequence = call.sequence
        if sequence is not None and self._sequences is not None and (error or sequence.sent >= sequence.length):
            self._sequences.end(sequence)
            call.sequence = None
        if not self._runs:
            if call.counts and lane.is_open:
                self._end_sequence(lane)
            if not self._in_flight:
                self._idle.set()
        elif error and lane.is_open:
            # a server that refuses at once is not to be asked from within the refusal
            asyncio.get_running_loop().call_soon(self._next, lane)
        else:
            self._next(lane)

    def _record(self, call: Call, first_ns: int, now_ns: int, error: str | None) -> None:
        tally = self.tally
        if error is not None:
            tally.failed(error)
            return
        tally.latencies.append(now_ns - call.intended_ns)
        tally.send_ns += max(0, call.sent_ns - call.started_ns)
        if call.responses < 2:  # between the responses of a stream nothing is received
            tally.receive_ns += now_ns - first_ns
        if self._times is not None:
            tally.services.append(now_ns - call.started_ns)
            tally.late += call.started_ns - call.intended_ns > _LATE_NS
        if not call.responses:
            tally.responses += 1

    def _next(self, lane: Lane) -> None:
        """A lane is free. It is opened first if it is not: servers close connections after answers, and idle ones."""
        call: Call = lane.call
        if not self._runs or call.busy or call.reopens:
            return
        if not lane.is_open:
            call.reopens = True
            self._spawn(self._reopen(lane))
        elif self._times is None:
            self._send(lane, time.perf_counter_ns())
        elif call.due:
            self._send(lane, call.due.popleft())
        elif self._sequences is not None:
            return
        elif self._due:
            self._send(lane, self._due.popleft())
        else:
            self._free.append(lane)

    def _end_sequence(self, lane: Lane) -> None:
        """Sends the request that ends a sequence, so that the server can forget it."""
        call: Call = lane.call
        if call.sequence is not None and lane.is_open:
            call.sequence.length = call.sequence.sent + 1
            self._send(lane, time.perf_counter_ns(), last=True)

    async def _reopen(self, lane: Lane) -> None:
        while self._runs:
            try:
                await lane.open()
            except OSError as error:
                self.tally.failed(f"cannot connect: {error}")
                await asyncio.sleep(RECONNECT_AFTER_S)
            else:
                lane.call.reopens = False
                self._next(lane)
                return

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class PreciseTimer:
    """Calls back at a time of `perf_counter_ns`. Timers of event loops are a millisecond coarse, so that on Linux one
    of the kernel's is used; it is set to the nanosecond."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._descriptor = -1
        self._handle: asyncio.TimerHandle | None = None
        self._library: Any = None
        if sys.platform == "linux":
            self._library = ctypes.CDLL(None, use_errno=True)
            self._descriptor = self._library.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK)
        if self._descriptor >= 0:
            asyncio.get_running_loop().add_reader(self._descriptor, self._rang)

    def set(self, at_ns: int) -> None:
        """Rings once at a time, never for 0."""
        if self._descriptor >= 0:
            left_ns = max(1, at_ns - time.perf_counter_ns()) if at_ns else 0
            wanted = (ctypes.c_long * 4)(0, 0, *divmod(left_ns, 1_000_000_000))
            self._library.timerfd_settime(self._descriptor, 0, wanted, None)
            return
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if at_ns:
            left_s = (at_ns - time.perf_counter_ns()) / 1e9
            self._handle = asyncio.get_running_loop().call_later(max(0.0, left_s), self._callback)

    def _rang(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._descriptor, 8)
        self._callback()

    def close(self) -> None:
        self.set(0)
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
