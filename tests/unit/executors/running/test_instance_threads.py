"""The thread of an instance over arrays: where it is started and warmed up, and what is interrupted there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from instance_pool import DEADLY, SPEC, Doubling, Pool, record, values

from charonia.backend import InstanceSpec, Interrupted
from charonia.errors import InternalError
from charonia.wire import unpack_response
from executors.batches.batch_results import Executed
from executors.running.instance_pool import InstancePool
from executors.running.submitted_batch import SubmittedBatch


class Threaded(Doubling):
    """Records where it was started, and refuses to start `refusals` times."""

    def __init__(self, refusals: int = 0) -> None:
        super().__init__()
        self.starts: list[int] = []
        self.refusals = refusals
        self.refusal: BaseException = InternalError("no stream")

    def started(self) -> None:
        self.starts.append(threading.get_ident())
        if self.refusals:
            self.refusals -= 1
            raise self.refusal

    def interrupt(self) -> None: ...


def pool_of(*instances: Threaded) -> InstancePool:
    made = iter(instances[1:])

    async def create(_spec: InstanceSpec) -> Threaded:
        return next(made)

    pool = InstancePool(SPEC.interface, 1, create)
    pool.add(SPEC, instances[0])
    return pool


async def submit(pool: InstancePool, *numbers: float) -> Executed:
    future: asyncio.Future[Executed] = asyncio.get_running_loop().create_future()
    batch = SubmittedBatch(
        [record(number, place) for place, number in enumerate(numbers)], lambda _batch, done: future.set_result(done)
    )
    pool.submit(batch)
    return await future


async def test_an_instance_is_started_warmed_up_and_run_in_one_thread() -> None:
    instance = Threaded()
    pool = pool_of(instance)
    await pool.warm_up([[record(1, 0)], [record(2, 1)]])
    pool.start()
    assert values([unpack_response(answer) for answer in (await submit(pool, 3)).answers]) == [6]
    await pool.close()
    assert instance.starts == list(instance.threads)
    assert threading.get_ident() not in instance.threads


async def test_an_instance_that_cannot_be_started_fails_the_load() -> None:
    instance = Threaded(refusals=1)
    pool = pool_of(instance)
    with pytest.raises(InternalError, match="no stream"):
        await pool.warm_up([])
    await pool.close()
    assert instance.closed


async def test_an_instance_that_is_never_run_is_closed_all_the_same() -> None:
    """Of a load that failed elsewhere, or a passive one."""
    instance = Threaded()
    pool = pool_of(instance)
    await pool.warm_up([[record(1, 0)]])
    await asyncio.wait_for(pool.close(), 30)
    assert instance.closed


@pytest.mark.parametrize("refusal", [InternalError("no stream"), SystemExit("no stream")])
async def test_an_instance_in_place_of_a_dead_one_is_started_in_its_thread(
    refusal: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    first, refusing, last = Threaded(), Threaded(refusals=1), Threaded()
    refusing.refusal = refusal
    pool = pool_of(first, refusing, last)
    await pool.warm_up([])
    pool.start()
    assert (await submit(pool, DEADLY)).death is not None
    assert values([unpack_response(answer) for answer in (await submit(pool, 4)).answers]) == [8]
    await pool.close()
    assert first.starts == refusing.starts == last.starts == list(last.threads)
    assert refusing.closed
    assert "cannot be made again: no stream" in caplog.text


class Endless(Doubling):
    """Runs a number 7 until it is interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[list[float]] = []
        self.begun, self.ended = threading.Event(), threading.Event()

    def execute(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
        self.runs.append(inputs["x"].ravel().tolist())
        if 7 in self.runs[-1]:
            self.begun.set()
            assert self.ended.wait(30)
            self.ended.clear()
            raise Interrupted("as asked")
        return super().execute(inputs, outputs)

    def interrupt(self) -> None:
        self.ended.set()


async def test_a_batch_that_nobody_wants_any_more_is_interrupted() -> None:
    instance = Endless()
    under = Pool(instance)
    batch = SubmittedBatch([record(7, 0), record(1, 1)], lambda _batch, _executed: finished.set())
    finished = asyncio.Event()
    under.pool.submit(batch)
    await asyncio.to_thread(instance.begun.wait, 30)
    first, second = (one.id for one in batch.records)
    under.pool.cancel(batch, frozenset((first,)))
    assert not instance.ended.is_set(), "one of its requests is wanted"
    under.pool.cancel(batch, frozenset((second,)))
    await asyncio.wait_for(finished.wait(), 30)
    assert values(await under.submit(2)) == [4]
    assert instance.runs == [[7, 1], [2]]
    await under.pool.close()


class Checking(Doubling):
    checks_health = True

    async def check_health(self) -> bool:
        return True


async def test_an_instance_over_arrays_is_asked_for_its_health_while_it_runs_nothing() -> None:
    """P6."""
    gate = threading.Event()
    checking, plain = Checking(gate), Doubling(gate)
    under = Pool(checking, plain)
    assert under.pool.checking_instances() == [(SPEC.name, checking)]
    busy = [under.run(1), under.run(2)]
    while len(checking.threads | plain.threads) < 2:
        await asyncio.sleep(0)
    assert under.pool.checking_instances() == []
    gate.set()
    await asyncio.gather(*busy)
    await under.pool.close()
