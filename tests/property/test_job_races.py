"""Every order in which cancels, a deadline and a completion can meet in the log: one terminal state, one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import job_bench as bench_module
import pytest
from job_bench import MODEL
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import Cancelled, CharoniaError, DeadlineExceeded
from charonia.facts.jobs import JobRecord, JobState, public_id
from charonia.facts.journal import read_facts
from charonia.inference import InferenceResponse
from charonia.wire import RequestRecord

_QUIET_TICKS = 12
"""More ticks of the loop than a step's consequences need to reach the next step."""


class SteppedLog(MemoryLog):
    """A log whose commands wait for their turn while `stepping`: whose is next, the test decides."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping = False
        self.waiting: list[asyncio.Future[None]] = []

    async def _turn(self) -> None:
        if self.stepping:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(turn)
            await turn

    def release(self) -> None:
        """From now on nobody waits."""
        self.stepping = False
        for turn in self.waiting:
            if not turn.done():
                turn.set_result(None)
        self.waiting.clear()

    async def settle(self, *given: Any, **more: Any) -> list[bool]:
        await self._turn()
        return await super().settle(*given, **more)

    async def begin_attempt(self, *given: Any, **more: Any) -> list[bool]:
        await self._turn()
        return await super().begin_attempt(*given, **more)

    async def append(self, *given: Any, **more: Any) -> bytes:
        await self._turn()
        return await super().append(*given, **more)

    async def unsettled(self, *given: Any, **more: Any) -> list[int]:
        await self._turn()
        return await super().unsettled(*given, **more)

    async def job(self, model: str, job_id: bytes) -> JobRecord | None:
        await self._turn()
        return await super().job(model, job_id)

    async def job_result(self, *given: Any, **more: Any) -> bytes | None:
        await self._turn()
        return await super().job_result(*given, **more)


class Race:
    """One job whose caller waits at `here`, with those who would end it."""

    def __init__(self) -> None:
        self.log = SteppedLog()
        self.bench = bench_module.JobBench(self.log)
        self.record: RequestRecord

    async def prepare(self) -> asyncio.Task[InferenceResponse]:
        await self.bench.serve()
        self.here = await self.bench.gateway("here", journal="all")
        self.there = await self.bench.gateway("there", journal="all")
        call = asyncio.create_task(self.here.infer(bench_module.request(6), options=bench_module.options("key")))
        (self.record,) = await self.bench.comes()
        await bench_module.until(lambda: self.here._dataplane.requester.requests.get(self.record.id).accepted)
        self.log.stepping = True
        return call

    async def complete(self) -> bool:
        begun = await self.bench.begin(self.record)
        return begun and await self.bench.finish(self.record)

    async def cancel_here(self) -> None:
        await self.here.jobs.cancel(public_id(MODEL, self.record.id))

    async def cancel_there(self) -> None:
        await self.there.jobs.cancel(public_id(MODEL, self.record.id))

    async def expire(self) -> None:
        waiter = self.here._dataplane.requester.requests.get(self.record.id)
        if waiter is not None:
            await self.here._dataplane.deadlines._expire(waiter, b"statistics", 0)

    async def recheck(self) -> None:
        await self.here._dataplane.requester.recheck({self.record.id})


async def run(race: Race, actors: Sequence[Callable[[], Awaitable[Any]]], choices: list[int]) -> list[int]:
    """Run actors, letting waiting commands through as `choices` says (0 past its end); how many there were to choose.

    Then look that everything agrees.
    """
    call = await race.prepare()
    tasks = [asyncio.ensure_future(actor()) for actor in actors]
    widths: list[int] = []
    while not all(task.done() for task in tasks):
        for _ in range(_QUIET_TICKS):
            await asyncio.sleep(0)
        if not race.log.waiting:
            continue
        widths.append(len(race.log.waiting))
        at = choices[len(widths) - 1] if len(widths) <= len(choices) else 0
        race.log.waiting.pop(at).set_result(None)
    race.log.release()
    for task in tasks:
        task.result()
    await race.recheck()
    await agree(race, call)
    await race.bench.close()
    return widths


async def agree(race: Race, call: asyncio.Task[InferenceResponse]) -> None:
    record = await race.log.job(MODEL, race.record.id)
    assert record is not None
    assert record.state.terminal
    terminal = {state.value for state in JobState if state.terminal}
    ends = [event for event in record.events if event.kind in terminal]
    assert [event.kind for event in ends] == [record.state.value]
    assert record.events[-1] == ends[0]
    journal = [fact for e in await race.log.range(keys.journal(MODEL)) for fact in read_facts(e.fields)]
    assert [fact.kind for fact in journal].count("ended") == 1
    assert journal[-1].kind == "ended", "nothing happens after the end"
    assert journal[-1].outcomes == (record.state,)
    answer: InferenceResponse | CharoniaError
    async with asyncio.timeout(30):
        try:
            answer = await call
        except CharoniaError as error:
            answer = error
    for other in (answer, await _retry(race)):
        if record.state is JobState.SUCCEEDED:
            assert isinstance(other, InferenceResponse)
            assert bench_module.numbers(other.outputs)["y"] == 6
        else:
            assert type(other) is {JobState.CANCELLED: Cancelled, JobState.EXPIRED: DeadlineExceeded}[record.state]
    assert await race.log.pending(MODEL) == (0, 0)


async def _retry(race: Race) -> InferenceResponse | CharoniaError:
    try:
        return await race.there.infer(bench_module.request(6), options=bench_module.options("key"))
    except CharoniaError as error:
        return error


@pytest.mark.parametrize(
    "names",
    [
        ("complete", "cancel_here"),
        ("complete", "cancel_there", "expire"),
        ("complete", "cancel_here", "cancel_there"),
        ("complete", "expire", "recheck"),
        ("complete", "cancel_there", "recheck"),
    ],
    ids="-".join,
)
async def test_every_order_has_one_end(names: tuple[str, ...]) -> None:
    choices: list[int] = []
    orders = 0
    while True:
        race = Race()
        widths = await run(race, [getattr(race, name) for name in names], choices)
        orders += 1
        # count on like an odometer: the last place that has another choice left
        path = choices[: len(widths)] + [0] * (len(widths) - len(choices))
        while path and path[-1] + 1 >= widths[len(path) - 1]:
            path.pop()
        if not path:
            break
        path[-1] += 1
        choices = path
    assert orders >= 6, "the commands of all take turns"
