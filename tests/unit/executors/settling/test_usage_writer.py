"""Usage on its way to the log: in parts, again only if it was refused, and not at all where it is not allowed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
from memory_log.log import MemoryLog
from memory_log.waves import MemoryWaves

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, LogAway, LogRefused, LogUnavailable
from charonia.eventlog.port import Counted
from charonia.eventlog.redis.server.transport import Refused
from charonia.facts.usage import AMOUNTS, HOUR_S, MOST_WRITTEN, REQUESTS, hour_of, rows_of
from charonia.tasks import Tasks
from executors.metrics import ExecutorMetrics
from executors.settling import usage_writer
from executors.settling.usage_counts import UsageCounts
from executors.settling.usage_writer import UsageWriter

DENIED = Refused("NOPERM No permissions to access a key")
WRONG = Refused("WRONGTYPE Operation against a key")
FULL = Refused("OOM command not allowed when used memory > 'maxmemory'.")


class Told(MemoryWaves):
    """Tells the outcome at once: `error`, with which it has written nothing, or None."""

    error: CharoniaError | None = None
    is_away = False

    def __init__(self, log: MemoryLog) -> None:
        self.parts: list[dict[str, int]] = []
        self.kept: dict[bytes, dict[str, int]] = {}
        super().__init__(log, log._of, lambda _key, _increments: None)

    def count(self, key: bytes, increments: Mapping[str, int], done: Counted) -> bool:
        if self.is_away:
            return False
        self.parts.append(dict(increments))
        if self.error is None:
            known = self.kept.setdefault(key, {})
            for name, amount in increments.items():
                known[name] = known.get(name, 0) + amount
        done(self.error)
        return True


class Bench:
    def __init__(self) -> None:
        self.log = MemoryLog()
        self.waves = self.log.waves = Told(self.log)
        self.counts = UsageCounts(ExecutorMetrics())
        self.tasks = Tasks()
        self.kept = 0
        self.writer = UsageWriter(self.log, self.counts, self.tasks, self._keep)
        self.now_ns = wall_ns()

    def _keep(self) -> None:
        self.kept += 1

    def use(self, *tenants: str) -> None:
        self.counts.add("m", 1, {tenant: [1] * len(AMOUNTS) for tenant in tenants})

    def requests(self) -> dict[str, int]:
        """By tenant, of all hours."""
        found: dict[str, int] = {}
        for key, kept in self.waves.kept.items():
            assert key.startswith(b"us:{m}:")
            for row in rows_of("m", 0, kept):
                found[row.tenant] = found.get(row.tenant, 0) + row.amounts[REQUESTS]
        return found


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_many_tenants_are_written_in_parts(bench: Bench) -> None:
    names = [f"t{number}" for number in range(120)]
    bench.use(*names)
    bench.writer.write(bench.now_ns)
    assert [len(part) for part in bench.waves.parts] == [MOST_WRITTEN, MOST_WRITTEN, 300]
    tenants = [{name[3:] for name in part} for part in bench.waves.parts]
    assert sum(map(len, tenants)) == len(set.union(*tenants)), "those of one tenant are together"
    assert bench.requests() == dict.fromkeys(names, 1)
    await bench.tasks.settled()


@pytest.mark.parametrize(
    "error", [None, LogAway("no connection"), FULL], ids=["not taken", "not sent", "refused for now"]
)
async def test_what_is_certainly_not_written_is_written_later(bench: Bench, error: CharoniaError | None) -> None:
    bench.waves.is_away, bench.waves.error = error is None, error
    bench.use("acme")
    bench.writer.write(bench.now_ns)
    assert (bench.requests(), bench.kept) == ({}, 1)
    bench.waves.is_away, bench.waves.error = False, None
    bench.use("acme")
    bench.writer.write(bench.now_ns)
    bench.writer.write(bench.now_ns)
    assert bench.requests() == {"acme": 2}
    await bench.tasks.settled()


async def test_what_may_have_been_written_is_not_written_twice(bench: Bench) -> None:
    bench.waves.error = LogUnavailable("the connection was lost")
    bench.use("acme")
    bench.writer.write(bench.now_ns)
    bench.waves.error = None
    bench.use("wind")
    bench.writer.write(bench.now_ns)
    assert bench.requests() == {"wind": 1}
    assert bench.kept == 0
    await bench.tasks.settled()


async def test_a_log_that_does_not_allow_it_is_left_alone_for_an_hour(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_writer, "wall_ns", lambda: bench.now_ns)

    async def set_times(*_: Any) -> None:
        raise DENIED

    monkeypatch.setattr(bench.log, "set_times", set_times)
    bench.waves.error = DENIED
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            bench.use(*[f"t{number}" for number in range(120)])
            bench.writer.write(bench.now_ns)
            await bench.tasks.settled()
    (warning,) = caplog.messages
    assert "~us:* ~usm" in warning
    assert len(bench.waves.parts) == 3, "those of the first write"
    assert bench.kept == 0
    monkeypatch.undo()
    bench.waves.error = None
    bench.now_ns += HOUR_S * 1_000_000_000
    bench.use("acme")
    bench.writer.write(bench.now_ns)
    await bench.tasks.settled()
    assert bench.requests() == {"acme": 1}


async def test_what_is_refused_for_another_reason_is_dropped_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def set_times(*_: Any) -> None:
        raise WRONG

    monkeypatch.setattr(bench.log, "set_times", set_times)
    bench.waves.error = WRONG
    bench.use("acme")
    bench.writer.write(bench.now_ns)
    await bench.tasks.settled()
    bench.waves.error = None
    bench.use("wind")
    bench.writer.write(bench.now_ns)
    await bench.tasks.settled()
    assert bench.requests() == {"wind": 1}
    assert sorted(line.split(": the event log")[0] for line in caplog.messages) == [
        "the usage of 'm' cannot be listed until tomorrow",
        f"the usage of about a second in '{keys.usage('m', hour_of(bench.now_ns)[0]).decode()}' is lost",
    ]


async def test_what_a_healthy_log_takes_at_once_has_no_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_writer, "_MOST_UNWRITTEN", 20)
    bench.use("acme", "wind", "north")
    bench.writer.write(bench.now_ns)
    assert bench.requests() == {"acme": 1, "wind": 1, "north": 1}
    await bench.tasks.settled()


async def test_what_waits_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_writer, "_MOST_UNWRITTEN", 20)
    bench.waves.is_away = True
    for day in range(3):
        bench.use("acme")
        bench.writer.write(bench.now_ns + day * 24 * HOUR_S * 1_000_000_000)
    day, _ = hour_of(bench.now_ns)
    assert list(bench.writer._unwritten) == [keys.usage("m", day + 1), keys.usage("m", day + 2)]
    await bench.tasks.settled()


def test_refusals_that_pass() -> None:
    assert isinstance(FULL, LogRefused)
    assert FULL.passes
    assert Refused("LOADING the dataset").passes
    assert not DENIED.passes
    assert not WRONG.passes
    assert [refused.denied for refused in (DENIED, FULL, WRONG)] == [True, False, False]
