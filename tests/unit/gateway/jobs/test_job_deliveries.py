"""The note that a caller was given a job's outcome."""

from __future__ import annotations

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.facts.delivery_notes import DeliveryNote
from gateway.jobs import job_deliveries
from gateway.jobs.job_deliveries import JobDeliveries

JOB = bytes(16)
KEY = keys.job_delivery("m", JOB)


async def noted(log: MemoryLog) -> DeliveryNote | None:
    (data,) = await log.notes([KEY])
    return DeliveryNote.unpack(data) if data is not None else None


async def test_the_first_delivery_of_any_gateway_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now_us = [5]
    monkeypatch.setattr(job_deliveries, "wall_ns", lambda: now_us[0] * 1000)
    log = MemoryLog()
    assert await noted(log) is None
    for gateway in ("one", "one", "two"):
        deliveries = JobDeliveries(log, gateway)
        deliveries.given("m", JOB, 3600)
        now_us[0] += 1
        deliveries.given("m", JOB, 3600)
        await deliveries.close()
        assert await noted(log) == DeliveryNote(5, "one")


async def test_a_job_that_is_asked_for_often_costs_the_log_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    asked: list[object] = []
    notes = log.notes

    async def counted(names: list[bytes]) -> list[bytes | None]:
        asked.append(names)
        return await notes(names)

    monkeypatch.setattr(log, "notes", counted)
    deliveries = JobDeliveries(log, "one")
    for _ in range(10):
        deliveries.given("m", JOB, 3600)
    await deliveries.close()
    assert asked == [[KEY]]


async def test_a_log_that_is_away_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()

    async def away(_names: list[bytes]) -> list[bytes | None]:
        raise LogUnavailable("away")

    monkeypatch.setattr(log, "notes", away)
    deliveries = JobDeliveries(log, "one")
    deliveries.given("m", JOB, 3600)
    await deliveries.close()
    monkeypatch.undo()
    assert await noted(log) is None
