"""When a job may be expected to end."""

from __future__ import annotations

import pytest
from memory_log.log import MemoryLog

import gateway.jobs.job_queries
from charonia import keys
from charonia.catalog.catalog import ServedVersion
from charonia.errors import LogUnavailable
from charonia.models.interface import ModelInterface
from executors.configuration.config import normalise
from executors.repository.pbtxt import parse
from gateway.jobs.job_queries import Pace, Paces, mean_pace, queued_eta_s, running_eta_s

FIELDS = {
    "inference_count": 100,
    "execution_count": 20,
    "b5_count": 20,
    "b5_input_ns": 1_000_000_000,
    "b5_infer_ns": 8_000_000_000,
    "b5_output_ns": 1_000_000_000,
    "compute_infer_ns": 99_000_000_000,
}


def test_the_pace_counts_each_execution_once() -> None:
    assert mean_pace(FIELDS) == Pace(batch_s=0.5, row_s=0.1)
    assert mean_pace({}) is None
    assert mean_pace({"execution_count": 1}) is None


def test_what_lies_before_is_shared_by_the_slots() -> None:
    pace = Pace(batch_s=0.5, row_s=0.1)
    assert queued_eta_s(pace, 0, 1, 8) == pytest.approx(0.5)
    assert queued_eta_s(pace, 40, 1, 8) == pytest.approx(4.5)
    assert queued_eta_s(pace, 40, 4, 8) == pytest.approx(1.5)
    assert queued_eta_s(pace, 40, 0, 8) == pytest.approx(4.5)


def test_under_a_backlog_what_was_seen_counts_when_it_is_slower() -> None:
    assert queued_eta_s(Pace(0.5, 0.1, rows_per_s=2.0), 40, 1, 8) == pytest.approx(20.5)
    assert queued_eta_s(Pace(0.5, 0.1, rows_per_s=50.0), 40, 1, 8) == pytest.approx(4.5)
    assert queued_eta_s(Pace(0.5, 0.1, rows_per_s=2.0), 10, 1, 8) == pytest.approx(1.5), "no backlog: idle before"


def test_a_running_job_ends_after_a_mean_execution() -> None:
    assert running_eta_s(Pace(0.5, 0.1), 0.2) == pytest.approx(0.3)
    assert running_eta_s(Pace(0.5, 0.1), 7.0) == 0.0


async def test_statistics_are_read_once_a_second_and_their_growth_is_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(gateway.jobs.job_queries, "monotonic_ns", lambda: now[0])
    config = normalise(parse('name: "m" backend: "python" max_batch_size: 8'))
    served = ServedVersion("m", 1, "h", config, ModelInterface.of(config), {}, {"e": 1})
    log = MemoryLog()
    paces = Paces(log)
    assert await paces.of(served) is None
    await log.add_statistics(keys.statistics("m", 1, "h"), FIELDS)
    assert await paces.of(served) is None, "read less than a second ago"
    now[0] += 2_000_000_000
    assert await paces.of(served) == Pace(0.5, 0.1, rows_per_s=50.0)
    now[0] += 100_000_000_000
    assert await paces.of(served) == Pace(0.5, 0.1, rows_per_s=0.0), "too long ago to tell a rate"

    async def away(key: bytes) -> dict[str, int]:
        raise LogUnavailable("away")

    monkeypatch.setattr(log, "statistics", away)
    now[0] += 2_000_000_000
    assert await paces.of(served) is None
