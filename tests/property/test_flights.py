"""However callers come, leave and fail: one execution at a time, one outcome for each, nobody is forgotten."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from charonia.calls.cache.response_cache import Flight, Passenger
from charonia.errors import Cancelled, CharoniaError, InternalError, LogUnavailable
from charonia.inference import InferenceRequest
from charonia.wire import ResponseRecord

COME, LEAVE, ANSWER, FAIL, OWN_FAIL, LOG_FAIL = "come", "leave", "answer", "fail", "own failure", "log failure"
STEPS = st.lists(
    st.tuples(st.sampled_from([COME, COME, COME, LEAVE, ANSWER, FAIL, OWN_FAIL, LOG_FAIL]), st.integers(0, 5)),
    min_size=1,
    max_size=15,
)


class Air:
    """The flights of one key, and the executions in the test's own hand."""

    def __init__(self) -> None:
        self.flight: Flight | None = None
        self.callers: list[asyncio.Task[tuple[bool, int]]] = []
        self.cancelled: set[int] = set()
        self.running: list[asyncio.Future[ResponseRecord]] = []
        self.landed = 0
        self.executions = 0
        self.answers = 0

    async def come(self) -> None:
        self.callers.append(asyncio.create_task(self._ask()))
        await self.settle()

    async def _ask(self) -> tuple[bool, int]:
        if self.flight is None:
            self.flight = Flight(self._look, self._on_landed, self._ended)
        landed = await self.flight.take(Passenger(InferenceRequest("m", 1, []), "", self._run))
        if landed.record.error is not None:
            raise landed.record.error
        return landed.executed, landed.record.version

    async def _look(self) -> ResponseRecord | None:
        return None

    async def _run(self) -> ResponseRecord:
        self.executions += 1
        future: asyncio.Future[ResponseRecord] = asyncio.get_running_loop().create_future()
        self.running.append(future)
        assert len(self.running) == 1, "two executions at once"
        try:
            return await future
        finally:
            self.running.remove(future)

    def _on_landed(self, record: ResponseRecord) -> None:
        self.landed += 1

    def _ended(self, flight: Flight) -> None:
        if self.flight is flight:
            self.flight = None

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def waiting(self) -> list[int]:
        return [n for n, task in enumerate(self.callers) if not task.done()]


async def fly(steps: list[tuple[str, int]]) -> None:
    air = Air()
    for step, number in steps:
        waiting = air.waiting()
        if step == COME:
            await air.come()
        elif step == LEAVE and waiting:
            leaver = waiting[number % len(waiting)]
            air.callers[leaver].cancel()
            air.cancelled.add(leaver)
            await air.settle()
            assert air.waiting() == [n for n in waiting if n != leaver], "one who left took others along"
        elif step == ANSWER and air.running:
            air.answers += 1
            air.running[0].set_result(ResponseRecord(bytes(16), "m", air.answers, [], {}, None))
            await air.settle()
            results = [air.callers[n].result() for n in waiting]
            assert {version for _, version in results} == {air.answers}
            assert sum(executed for executed, _ in results) == 1
        elif step == OWN_FAIL and air.running:
            air.running[0].set_exception(Cancelled("own"))
            await air.settle()
            # at most one was told; the request of another is sent now
            assert len(air.waiting()) >= len(waiting) - 1
        elif step in (FAIL, LOG_FAIL) and air.running:
            if step == FAIL:
                air.running[0].set_result(ResponseRecord(bytes(16), "m", 1, [], {}, InternalError("model")))
            else:
                air.running[0].set_exception(LogUnavailable("log"))
            await air.settle()
            assert air.waiting() == []
            assert len({id(air.callers[n].exception()) for n in waiting}) == len(waiting), (
                "an error of its own for each"
            )
        # while anybody waits, one execution goes on; while nobody does, none
        assert len(air.running) == bool(air.waiting())
        assert (air.flight is None) == (not air.waiting())
    for task in air.callers:
        task.cancel()
    results = await asyncio.gather(*air.callers, return_exceptions=True)
    assert air.landed == air.answers
    for number, result in enumerate(results):
        if isinstance(result, asyncio.CancelledError):
            continue
        assert number not in air.cancelled
        assert isinstance(result, (tuple, CharoniaError))
    await air.settle()
    assert (air.running, air.flight) == ([], None)


@given(STEPS)
def test_flights(steps: list[tuple[str, int]]) -> None:
    asyncio.run(fly(steps))
