"""`cancel_left_steps` with the owner of a decoupled model, over a log in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from google.protobuf import text_format
from memory_log.log import MemoryLog

from batcher.housekeeping.left_steps import cancel_left_steps
from batcher.owner.owned import OwnedModel
from batcher.service import BatcherService
from charonia import keys
from charonia.clock import wall_ns
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.port import Limits
from charonia.facts.events import FIELD_FACT, ProcessJoined, VersionLoaded, pack_fact
from charonia.options.settings import BatcherSettings
from charonia.wire import Lineage, pack_request, record_fields, request_meta
from protos.model_config_pb2 import ModelConfig

ENSEMBLE, MODEL = "e", "stream"
CONFIG = text_format.Parse(
    f'name: "{MODEL}" backend: "python" model_transaction_policy {{ decoupled: true }}', ModelConfig()
)
LIVE, ENDED = b"live" * 4, b"over" * 4


@pytest.fixture
async def owned() -> AsyncIterator[OwnedModel]:
    """The owner of a model without free instances, over a log with one unsettled request of an ensemble."""
    log = MemoryLog()
    await log.accept(ENSEMBLE, 0, 0, [(LIVE, 1)], record_fields([b"x"]), Limits())
    for fact in (
        ProcessJoined("executor", "executor-1"),
        VersionLoaded("executor-1", MODEL, 1, "hash", 0, CONFIG.SerializeToString()),
        ProcessJoined("batcher", "batcher-1"),
    ):
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])
    control = ControlPlane(log, check_interval_ms=3_600_000, incarnation="batcher-1")
    await control.start()
    service = BatcherService(log, control, BatcherSettings("batcher-1"))
    await service.start()
    while MODEL not in service.owned:
        await asyncio.sleep(0)
    yield service.owned[MODEL]
    await service.close()
    await control.close()


async def ask(owned: OwnedModel, lineages: dict[bytes, Lineage | None]) -> None:
    """Queue requests with these ids, and wait until the owner has read them."""
    for request_id, lineage in lineages.items():
        meta = request_meta(1, "hash", [], (), {})
        record = pack_request(
            *(request_id, b"ensemble.e", b"", meta, []),
            rows=1,
            signature=0,
            level=0,
            accepted_ns=wall_ns(),
            lineage=lineage,
        )
        await owned.log.accept(MODEL, 0, 0, [(request_id, len(record))], record_fields([record]), Limits())
    while len(owned.scheduler.unended()) < len(lineages):
        await asyncio.sleep(0)


async def test_steps_are_cancelled_whose_request_is_no_longer_in_the_log(owned: OwnedModel) -> None:
    lineages = {
        b"a" * 16: None,
        b"b" * 16: Lineage(tenant="north"),
        b"c" * 16: Lineage((("caller", ENDED),)),  # the caller, not an ensemble, decides about this one
        b"d" * 16: Lineage(step_of=(ENSEMBLE, LIVE)),
        b"e" * 16: Lineage(step_of=(ENSEMBLE, ENDED)),
        b"f" * 16: Lineage(step_of=("gone", LIVE)),
    }
    await ask(owned, lineages)
    assert await cancel_left_steps(owned) == 2
    await owned.settled()
    kept = await owned.log.unsettled(MODEL, list(lineages))
    assert [attempt >= 0 for attempt in kept] == [True, True, True, True, False, False]
    assert await cancel_left_steps(owned) == 0


async def test_a_running_step_is_cancelled_once(owned: OwnedModel) -> None:
    """Its model may compute for hours before it notices."""
    loaded = VersionLoaded("executor-1", MODEL, 1, "hash", 1, CONFIG.SerializeToString())
    await owned.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(loaded)])
    await ask(owned, {b"e" * 16: Lineage(step_of=(ENSEMBLE, ENDED))})
    while owned.scheduler.waiting():
        await asyncio.sleep(0)
    await owned.settled()  # its batch is sent
    assert await cancel_left_steps(owned) == 1
    await owned.settled()
    assert owned.scheduler.unended(), "its executor has it"
    assert await cancel_left_steps(owned) == 0


async def test_steps_are_settled_together(owned: OwnedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, settled = owned.log.settle, list[int]()

    async def counted(model: str, requests: Sequence[tuple[bytes, int]], *arguments: Any, **more: Any) -> list[bool]:
        settled.append(len(requests))
        return await settle(model, requests, *arguments, **more)

    monkeypatch.setattr(owned.log, "settle", counted)
    await ask(owned, {bytes([n]) * 16: Lineage(step_of=(ENSEMBLE, ENDED)) for n in range(50)})
    assert await cancel_left_steps(owned) == 50
    await owned.settled()
    assert settled == [50]


async def test_more_steps_than_are_asked_about_at_once(owned: OwnedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batcher.housekeeping.left_steps._MAX_IDS", 2)
    lineages = {bytes([n]) * 16: Lineage(step_of=(ENSEMBLE, ENDED if n % 2 else LIVE)) for n in range(7)}
    await ask(owned, dict(lineages))
    assert await cancel_left_steps(owned) == 3
    await owned.settled()
    kept = await owned.log.unsettled(MODEL, list(lineages))
    assert [attempt >= 0 for attempt in kept] == [n % 2 == 0 for n in range(7)]
