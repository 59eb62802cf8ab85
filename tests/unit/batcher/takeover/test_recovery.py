"""What a new owner does about runs of requests that were settled while the model had no owner."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf import text_format
from memory_log.log import MemoryLog

from batcher.service import BatcherService
from charonia import keys
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.port import Limits
from charonia.facts.events import (
    FIELD_FACT,
    ExecutionUnwanted,
    Fact,
    ProcessJoined,
    VersionLoaded,
    facts_of,
    pack_fact,
)
from charonia.options.settings import BatcherSettings
from charonia.wire import FIELD_HEADER, BatchHeader, pack_request, record_fields, request_meta
from protos.model_config_pb2 import ModelConfig

MODEL, EXECUTOR = "stream", "executor-1"
CONFIG = text_format.Parse(
    f'name: "{MODEL}" backend: "python" model_transaction_policy {{ decoupled: true }}', ModelConfig()
)
WAITS, RUNS, CANCELLED, BEHIND = (bytes([number]) * 16 for number in range(4))


def record(request_id: bytes) -> bytes:
    meta = request_meta(1, "hash", [], (), {})
    return bytes(pack_request(request_id, b"", b"", meta, [], rows=1, signature=0, level=0, accepted_ns=1))


async def test_runs_of_settled_requests_are_stopped_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream whose request was cancelled may never end by itself. One that is behind the window is live."""
    monkeypatch.setattr("batcher.takeover.recovery._PAGE", 1)
    log = MemoryLog()
    for request_id in (RUNS, WAITS, BEHIND):
        packed = record(request_id)
        await log.accept(MODEL, 0, 0, [(request_id, len(packed))], record_fields([packed]), Limits())
    for batch_id, ids in (("former-1", (RUNS, CANCELLED)), ("former-2", (BEHIND,))):
        header = BatchHeader(batch_id, MODEL, 1, "hash", 1, (1,) * len(ids), keys.facts(MODEL), False, None, ())
        fields = [FIELD_HEADER, header.pack(), *record_fields([record(one) for one in ids])]
        await log.append(keys.batches(EXECUTOR), fields)
    for fact in (
        ProcessJoined("executor", EXECUTOR),
        VersionLoaded(EXECUTOR, MODEL, 1, "hash", 2, CONFIG.SerializeToString()),
        ProcessJoined("batcher", "batcher-1"),
    ):
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])
    control = ControlPlane(log, check_interval_ms=3_600_000, incarnation="batcher-1")
    await control.start()
    service = BatcherService(log, control, BatcherSettings("batcher-1", window_requests=2))
    await service.start()
    while MODEL not in service.owned:
        await asyncio.sleep(0)
    assert service.owned[MODEL].scheduler.find(BEHIND) is None
    told: list[Fact] = []
    for entry in await log.range(keys.batches(EXECUTOR)):
        told += facts_of(entry)
    await service.close()
    await control.close()
    assert [fact for fact in told if isinstance(fact, ExecutionUnwanted)] == [ExecutionUnwanted("former-1", CANCELLED)]
