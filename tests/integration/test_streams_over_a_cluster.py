"""Streams of models whose keys are on different primaries of a cluster, one of which is away for a while."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import repeat_backend as repeat
from batching_cluster import until_so
from cluster_servers import ClusterServer, RedisCluster
from executor_bench import ME, Bench, running
from response_reader import Reader, told

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.eventlog.redis import open_log
from charonia.eventlog.redis.server.topology import slot_of
from executors.configuration import declarations

pytestmark = pytest.mark.integration


class Away:
    """A primary that is away until it is `back`: stopped, or killed and started again."""

    def __init__(self, server: ClusterServer, number: int) -> None:
        self._server, self._number = server, number
        server.kill(number)

    async def back(self) -> None:
        if self._number == signal.SIGKILL:
            await asyncio.to_thread(self._server.start)
        else:
            self._server.kill(signal.SIGCONT)


class World:
    """An executor of two models, one of which has its keys on a primary that nothing else is on."""

    def __init__(self, cluster: RedisCluster, bench: Bench, lost: ClusterServer, model: str, other: str) -> None:
        self.cluster, self.bench, self.lost, self.model, self.other = cluster, bench, lost, model, other


def on(cluster: RedisCluster, server: ClusterServer, wanted: bool, name: str, key: Any) -> str:
    """The first of names like this one whose key is, or is not, on a server."""
    names = (f"{name}-{number}" for number in itertools.count())
    return next(one for one in names if (cluster.holder(slot_of(key(one))) is server) is wanted)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[World]:
    repeat.reset()
    monkeypatch.setitem(declarations.SHIPPED, "repeat", "repeat_backend:RepeatBackend")
    cluster = RedisCluster()
    try:
        await asyncio.to_thread(cluster.start)
        cluster.be_patient()
        used = [keys.CONTROL, keys.EPOCH, keys.batches(ME)]
        lost = next(s for s in cluster.servers if s not in [cluster.holder(slot_of(key)) for key in used])
        model, other = (on(cluster, lost, wanted, "model", keys.facts) for wanted in (True, False))
        for name in (model, other):
            (tmp_path / name / "1").mkdir(parents=True)
            (tmp_path / name / "config.pbtxt").write_text(repeat.CONFIG)
        log = open_log(cluster.url)
        await log.open()
        async with running(tmp_path, log=log, hosts_batcher=True) as bench:
            yield World(cluster, bench, lost, model, other)
        await log.close()
    finally:
        cluster.stop()
    for _ in range(10):  # a reader that is still open notices the end of its server, and connects again
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}  # none is destroyed with the loop


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_streams_of_a_model_do_not_wait_for_another_whose_primary_is_away(world: World, number: int) -> None:
    bench = world.bench
    endpoint = on(world.cluster, world.lost, False, "gateway", keys.replies)
    reader = Reader(bench, endpoint)
    repeat.HOLD_AFTER.update({1: 1, 2: 1})
    first = await bench.accept(world.model, repeat.inputs(1, 2), endpoint=endpoint)
    second = await bench.accept(world.other, repeat.inputs(2, 50), endpoint=endpoint)
    await bench.dispatch(world.model, [first[1]])
    await bench.dispatch(world.other, [second[1]])
    assert told(await reader.count(first[0], 1)) == [1000]
    assert told(await reader.count(second[0], 1)) == [2000]
    await bench.log.pending(world.model)  # the server to lose answers it after the owner's report, which a batch awaits

    away = Away(world.lost, number)
    try:
        repeat.release(1)
        assert told(await reader.ended(first[0])) == [1000, 1001, "end"]  # and is settled where nothing answers
        repeat.release(2)
        assert told(await reader.ended(second[0])) == [*range(2000, 2050), "end"]
        await until_so(lambda: none_pending(bench, world.other))  # settled after its end is visible
    finally:
        await away.back()
    await until_so(lambda: none_pending(bench, world.model))


async def none_pending(bench: Bench, model: str) -> bool:
    with contextlib.suppress(LogUnavailable):
        return bool(await bench.log.pending(model) == (0, 0))
    return False
