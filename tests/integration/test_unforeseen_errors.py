"""An error nobody foresaw costs its model a new owner, and nobody an answer: the log knows what there is to do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from asking_cluster import answers
from batching_cluster import MODEL, Cluster, ask, until
from executor_bench import ME, linear, running, x

from batcher.housekeeping.model_checks import ModelChecks
from batcher.owner.dispatched_batches import DispatchedBatches
from batcher.owner.owned import OwnedModel
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia import keys
from charonia.eventlog.port import Entry
from charonia.facts.events import BatchDied, facts_of
from charonia.tensors import Tensor
from charonia.wire import FLAG_JOB, FLAG_JOURNALLED, BatchHeader, unpack_request
from executors.settling.settler import JournalledStarts, Settler

pytestmark = pytest.mark.integration


class Stumble:
    """Raises at the first of the calls that it takes the place of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.stumbled = False
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if not self.stumbled:
                self.stumbled = True
                raise KeyError("nobody foresaw this")
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ModelScheduler, "observe_all"),  # where entries are read
        (OwnedModel, "observe"),  # where facts are heard
        (DispatchedBatches, "_still_wanted"),  # in a task
    ],
)
async def test_what_a_stumble_hit_is_answered_by_the_next_owner(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    await cluster.executor()
    batcher = await cluster.batcher()
    await batcher.owns()
    gateway = await cluster.gateway()
    first = batcher.service.owned[MODEL]
    assert await answers([ask(gateway, 1)]) == [1]
    stumble = Stumble(monkeypatch, owner, name)
    calls = [ask(gateway, n) for n in range(20)]
    assert await answers(calls) == list(range(20))
    assert stumble.stumbled
    await until(lambda: MODEL in batcher.service.owned)
    assert first.closed
    assert batcher.service.owned[MODEL].token > first.token
    await cluster.settled()


async def test_a_stumble_while_taking_over_is_tried_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = await cluster.executor(gated=True)
    first = await cluster.batcher()
    await first.owns()
    gateway = await cluster.gateway()
    calls = [ask(gateway, n) for n in range(20)]
    await until(lambda: len(executor.held) == 2)
    await first.die()
    stumble = Stumble(monkeypatch, ModelScheduler, "observe_all")
    await cluster.lose("batcher", first.name)
    second = await cluster.batcher()
    await second.owns()
    executor.release()
    assert await answers(calls) == list(range(20))
    assert stumble.stumbled
    await cluster.settled()


async def test_what_was_read_and_overlooked_is_found(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an entry came to an owner that was not there yet."""
    on_entries, is_deaf, passed_over = OwnedModel.on_entries, False, asyncio.Event()

    def heard(self: OwnedModel, stream: bytes, entries: list[Any]) -> None:
        if is_deaf and not passed_over.is_set() and stream in self.windows.lanes:
            self.windows.lanes[stream].after = entries[-1].id
            passed_over.set()
        else:
            on_entries(self, stream, entries)

    monkeypatch.setattr(OwnedModel, "on_entries", heard)
    await cluster.executor()
    batcher = await cluster.batcher()
    await batcher.owns()
    gateway = await cluster.gateway()
    assert await answers([ask(gateway, 1)]) == [1]
    owned = batcher.service.owned[MODEL]
    await until(lambda: not owned.windows.unsettled)  # it hears of the end after the caller
    is_deaf = True
    call = ask(gateway, 2)
    await asyncio.wait_for(passed_over.wait(), 20)
    checks = ModelChecks(owned)
    for _ in range(3):
        assert not owned.closed
        assert await checks.find_lost() == 0
    assert owned.closed
    assert await answers([call]) == [2]
    await cluster.settled()


@pytest.mark.parametrize(
    ("owner", "name", "flags"),
    [
        (Settler, "settle_plain", 0),  # where an instance tells of an execution
        (Settler, "settle", FLAG_JOB),  # in a task
        (JournalledStarts, "watch", FLAG_JOURNALLED),  # before an instance has it
    ],
)
async def test_a_batch_that_cannot_be_ended_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, flags: int
) -> None:
    linear(tmp_path / "m" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        Stumble(monkeypatch, owner, name)
        request_id, record = await bench.accept("m", [Tensor.of("x", x(1))], flags=flags)
        batch_id = await bench.dispatch("m", [record])
        told = await bench.finished("m", batch_id, BatchDied)
        assert (told.ids, told.blameless) == (request_id, False)
        assert told.reason == "its executor could not end it: KeyError: 'nobody foresaw this'"
        await bench.finished("m", await bench.dispatch("m", [record]))
        assert await bench.log.pending("m") == (0, 0)
        assert await bench.service.drain(10)
        assert await bench.log.range(keys.batches(ME)) == []


async def test_who_hands_a_batch_over_does_not_stumble_with_its_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batcher in the same process goes on with whatever else it had decided."""
    linear(tmp_path / "m" / "1" / "model.onnx")
    async with running(tmp_path, hosts_batcher=True) as bench:
        assert bench.link is not None
        Stumble(monkeypatch, JournalledStarts, "watch")
        request_id, record = await bench.accept("m", [Tensor.of("x", x(1))], flags=FLAG_JOURNALLED)
        told: asyncio.Queue[Any] = asyncio.Queue()
        bench.link.reports["m"].follow(told.put_nowait)
        header = BatchHeader("b-1", "m", 1, "", 1, (0,), b"")
        bench.link.batches.hand(header, [unpack_request(record)])
        (died,) = facts_of(Entry(b"", await asyncio.wait_for(told.get(), 30)))
        assert isinstance(died, BatchDied)
        assert (died.batch_id, died.ids) == ("b-1", request_id)
        bench.link.batches.hand(header, [unpack_request(record)])
        assert request_id in await bench.replies("gw", 1)
