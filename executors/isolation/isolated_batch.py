"""A `BatchInstance` in another process: its arrays lie in memory that both share, and calls block."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any

from charonia.backend import Array, InstanceDied, Interrupted, Outcome
from charonia.errors import CharoniaError
from executors.backends.python.frame_content import failure_of
from executors.backends.python.protocol.frames import Buffer, Frame, FrameError, FrameReader, Kind, pack
from executors.backends.python.protocol.shared_slots import ExecutorSlots
from executors.backends.python.python_instance import outputs_in
from executors.configuration.time_parameters import MAX_EXECUTION

from .forms import MAX_FRAME_BYTES, Made, described, outcome_of
from .process_handle import ModelProcess

_CLOSE_S = 10.0
_HEALTH_CEILING_S = 60.0
_END_S = 30.0
_AHEAD_S = 0.1
"""How often a batch whose time is over checks those ahead of it."""
_GONE_S = 5.0
"""On a busy machine it takes a while until the end of a process is seen."""


class _Run:
    """A batch under way, and those of the same instance that were when it began."""

    __slots__ = ("ahead", "call", "changed_s")

    def __init__(self, call: int, ahead: list[_Run]) -> None:
        self.call = call
        self.ahead = ahead
        self.changed_s = time.monotonic()
        """When it began, or when it ended; 0 before `call` is sent."""

    def end(self) -> None:
        self.changed_s = time.monotonic()
        self.ahead = []  # else each batch would keep all before it

    def since_s(self) -> float:
        """Since when it may be the one that its device executes: its own begin, or the last end of one ahead."""
        return max([self.changed_s, *(run.changed_s for run in self.ahead)])


class IsolatedBatches:
    """A `BatchInstance`. An execution longer than `ceiling_s` seconds (0: no limit) ends the process; it does not count
    that a batch waited for those of its instance that began before it.

    `parallel_parts` run batches of one instance at the same time, each over a connection of its own: this one, and
    others like it that only `add_part` adds.
    """

    def __init__(
        self,
        process: ModelProcess,
        connection: socket.socket,
        slots: ExecutorSlots | None,
        made: Made,
        ceiling_s: float,
        *,
        trusted: bool = False,
    ) -> None:
        """`trusted`: the process is not there to keep a model from doing harm."""
        self.stateless = made.stateless
        self.checks_health = made.checks_health
        self.rows_fail_alone = made.rows_fail_alone
        self.batch_sizes = tuple(made.batch_sizes)
        self.takes_encoded_strings = trusted and not self.batch_sizes
        """Whether `execute_encoded` may be called."""
        self.number = made.number
        self._others: list[IsolatedBatches] = []
        self._runs: set[_Run] = set()
        """Of all parts. Each changes only its own membership, in any thread."""
        self._run: _Run | None = None
        self._cancelled = 0
        """The call that `cancel` was for."""
        self._calls = 0
        self._process = process
        self._connection = connection
        self._within_s = -1.0
        self._slots = slots
        self._ceiling_s = ceiling_s
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._loop = asyncio.get_running_loop()
        process.on_end.add(self._interrupt)

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended."""
        return self._process.ended.is_set()

    @property
    def pid(self) -> int:
        """The id of the model's process."""
        return self._process.pid

    @property
    def parallel_parts(self) -> list[IsolatedBatches]:
        """This connection and the others. It is no attribute: shared memory would outlive `close` in a cycle."""
        return [self, *self._others]

    def add_part(self, part: IsolatedBatches) -> None:
        """Add a connection of the same instance. It is closed with this one."""
        part._runs = self._runs
        self._others.append(part)

    def cancel(self) -> None:
        """See `CancellablePart`. Not heeded by a process that has begun with the batch."""
        run = self._run
        if run is not None and run.call:
            self._cancelled = run.call
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._process.answer, Kind.CANCEL, run.call, self.number)

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array] | Outcome:
        """See `BatchInstance.execute`. Raises `InstanceDied` when the process has ended or was too slow, `Interrupted`
        after `cancel`.
        """
        return self._executed(inputs, outputs, None)

    def execute_encoded(
        self, inputs: Mapping[str, Array], outputs: Sequence[str], rows: Sequence[int]
    ) -> Mapping[str, Array] | Outcome:
        """See `EncodedInstance`. Raises as `execute`."""
        return self._executed(inputs, outputs, list(rows))

    def _executed(
        self, inputs: Mapping[str, Array], outputs: Sequence[str], rows: list[int] | None
    ) -> Mapping[str, Array] | Outcome:
        tensors, data = described(inputs)
        slots = self._slots
        taken = expected = None
        if slots is not None:
            taken, expected = slots.put(data), slots.expect()
        try:
            content = [list(outputs), tensors, taken, expected]
            if rows is not None:
                content.append(rows)
            frame = self._execute(content, data if taken is None else ())
            if frame.kind is Kind.FAILED:
                raise failure_of(frame)
            if frame.kind is Kind.CANCEL and frame.call == self._cancelled:
                raise Interrupted("a batch was cancelled", blameless=True)
            return outcome_of(frame, partial(outputs_in, slots, expected), rows)
        except FrameError as error:
            raise self._killed(f"it does not keep to the protocol: {error}") from None
        finally:
            if slots is not None and expected is not None:
                slots.drop(expected[0])

    async def check_health(self) -> bool:
        """See `SelfCheckingInstance`."""
        frame = await self._process.call(
            Kind.HEALTH, self.number, ceiling_s=_HEALTH_CEILING_S, ceiling="a check of health"
        )
        if frame.kind is Kind.FAILED:
            raise failure_of(frame)
        return frame.content() is True

    def close(self) -> None:
        """Close the model's instance. A second call does nothing."""
        if self._connection.fileno() < 0:
            return
        for part in self._others:
            part.disconnect()
        if not self._process.ended.is_set():
            with contextlib.suppress(InstanceDied, CharoniaError, FrameError):
                self._call(Kind.FINALIZE, None, (), _CLOSE_S)
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection alone."""
        self._process.on_end.discard(self._interrupt)
        self._connection.close()

    def _execute(self, content: Any, data: Sequence[Buffer]) -> Frame:
        self._calls = self._calls % 0xFFFFFFFF + 1
        self._run = run = _Run(self._calls, list(self._runs))
        self._runs.add(run)
        try:
            return self._call(Kind.EXECUTE, content, data, self._ceiling_s, run)
        finally:
            self._run = None
            self._runs.discard(run)
            run.end()

    def _call(
        self, kind: Kind, content: Any, data: Sequence[Buffer], within_s: float, run: _Run | None = None
    ) -> Frame:
        process = self._process
        if process.ended.is_set():
            raise InstanceDied(str(process.dead), process.last_lines(), blameless=True)
        run = _Run(0, []) if run is None else run
        process.executing.add(self)
        try:
            if within_s != self._within_s:
                self._limit(within_s)
            for buffer in pack(kind, run.call, content, data):
                self._connection.sendall(buffer)
            while True:
                try:
                    count = self._connection.recv_into(self._reader.get_buffer())
                except BlockingIOError:
                    # one ahead that is still under way is ended by its own limit, if it takes too long
                    left_s = run.since_s() + within_s - time.monotonic()
                    if left_s <= 0 and not any(one in self._runs for one in run.ahead):
                        raise
                    self._limit(max(left_s, _AHEAD_S))
                    continue
                if not count:
                    raise self._died()
                frames = self._reader.received(count)
                if frames:
                    return frames[0]
                if within_s and time.monotonic() > run.since_s() + within_s:
                    raise TimeoutError
        except (TimeoutError, BlockingIOError):
            raise self._killed(f"it ran longer than {within_s:g} s ({MAX_EXECUTION})") from None
        except OSError:
            raise self._died() from None
        finally:
            process.executing.discard(self)

    def _limit(self, seconds: float) -> None:
        """Let the kernel bound each wait for the socket (0: no limit).

        A timeout of Python's would be one more system call before each read and write.
        """
        whole = int(seconds)
        value = struct.pack("@ll", whole, ceil((seconds - whole) * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._connection.setsockopt(socket.SOL_SOCKET, option, value)
        self._within_s = seconds

    def _killed(self, reason: str) -> InstanceDied:
        self._process.executing.add(self)
        with contextlib.suppress(RuntimeError):  # the event loop has ended: so does the process
            self._loop.call_soon_threadsafe(self._process.kill_for, self, reason)
        return self._died()

    def _died(self) -> InstanceDied:
        """Wait until the process is gone. One that closed this connection alone is ended."""
        process = self._process
        if not process.ended.wait(_GONE_S):
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(process.kill, "it closed its connection")
            process.ended.wait(_END_S)
        process.executing.discard(self)
        if process.dead is None:
            return InstanceDied(f"the process of an instance (pid {process.pid}) does not end")
        return process.death_of(self)

    def _interrupt(self) -> None:
        """End a wait: processes that the model has started may hold the other end."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
