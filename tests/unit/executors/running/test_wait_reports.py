"""When an executor tells of batches that wait for resources."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
from instance_pool import Doubling, Pool, record
from memory_log.log import MemoryLog
from wave_senders import meta_of_one

from charonia import keys
from charonia.facts.resource_waits import TurnsNote
from charonia.models.interface import InstanceGroup, ResourceNeed
from charonia.tensors import Tensor
from charonia.wire import Wave, unpack_wave, wave_head
from executors.running.limiter_reports import WaitReports
from executors.running.rate_limiter import RateLimiter
from executors.running.resource_grants import ResourceGrants


async def test_what_waits_at_two_looks_is_told_while_calls_are_open() -> None:
    gate = threading.Event()
    grants = ResourceGrants(RateLimiter({(-1, "r"): 2}))
    group = InstanceGroup("m", 1, "KIND_CPU", resources=(ResourceNeed("r", 2, True),))
    pools = [Pool(one, group=group, resource_grants=grants) for one in (Doubling(gate), Doubling())]
    incarnations = [SimpleNamespace(model=name, version=1, pool=p.pool) for name, p in zip("ab", pools, strict=True)]
    log = MemoryLog()
    calls = 1
    notes = WaitReports(log, "e", grants.limiter, lambda: incarnations, lambda: calls)  # type: ignore[arg-type,return-value]

    async def told() -> TurnsNote | None:
        await notes.check()
        (note,) = await log.notes([keys.turns("e")])
        return TurnsNote.unpack(note) if note is not None else None

    holds, held = pools[0].run_batch([record(1)])
    assert await told() is None
    waits, answered = pools[1].run_batch([record(2)])
    assert await told() is None, "it has not waited for long"
    calls = 0
    assert await told() is None, "nobody waits for anybody"
    calls = 1
    note = await told()
    assert note is not None
    assert note.counts == {(-1, "r"): 2}
    executing = {turn.room[0]: turn.running for turn in note.turns}
    assert executing == {"a": (holds.records[0].id,), "b": ()}
    assert [batch.ids for batch in note.waiting] == [(waits.records[0].id,)]
    again = await told()
    assert again is not None
    assert again.number == note.number + 1
    gate.set()
    await asyncio.gather(held, answered)
    assert await told() == again, "there is nothing to tell"
    for one in pools:
        await one.pool.close()


def wave(number: int, count: int) -> Wave:
    tensor = Tensor.of("x", np.full((1, 1), number, np.float32))
    prefix = number.to_bytes(15, "big")
    head = wave_head(prefix, count, b"gw", meta_of_one(tensor, "y"), rows=1, signature=7, level=0, accepted_ns=1)
    return unpack_wave(head + count * bytes(tensor.data))


async def test_of_waves_their_requests_are_told() -> None:
    """Calls that they make name them: without them a deadlock over resources is not found."""
    gate = threading.Event()
    grants = ResourceGrants(RateLimiter({(-1, "r"): 2}))
    group = InstanceGroup("m", 1, "KIND_CPU", resources=(ResourceNeed("r", 2, True),))
    under = Pool(Doubling(gate), group=group, resource_grants=grants)
    first, second = wave(1, 2), wave(2, 3)
    running = [under.run_batch((), waves=[one])[1] for one in (first, second)]
    queue = under.pool.limited_queue
    assert queue is not None
    (turn,), (waiting,) = queue.snapshot("m", 1)
    assert turn.running == tuple(first.ids())
    assert waiting.ids == tuple(second.ids())
    assert under.pool.waiting_requests == 3
    gate.set()
    await asyncio.gather(*running)
    await under.pool.close()
