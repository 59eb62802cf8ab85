"""`charonia queue move` on a log in memory, with an owner that reads its facts and with none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from charonia import keys
from charonia.errors import InvalidArgument, NotFound
from charonia.eventlog.port import Entry
from charonia.facts.events import ProcessJoined, RequestsMoved, VersionLoaded, facts_of
from charonia.generation.prompt_keys import PromptRoute
from charonia.traces.contexts import TIMESTAMPS, Context
from charonia.wire import Lineage, SequenceMark, records_of, unpack_request
from protos.model_config_pb2 import ModelConfig

Ids = Callable[[int], bytes]


@pytest.fixture
async def paused(yard: Any) -> Any:
    """The yard, its model with three levels, paused."""
    config = ModelConfig(name="m", backend="python", max_batch_size=4)
    config.dynamic_batching.priority_levels = 3
    config.dynamic_batching.default_priority_level = 2
    await yard.control(ProcessJoined("executor", "executor-1"))
    await yard.control(VersionLoaded("executor-1", "m", 1, "hash-1", 1, config.SerializeToString()))
    await yard.run("queue", "pause", "m")
    return yard


async def levels(yard: Any) -> list[tuple[int, str]]:
    document, _, _ = await yard.run("queue", "inspect", "m")
    return [(row["level"], row["id"]) for row in document["queue"]]


async def test_a_job_is_carried_at_its_new_level_alone(paused: Any, ids: Ids) -> None:
    await paused.job(ids(1), level=2, lane=5, tenant="acme")
    await paused.job(ids(2), level=2, lane=5)
    before = await paused.log.pending("m")

    document, well, shown = await paused.run("queue", "move", "m", "--id", ids(2).hex(), "--level", "1")

    assert well
    assert (document["moved"], document["applied"]) == ([ids(2).hex()], True)
    assert shown == f"{ids(2).hex()} moved to level 1\n"
    assert await levels(paused) == [(1, ids(2).hex()), (2, ids(1).hex())]
    (entry,) = await paused.log.range(keys.queue("m", 1, 5))
    record = unpack_request(records_of(entry.fields)[0])
    original = unpack_request(paused.record(ids(2), job=True, level=2))
    assert (record.id, record.level, record.flags, record.deadline_ns) == (ids(2), 1, 3, original.deadline_ns)
    assert [t.array().tolist() for t in record.inputs()] == [t.array().tolist() for t in original.inputs()]
    assert await paused.log.pending("m") == before
    assert (await paused.log.job("m", ids(2))).events[-1].kind == "moved"
    _, clean, _ = await paused.run("audit")
    assert clean


@pytest.mark.parametrize(
    "parts",
    [
        {"lineage": Lineage(tenant="acme")},
        {"trace": Context(TIMESTAMPS, bytes(16), bytes(8), "vendor=1", "gateway-1")},
        {"prompt": PromptRoute(70, 3, bytes(range(16)))},
        {"sequence": SequenceMark(7, start=True)},
    ],
    ids=lambda parts: next(iter(parts)),
)
async def test_every_part_of_a_job_is_carried(paused: Any, ids: Ids, parts: dict[str, Any]) -> None:
    """Jobs of tenants to models that may call others have a lineage, traced ones a trace."""
    await paused.job(ids(1), level=2, parts=parts)
    assert (await paused.run("queue", "move", "m", "--id", ids(1).hex(), "--level", "1"))[1]
    (entry,) = await paused.log.range(keys.queue("m", 1, 0))
    (moved,) = records_of(entry.fields)
    assert unpack_request(moved).level == 1
    assert bytes(moved) == paused.record(ids(1), job=True, level=1, **parts)


async def test_the_owner_reads_of_it_first(paused: Any, ids: Ids) -> None:
    await paused.job(ids(1), level=2)
    await paused.log.take_ownership("m", "batcher-1", "")
    await paused.log.beat("batcher", "batcher-1", 60_000)
    seen: list[object] = []
    carried: list[int] = []

    def on_entries(stream: bytes, entries: list[Entry]) -> None:
        seen.extend(fact for entry in entries for fact in facts_of(entry))
        carried.append(len(paused.log._streams.get(keys.queue("m", 1, 0), ())))

    reader = paused.log.reader()
    reader.start(on_entries)
    reader.add(keys.facts("m"), b"$", consume=True)
    document, _, _ = await paused.run("queue", "move", "m", "--id", ids(1).hex(), "--level", "1")
    await reader.close()

    assert document["applied"]
    assert seen[0] == RequestsMoved(ids(1))
    assert carried[0] == 0, "the new entry comes when the owner has read of it"


async def test_an_owner_that_does_not_read_is_said_to(paused: Any, ids: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.operations.moving._PATIENCE_S", 0.05)
    await paused.job(ids(1), level=2)
    await paused.log.take_ownership("m", "batcher-1", "")
    await paused.log.beat("batcher", "batcher-1", 60_000)
    document, well, shown = await paused.run("queue", "move", "m", "--id", ids(1).hex(), "--level", "1")
    assert (well, document["applied"]) == (True, False)
    assert "the owner does not answer" in shown
    assert await levels(paused) == [(1, ids(1).hex())]
    facts = [fact for entry in await paused.log.range(keys.facts("m")) for fact in facts_of(entry)]
    assert not [fact for fact in facts if isinstance(fact, RequestsMoved)]


async def test_what_begins_meanwhile_stays(paused: Any, ids: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    await paused.job(ids(1), level=2)
    await paused.begin(ids(9))  # somebody owns the model
    await paused.log.beat("batcher", "batcher-1", 60_000)
    moving = asyncio.create_task(paused.run("queue", "move", "m", "--id", ids(1).hex(), "--level", "1"))
    while not [e for e in await paused.log.range(keys.facts("m")) if isinstance(facts_of(e)[0], RequestsMoved)]:
        await asyncio.sleep(0)
    await paused.begin(ids(1))
    await paused.log.delete_stream(keys.facts("m"))
    document, well, _ = await moving
    assert not well
    assert document["left"] == {ids(1).hex(): "it began or ended meanwhile"}
    assert await levels(paused) == [(2, ids(1).hex())]


async def test_what_cannot_be_moved_stays_and_says_why(paused: Any, ids: Ids) -> None:
    await paused.requests(ids(1))
    await paused.job(ids(2), level=2)
    await paused.begin(ids(2))
    await paused.job(ids(3), level=1)
    words = [word for number in (1, 2, 3) for word in ("--id", ids(number).hex())]
    document, well, _ = await paused.run("queue", "move", "m", *words, "--level", "1")
    assert not well
    assert document["left"] == {
        ids(1).hex(): "it is no job",
        ids(2).hex(): "it is running",
        ids(3).hex(): "it is there already",
    }


async def test_it_must_be_paused_and_the_level_must_exist(paused: Any, ids: Ids) -> None:
    await paused.job(ids(1))
    with pytest.raises(InvalidArgument, match="has the levels 1 to 3, not 4"):
        await paused.run("queue", "move", "m", "--id", ids(1).hex(), "--level", "4")
    await paused.run("queue", "resume", "m")
    with pytest.raises(InvalidArgument, match="is not paused"):
        await paused.run("queue", "move", "m", "--id", ids(1).hex(), "--level", "1")
    await paused.run("queue", "pause", "idle")
    with pytest.raises(NotFound, match="served by nobody"):
        await paused.run("queue", "move", "idle", "--id", ids(1).hex(), "--level", "1")
