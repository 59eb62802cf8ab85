"""However callers come, leave and fail: one execution at a time, one outcome for each, nobody is forgotten."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from charonia.calls.cache.response_cache import SharedExecution, SharingCaller
from charonia.errors import Cancelled, CharoniaError, InternalError, LogUnavailable
from charonia.inference import InferenceRequest
from charonia.wire import ResponseRecord

COME, LEAVE, ANSWER, FAIL, OWN_FAIL, LOG_FAIL = "come", "leave", "answer", "fail", "own failure", "log failure"
STEPS = st.lists(
    st.tuples(st.sampled_from([COME, COME, COME, LEAVE, ANSWER, FAIL, OWN_FAIL, LOG_FAIL]), st.integers(0, 5)),
    min_size=1,
    max_size=15,
)


class Bench:
    """The shared executions of one key, with runs in the test's own hand."""

    def __init__(self) -> None:
        self.shared: SharedExecution | None = None
        self.callers: list[asyncio.Task[tuple[bool, int]]] = []
        self.cancelled: set[int] = set()
        self.running: list[asyncio.Future[ResponseRecord]] = []
        self.answered = 0
        self.executions = 0
        self.answers = 0

    async def come(self) -> None:
        self.callers.append(asyncio.create_task(self._ask()))
        await self.settle()

    async def _ask(self) -> tuple[bool, int]:
        if self.shared is None:
            self.shared = SharedExecution(self._look, self._on_answered, self._ended)
        answered = await self.shared.take(SharingCaller(InferenceRequest("m", 1, []), "", self._run))
        if answered.record.error is not None:
            raise answered.record.error
        return answered.executed, answered.record.version

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

    def _on_answered(self, record: ResponseRecord) -> None:
        self.answered += 1

    def _ended(self, shared: SharedExecution) -> None:
        if self.shared is shared:
            self.shared = None

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def waiting(self) -> list[int]:
        return [n for n, task in enumerate(self.callers) if not task.done()]


async def share(steps: list[tuple[str, int]]) -> None:
    bench = Bench()
    for step, number in steps:
        waiting = bench.waiting()
        if step == COME:
            await bench.come()
        elif step == LEAVE and waiting:
            leaver = waiting[number % len(waiting)]
            bench.callers[leaver].cancel()
            bench.cancelled.add(leaver)
            await bench.settle()
            assert bench.waiting() == [n for n in waiting if n != leaver], "one who left took others along"
        elif step == ANSWER and bench.running:
            bench.answers += 1
            bench.running[0].set_result(ResponseRecord(bytes(16), "m", bench.answers, [], {}, None))
            await bench.settle()
            results = [bench.callers[n].result() for n in waiting]
            assert {version for _, version in results} == {bench.answers}
            assert sum(executed for executed, _ in results) == 1
        elif step == OWN_FAIL and bench.running:
            bench.running[0].set_exception(Cancelled("own"))
            await bench.settle()
            # at most one was told; the request of another is sent now
            assert len(bench.waiting()) >= len(waiting) - 1
        elif step in (FAIL, LOG_FAIL) and bench.running:
            if step == FAIL:
                bench.running[0].set_result(ResponseRecord(bytes(16), "m", 1, [], {}, InternalError("model")))
            else:
                bench.running[0].set_exception(LogUnavailable("log"))
            await bench.settle()
            assert bench.waiting() == []
            assert len({id(bench.callers[n].exception()) for n in waiting}) == len(waiting), (
                "an error of its own for each"
            )
        # while anybody waits, one execution goes on; while nobody does, none
        assert len(bench.running) == bool(bench.waiting())
        assert (bench.shared is None) == (not bench.waiting())
    for task in bench.callers:
        task.cancel()
    results = await asyncio.gather(*bench.callers, return_exceptions=True)
    assert bench.answered == bench.answers
    for number, result in enumerate(results):
        if isinstance(result, asyncio.CancelledError):
            continue
        assert number not in bench.cancelled
        assert isinstance(result, (tuple, CharoniaError))
    await bench.settle()
    assert (bench.running, bench.shared) == ([], None)


@given(STEPS)
def test_callers_share_executions(steps: list[tuple[str, int]]) -> None:
    asyncio.run(share(steps))
