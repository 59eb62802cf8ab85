"""One execution for all who ask the same at once: callers share a flight, and any of them may leave.

A flight is no caller's own. It goes on while any caller waits; its errors are those of all its callers, unless
they were about one caller's terms (its deadline, its cancellation, its queue time-out): then only that one is told and
the next one's request is sent in its place. Within one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from charonia.calls.caller import DEADLINE_EXCEEDED, SERVER_EXITING
from charonia.calls.shedding import shed
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, DeadlineExceeded, ErrorCode, InternalError, LogUnavailable, Unavailable
from charonia.inference import InferenceRequest
from charonia.wire import ResponseRecord

_OF_ONE_CALLER = {ErrorCode.DEADLINE_EXCEEDED, ErrorCode.CANCELLED}


@dataclass(frozen=True, slots=True)
class Landed:
    """An answer, maybe a failure of the model; `executed` for the one caller on whose account it was made."""

    record: ResponseRecord
    executed: bool


class Passenger:
    """One caller: how its own request is sent, and what it waits for. `sent` once its request is the one."""

    __slots__ = ("future", "request", "run", "sent", "tenant")

    def __init__(self, request: InferenceRequest, tenant: str, run: Callable[[], Awaitable[ResponseRecord]]) -> None:
        self.request = request
        self.tenant = tenant
        self.run = run
        self.sent = False
        self.future: asyncio.Future[Landed] = asyncio.get_running_loop().create_future()

    def fail(self, error: CharoniaError) -> None:
        if not self.future.done():
            # an error of its own: one that several raise collects the tracebacks of them all
            self.future.set_exception(shed(error))

    def answer(self, record: ResponseRecord, *, executed: bool) -> None:
        if not self.future.done():
            outputs, parameters = list(record.outputs), dict(record.parameters)
            error = shed(record.error) if record.error is not None else None
            own = ResponseRecord(record.id, record.model, record.version, outputs, parameters, error)
            self.future.set_result(Landed(own, executed))

    def expire(self) -> None:
        """At its deadline. A request that was sent is ended by the data plane, which may lose that race."""
        if not self.sent:
            self.fail(DeadlineExceeded(DEADLINE_EXCEEDED))


def is_of(passenger: Passenger, error: CharoniaError, others: list[Passenger]) -> bool:
    """Whether an error is about one caller's terms and says nothing about the others."""
    if error.code in _OF_ONE_CALLER:
        return True
    if error.code is ErrorCode.UNAVAILABLE and not isinstance(error, LogUnavailable):
        return passenger.request.timeout_us > 0
    return error.code is ErrorCode.RESOURCE_EXHAUSTED and any(one.tenant != passenger.tenant for one in others)


class Flight:
    """`look` first (an answer that is there already), then the requests of its passengers until one is answered."""

    def __init__(
        self,
        look: Callable[[], Awaitable[ResponseRecord | None]],
        landed: Callable[[ResponseRecord], None],
        ended: Callable[[Flight], None],
    ) -> None:
        self._look = look
        self._landed = landed
        self._ended = ended
        self._passengers: list[Passenger] = []
        self._task: asyncio.Task[None] | None = None

    async def take(self, passenger: Passenger) -> Landed:
        """Wait with the others. Raises the flight's error, or `DeadlineExceeded` at the caller's own deadline."""
        self._passengers.append(passenger)
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._fly())
        timer = None
        if passenger.request.deadline_ns:
            timer = loop.call_later(max(0.0, (passenger.request.deadline_ns - wall_ns()) / 1e9), passenger.expire)
        try:
            return await passenger.future
        except CharoniaError as error:
            raise shed(error) from None  # the future keeps what it raised: see `shed`
        finally:
            if timer is not None:
                timer.cancel()
            if passenger in self._passengers:
                self._passengers.remove(passenger)
            if not self._passengers and not self._task.done():
                self._ended(self)  # the next caller starts a new flight
                self._task.cancel()

    def cancel(self) -> None:
        """The process ends."""
        self._fail(Unavailable(SERVER_EXITING))
        if self._task is not None:
            self._task.cancel()

    async def _fly(self) -> None:
        try:
            found = await self._look()
            if found is not None:
                self._land(found, None)
                return
            while waiting := [one for one in self._passengers if not one.future.done()]:
                if await self._send(waiting[0], waiting[1:]):
                    return
        except CharoniaError as error:
            self._fail(error)
        except Exception as error:
            self._fail(InternalError(f"request could not be sent: {error}"))
        finally:
            self._ended(self)

    async def _send(self, first: Passenger, others: list[Passenger]) -> bool:
        """Send one passenger's request; False when its failure was its own."""
        first.sent = True
        try:
            record = await first.run()
        except CharoniaError as error:
            if is_of(first, error, others):
                first.fail(error)
                return False
            raise
        if record.error is not None and is_of(first, record.error, others):
            first.answer(record, executed=True)
            return False
        if record.error is None:
            self._landed(record)
        # when who asked first has gone, it was made for the next one
        self._land(record, first if first in self._passengers else next(iter(self._passengers), None))
        return True

    def _land(self, record: ResponseRecord, executed_for: Passenger | None) -> None:
        for one in self._passengers:
            one.answer(record, executed=one is executed_for)

    def _fail(self, error: CharoniaError) -> None:
        for one in self._passengers:
            one.fail(error)
