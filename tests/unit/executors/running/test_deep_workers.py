"""Several batches under way in one instance: answers, failures, deaths, cancellation, health, close and resizing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from instance_pool import BROKEN, DEADLY, SPEC, Doubling, Pool, record, values

from charonia.backend import InstanceDied, InstanceSpec
from charonia.errors import InternalError
from charonia.models.interface import InstanceGroup
from charonia.models.sequence_batcher import SequenceBatching
from charonia.wire import ResponseRecord, unpack_response
from executors.batches.batch_results import Executed
from executors.running import deep_workers
from executors.running.instance_pool import InstancePool
from executors.running.rate_limiter import RateLimiter
from executors.running.resource_grants import ResourceGrants
from executors.running.submitted_batch import SubmittedBatch
from protos.model_config_pb2 import ModelConfig, ModelSequenceBatching


class Device(Doubling):
    """Doubles what was submitted to it when the test says so, in the order that it says."""

    depth = 2
    checks_health = True

    def __init__(self, refusals: int = 0) -> None:
        super().__init__()
        self.submitted: list[tuple[float, Future[Any], Any, Sequence[str]]] = []
        self.changed = threading.Condition()
        self.starts: list[int] = []
        self.refusals = refusals
        self.closed_with = 0

    def started(self) -> None:
        self.starts.append(threading.get_ident())
        if self.refusals:
            self.refusals -= 1
            raise InternalError("no stream")

    async def check_health(self) -> bool:
        return True

    def submit(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Future[Any]:
        assert threading.get_ident() in self.starts
        future: Future[Any] = Future()
        with self.changed:
            self.submitted.append((float(inputs["x"].flat[0]), future, inputs, outputs))
            self.changed.notify_all()
        return future

    def until(self, count: int) -> None:
        """Wait until so many batches are under way."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.submitted) >= count, 30)

    def finish(self, first: float) -> None:
        """End the batch whose first number this is."""
        with self.changed:
            place = next(at for at, (number, *_) in enumerate(self.submitted) if number == first)
            _, future, inputs, outputs = self.submitted.pop(place)
        future.set_running_or_notify_cancel()
        try:
            future.set_result(self.execute(inputs, outputs))
        except Exception as error:
            future.set_exception(error)

    def die(self) -> None:
        """Of the next batch, as of all that are under way."""
        with self.changed:
            gone, self.submitted = self.submitted, []
        for _, future, *_ in gone:
            future.set_exception(InstanceDied("gone", "last words"))

    def close(self) -> None:
        self.closed_with = len(self.submitted)
        super().close()


def responses(executed: Executed) -> list[ResponseRecord]:
    return [unpack_response(answer) for answer in executed.answers]


async def until(met: Any) -> None:
    async with asyncio.timeout(30):
        while not met():
            await asyncio.sleep(0.001)


async def test_two_batches_are_under_way_and_end_in_any_order() -> None:
    device = Device()
    under = Pool(device)
    assert (under.pool.slots, under.pool.instance_count) == (2, 1)
    first, second, third = (under.run(number) for number in (1, 2, 3))
    await asyncio.to_thread(device.until, 2)
    assert sorted(one for one, *_ in device.submitted) == [1, 2], "the third one waits in the queue"
    device.finish(2)
    assert values(responses(await second)) == [4]
    await asyncio.to_thread(device.until, 2)
    device.finish(3)
    assert values(responses(await third)) == [6]
    assert not first.done()
    device.finish(1)
    assert values(responses(await first)) == [2]
    await under.pool.close()
    assert device.closed
    assert len(device.starts) == len(set(device.starts)) == 2


