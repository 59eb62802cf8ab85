"""Workers of one version that wait for the resources of a rate limiter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from instance_pool import DEADLY, SPEC, Doubling, DoublingRequests, Pool, record, values

from charonia.backend import InstanceSpec
from charonia.errors import InvalidArgument
from charonia.facts.resource_waits import Turn, WaitingBatch
from charonia.models.interface import InstanceGroup, ResourceNeed
from charonia.wire import unpack_response
from executors.running.rate_limiter import RateLimiter
from executors.running.resource_grants import ResourceGrants


class Limited:
    """Pools whose instances share resources, and gates that hold executions where they are."""

    def __init__(self) -> None:
        self.grants = ResourceGrants(RateLimiter())
        self.pools: list[Pool] = []

    def group(self, *needs: ResourceNeed, count: int = 1, priority: int = 0) -> InstanceGroup:
        return InstanceGroup("m", count, "KIND_CPU", resources=needs, priority=priority)

    def pool(self, *needs: ResourceNeed, instances: Sequence[Any], priority: int = 0, create: Any = None) -> Pool:
        group = self.group(*needs, count=len(instances), priority=priority)
        under = Pool(*instances, create=create, group=group, resource_grants=self.grants)
        self.pools.append(under)
        return under

    async def close(self) -> None:
        for under in self.pools:
            await under.pool.close()
        assert self.grants.limiter.counts() == {}


async def test_executions_of_two_models_that_share_a_resource_exclude_each_other() -> None:
    gate = threading.Event()
    limited = Limited()
    first = limited.pool(ResourceNeed("r", 1), instances=[Doubling(gate)])
    second = limited.pool(ResourceNeed("r", 1), instances=[DoublingRequests(), DoublingRequests()])
    held = first.run(1)
    waiting = [second.run(value) for value in (2, 3, 4)]
    await asyncio.sleep(0)
    assert second.pool.waiting_requests == 3
    assert limited.grants.limiter.used() == {(0, "r"): 1}
    assert not any(future.done() for future in waiting)
    gate.set()
    answered = [values([unpack_response(a) for a in (await future).answers]) for future in (held, *waiting)]
    assert answered == [[2], [4], [6], [8]]
    assert second.pool.waiting_requests == 0
    assert limited.grants.limiter.used() == {}
    await limited.close()


async def test_an_instance_that_died_gives_its_resources_back_and_another_takes_its_batches() -> None:
    limited = Limited()
    come_back = asyncio.Event()

    async def create(_spec: InstanceSpec) -> Any:
        await come_back.wait()
        return Doubling()

    under = limited.pool(ResourceNeed("r", 1), instances=[Doubling()], create=create)
    other = limited.pool(ResourceNeed("r", 1), instances=[Doubling()])
    died = under.run(DEADLY)
    waits = under.run(5)
    assert (await died).death is not None
    assert values(await other.submit(7)) == [14]  # nothing is held by the dead
    assert not waits.done()
    come_back.set()
    assert values([unpack_response(a) for a in (await waits).answers]) == [10]
    await limited.close()


async def test_what_waits_for_its_turn_can_be_taken_back() -> None:
    gate = threading.Event()
    limited = Limited()
    blocker = limited.pool(ResourceNeed("r", 1), instances=[Doubling(gate)])
    under = limited.pool(ResourceNeed("r", 1), instances=[Doubling()])
    held = blocker.run(1)
    batches = [under.run_batch([record(value)])[0] for value in (1, 2)]
    assert under.pool.take_queued() == batches
    await under.pool.idle()
    gate.set()
    await held
    assert values(await under.submit(3)) == [6]
    await limited.close()


async def test_a_pool_whose_needs_cannot_be_met_is_refused() -> None:
    limited = Limited()
    limited.pool(ResourceNeed("r", 1), instances=[Doubling()])
    with pytest.raises(InvalidArgument, match="both global and device-specific"):
        limited.pool(ResourceNeed("r", 1, True), instances=[Doubling()])
    await limited.close()


async def test_a_batch_does_not_wait_for_what_only_one_of_the_groups_needs() -> None:
    gate = threading.Event()
    limited = Limited()
    blocker = limited.pool(ResourceNeed("r", 1), instances=[Doubling(gate)])
    under = limited.pool(ResourceNeed("r", 1), instances=[Doubling()])
    second = InstanceSpec("m_1", "CPU", -1, SPEC.source, SPEC.interface)
    under.pool.add(second, Doubling(), limited.group(ResourceNeed("q", 1)))
    under.pool._workers[-1].start()
    held = blocker.run(1)
    assert values(await under.submit(3)) == [6]
    assert limited.grants.limiter.used() == {(0, "r"): 1}
    gate.set()
    await held
    await limited.close()


async def test_what_is_told_of_turns() -> None:
    gate = threading.Event()
    limited = Limited()
    blocker = limited.pool(ResourceNeed("r", 1), instances=[Doubling(gate)])
    under = limited.pool(ResourceNeed("r", 1), instances=[Doubling(), Doubling()])
    held, future = blocker.run_batch([record(1)])
    waits, answered = under.run_batch([record(2), record(3, 1)])
    assert blocker.pool.limited_queue is not None
    assert under.pool.limited_queue is not None
    needs = {(0, "r"): 1}
    room = ("b", 1, -1)
    assert blocker.pool.limited_queue.snapshot("b", 1) == ([Turn(SPEC.name, room, needs, (held.records[0].id,))], [])
    (turn,), waiting = under.pool.limited_queue.snapshot("m", 1)  # the other instance would need the same
    assert (turn.room, turn.running, turn.order is not None) == (("m", 1, -1), (), True)
    assert waiting == [WaitingBatch(("m", 1, -1), tuple(r.id for r in waits.records))]
    gate.set()
    await future
    await answered
    assert [turn.order for turn in under.pool.limited_queue.snapshot("m", 1)[0]] == [None, None]
    await limited.close()
