"""The usage of many tenants on a real log server, whose scripts take a bounded number of values."""

from __future__ import annotations

import asyncio

import pytest
from own_server import PATIENCE_S, log_on, own_server

from charonia import keys
from charonia.facts.usage import AMOUNTS, HOUR_S, HOURS, MOST_TENANTS, hour_of, rows_of
from charonia.tasks import Tasks
from executors.metrics import ExecutorMetrics
from executors.settling.usage_counts import UsageCounts
from executors.settling.usage_writer import UsageWriter

pytestmark = pytest.mark.integration


async def test_a_thousand_tenants_are_written_at_once() -> None:
    with own_server() as server:
        async with log_on(server) as log:
            counts, tasks = UsageCounts(ExecutorMetrics()), Tasks()
            kept: list[int] = []
            writer = UsageWriter(log, counts, tasks, lambda: kept.append(1))
            tenants = [f"tenant {number}" for number in range(MOST_TENANTS)]
            now_ns = 20_000 * HOURS * HOUR_S * 1_000_000_000
            for _ in range(2):
                counts.add("m", 1, {tenant: list(range(1, len(AMOUNTS) + 1)) for tenant in tenants})
                writer.write(now_ns)
                async with asyncio.timeout(PATIENCE_S):
                    while writer.writing:
                        await asyncio.wait(writer.writing)
                    await tasks.settled()
            day, _ = hour_of(now_ns)
            found = rows_of("m", day, await log.statistics(keys.usage("m", day)))
            assert not kept
            assert {row.tenant: list(row.amounts) for row in found} == {
                tenant: list(range(2, 2 * len(AMOUNTS) + 1, 2)) for tenant in tenants
            }