async def test_a_batch_that_fails_leaves_the_other_alone(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    under = Pool(device)
    good, bad = under.run(1, 2), under.run(BROKEN)
    await asyncio.to_thread(device.until, 2)
    device.finish(BROKEN)
    (failed,) = responses(await bad)
    assert isinstance(failed.error, InternalError)
    again = under.run(5)
    await asyncio.to_thread(device.until, 2)
    device.finish(5)
    device.finish(1)
    assert values(responses(await good)) == [2, 4]
    assert values(responses(await again)) == [10]
    await under.pool.close()


async def test_batches_are_spread_before_they_are_stacked() -> None:
    one, other = Device(), Device()
    under = Pool(one, other)
    assert under.pool.slots == 4
    runs = [under.run(number) for number in (1, 2)]
    await asyncio.to_thread(one.until, 1)
    await asyncio.to_thread(other.until, 1)
    runs += [under.run(number) for number in (3, 4)]
    await asyncio.to_thread(one.until, 2)
    await asyncio.to_thread(other.until, 2)
    for device in (one, other):
        for number, *_ in list(device.submitted):
            device.finish(number)
    assert [values(responses(await run)) for run in runs] == [[2], [4], [6], [8]]
    await under.pool.close()


async def test_closing_waits_for_what_is_under_way() -> None:
    device = Device()
    under = Pool(device)
    runs = [under.run(1), under.run(2), under.run(3)]
    await asyncio.to_thread(device.until, 2)
    closing = asyncio.create_task(under.pool.close())
    device.finish(1)
    assert values(responses(await runs[0])) == [2]
    await asyncio.to_thread(device.until, 2)
    assert not closing.done()
    device.finish(2)
    assert not device.closed
    device.finish(3)
    await asyncio.wait_for(closing, 30)
    assert [values(responses(await run)) for run in runs] == [[2], [4], [6]]
    assert (device.closed, device.closed_with) == (True, 0)


async def test_an_instance_that_dies_is_replaced_once_nothing_is_under_way(caplog: pytest.LogCaptureFixture) -> None:
    first, refusing, last = Device(), Device(refusals=1), Device()
    made = iter([refusing, last])

    async def create(_spec: InstanceSpec) -> Device:
        return next(made)

    under = Pool(first, create=create)
    runs = [under.run(1), under.run(2)]
    await asyncio.to_thread(first.until, 2)
    queued = under.run(3)
    first.submitted.sort(key=lambda one: one[0])
    first.submitted[0][1].set_exception(InstanceDied("gone", "last words"))
    death = (await runs[0]).death
    assert death is not None
    assert (death.shared_instance, death.blameless) == (True, False), "it may be the other's fault"
    assert not first.closed, "a batch is under way in it"
    del first.submitted[0]
    first.finish(2)
    assert values(responses(await runs[1])) == [4], "it was answered although the instance died"
    await asyncio.to_thread(last.until, 1)
    last.finish(3)
    assert values(responses(await queued)) == [6]
    assert (first.closed, refusing.closed) == (True, True)
    await under.pool.close()
    assert last.closed
    assert "cannot be made again: no stream" in caplog.text


class Slow(threading.Condition):
    """What another thread may do between two statements, it does."""

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        time.sleep(0.005)


@pytest.mark.parametrize("condition", [threading.Condition, Slow])
async def test_one_that_dies_of_all_that_is_under_way(
    condition: type[threading.Condition], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = Device(), Device()
    monkeypatch.setattr(deep_workers.threading, "Condition", condition)

    async def create(_spec: InstanceSpec) -> Device:
        return other

    under = Pool(first, create=create)
    runs = [under.run(1), under.run(2)]
    await asyncio.to_thread(first.until, 2)
    first.die()
    deaths = [(await run).death for run in runs]
    assert all(death is not None and death.shared_instance for death in deaths)
    alone = under.run(DEADLY)
    await asyncio.to_thread(other.until, 1)
    other.finish(DEADLY)
    death = (await alone).death
    assert death is not None
    assert not death.shared_instance, "nothing else was under way"
    await under.pool.close()


async def test_an_instance_of_another_depth_does_not_take_its_place(caplog: pytest.LogCaptureFixture) -> None:
    first, deeper, last = Device(), Device(), Device()
    deeper.depth = 3
    made = iter([deeper, last])

    async def create(_spec: InstanceSpec) -> Device:
        return next(made)

    under = Pool(first, create=create)
    run = under.run(DEADLY)
    await asyncio.to_thread(first.until, 1)
    first.finish(DEADLY)
    assert (await run).death is not None
    await until(lambda: deeper.closed and not under.pool.all_down())
    again = under.run(1)
    await asyncio.to_thread(last.until, 1)
    last.finish(1)
    assert values(responses(await again)) == [2]
    assert deeper.closed
    assert "it had a depth of 2 before, and 3 now" in caplog.text
    await under.pool.close()


async def test_what_nobody_wants_any_more_is_cancelled_before_it_has_begun() -> None:
    device = Device()
    under = Pool(device)
    batch, unwanted = under.run_batch([record(7)])
    kept, wanted = under.run_batch([record(1)])
    await asyncio.to_thread(device.until, 2)
    (future,) = (future for number, future, *_ in device.submitted if number == 7)
    for one in (batch, kept):  # of the other one nothing is cancelled
        under.pool.cancel(one, frozenset(r.id for r in one.records) if one is batch else frozenset())
    async with asyncio.timeout(30):
        while not future.cancelled():  # its thread may not wait for it yet
            under.pool.cancel(batch, frozenset())
            await asyncio.sleep(0.001)
    assert (await unwanted).answers == [b""]
    device.finish(1)
    assert values(responses(await wanted)) == [2]
    await under.pool.close()


async def test_what_has_begun_runs_to_its_end_although_it_is_cancelled() -> None:
    device = Device()
    under = Pool(device)
    batch, run = under.run_batch([record(7)])
    await asyncio.to_thread(device.until, 1)
    device.submitted[0][1].set_running_or_notify_cancel()
    under.pool.cancel(batch, frozenset(one.id for one in batch.records))
    device.submitted.pop()[1].set_result({"y": np.full((1, 1), 14, np.float32)})
    assert values(responses(await run)) == [14]
    await under.pool.close()


async def test_health_is_asked_for_when_nothing_is_under_way() -> None:
    """P6."""
    device = Device()
    under = Pool(device)
    assert under.pool.checking_instances() == [(SPEC.name, device)]
    run = under.run(1)
    await asyncio.to_thread(device.until, 1)
    assert under.pool.checking_instances() == []
    device.finish(1)
    await run
    assert under.pool.checking_instances() == [(SPEC.name, device)]
    await under.pool.close()


async def test_each_thread_is_started_before_warm_up() -> None:
    device = Device()

    async def create(_spec: InstanceSpec) -> Device:
        raise AssertionError

    pool = InstancePool(SPEC.interface, 1, create)
    pool.add(SPEC, device)
    warming = asyncio.create_task(pool.warm_up([[record(1)]]))
    await asyncio.to_thread(device.until, 1)
    assert len(set(device.starts)) == 2
    device.finish(1)
    ((_, executed),) = await warming
    assert values(responses(executed)) == [2]
    await pool.close()
    assert device.closed


async def test_an_instance_that_cannot_be_started_fails_the_load() -> None:
    device = Device(refusals=1)
    pool = InstancePool(SPEC.interface, 1, lambda _spec: asyncio.sleep(0, device))
    pool.add(SPEC, device)
    with pytest.raises(InternalError, match="no stream"):
        await pool.warm_up([])
    await pool.close()
    assert device.closed


async def test_each_batch_under_way_has_a_time_limit() -> None:
    device = Device()
    hung: list[SubmittedBatch] = []
    under = Pool(device, ceiling_s=0.05, on_hung=lambda batch, _death: hung.append(batch))
    batches = [under.run_batch([record(number)])[0] for number in (1, 2)]
    await until(lambda: len(hung) == 2)
    assert {id(one) for one in hung} == {id(one) for one in batches}
    for number in (1, 2):
        await asyncio.to_thread(device.until, 1)
        device.finish(number)
    await under.pool.close()


async def test_an_instance_leaves_when_its_batches_have_ended() -> None:
    """R23."""
    one, other = Device(), Device()
    under = Pool(one, other)
    runs = [under.run(number) for number in (1, 2, 3, 4)]
    await asyncio.to_thread(one.until, 2)
    await asyncio.to_thread(other.until, 2)
    under.pool.set_target(1)
    assert (under.pool.slots, under.pool.instance_count) == (2, 1)
    shrinking = asyncio.create_task(under.pool.shrink())
    for device in (one, other):
        for number, *_ in list(device.submitted):
            device.finish(number)
    await asyncio.gather(*runs)
    await asyncio.wait_for(shrinking, 30)
    assert one.closed is not other.closed
    left = other if one.closed else one
    run = under.run(5)
    await asyncio.to_thread(left.until, 1)
    left.finish(5)
    assert values(responses(await run)) == [10]
    await under.pool.close()


async def test_behind_a_rate_limiter_it_runs_one_batch_at_a_time() -> None:
    """The limiter counts executions."""
    device = Device()
    under = Pool(device, resource_grants=ResourceGrants(RateLimiter()), group=InstanceGroup("m", 1, "KIND_CPU"))
    assert under.pool.slots == 1
    assert values(await under.submit(3)) == [6]
    await under.pool.close()


async def test_with_a_sequence_batcher_it_runs_one_batch_at_a_time() -> None:
    """The steps of a sequence are in their order."""
    block = SequenceBatching.of(ModelConfig(sequence_batching=ModelSequenceBatching()))
    interface = replace(SPEC.interface, sequence_batching=block)
    pool = InstancePool(interface, 1, lambda _spec: asyncio.sleep(0, Device()))
    pool.add(SPEC, Device())
    assert pool.slots == 1
    await pool.close()
