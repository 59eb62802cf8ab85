"""`charonia executors ls` on a log in memory."""

from __future__ import annotations

from typing import Any

from charonia import keys
from charonia.eventlog.port import EventLog
from charonia.facts.events import (
    FIELD_FACT,
    ExecutorDescribed,
    ExecutorDraining,
    Fact,
    ModelExcluded,
    ProcessJoined,
    ProcessLeft,
    RepositoryScanned,
    VersionAnnounced,
    VersionHeld,
    VersionLoaded,
    VersionWanted,
    pack_fact,
)
from charonia.wire import FIELD_HEADER
from protos.model_config_pb2 import ModelConfig

CONFIG = ModelConfig(name="a").SerializeToString()


async def tell(log: EventLog, *facts: Fact) -> None:
    for fact in facts:
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])


async def test_nobody(yard: Any) -> None:
    document, well, shown = await yard.run("executors", "ls")
    assert (document, well, shown) == ({"executors": []}, True, "no executor has joined\n")


async def test_what_executors_are_and_have(yard: Any) -> None:
    log = yard.log
    await tell(
        log,
        ProcessJoined("executor", "executor-a", pool="gpu", host="h1", pid=7),
        ExecutorDescribed("executor-a", {"device": "cpu,gpu", "zone": "z", "gpus": "2"}, 3 * 1024**2, 1024**3, 1, 9),
        VersionAnnounced("executor-a", "a", 1, "h", CONFIG),
        VersionAnnounced("executor-a", "b", 1, "h", CONFIG),
        VersionHeld("executor-a", "b", 1, 2),
        ModelExcluded("executor-a", "c", "why not"),
        RepositoryScanned("executor-a", ("a", "b", "c"), "none", ready=True),
        ProcessJoined("executor", "executor-b", hosts_batcher=True),
        VersionLoaded("executor-b", "a", 1, "h", 3, CONFIG),
        ProcessJoined("executor", "executor-c"),
        RepositoryScanned("executor-c", (), "none", ready=True),
        ExecutorDraining("executor-c"),
        ProcessJoined("executor", "executor-d"),
        ProcessLeft("executor", "executor-d", "lost"),
    )
    for name in ("executor-a", "executor-b", "executor-c"):
        await log.beat("executor", name, 60_000)
    await log.append(keys.batches("executor-a"), [FIELD_HEADER, b"a batch"])
    await log.append(keys.batches("executor-a"), [FIELD_FACT, pack_fact(VersionWanted("a", 1))])
    document, well, shown = await yard.run("executors", "ls")
    assert well
    first, *others = document["executors"]
    age_s = first.pop("heartbeat_age_s")
    assert 0 <= age_s < 30
    assert first == {
        "executor": "executor-a",
        "state": "ready",
        "pool": "gpu",
        "host": "h1",
        "pid": 7,
        "devices": "cpu,gpu",
        "labels": {"zone": "z", "gpus": "2"},
        "loaded": 1,
        "announced": 1,
        "slots": 2,
        "outstanding": 1,
        "used_bytes": 3 * 1024**2,
        "budget_bytes": 1024**3,
        "most_models": 9,
        "excluded": {"c": "why not"},
    }
    assert [(row["state"], row["outstanding"], row["slots"]) for row in others] == [
        ("starting", None, 3),
        ("draining", 0, 0),
        ("lost", 0, 0),
    ]
    lines = shown.splitlines()
    assert lines[0].split()[:6] == ["EXECUTOR", "STATE", "POOL", "HOST", "DEVICES", "LOADED"]
    assert "3.0 MiB" in lines[1]
    assert lines[1].endswith("zone=z")
