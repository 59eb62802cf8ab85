"""The log's memory: asked for at one scrape, told at the next, and not added up."""

from __future__ import annotations

import asyncio

from charonia.errors import LogUnavailable
from charonia.metrics.exposition import merge
from charonia.metrics.log_memory import LogMemory


class Log:
    def __init__(self) -> None:
        self.away = False
        self.asked = asyncio.Event()

    async def memory_bytes(self) -> tuple[int, int]:
        self.asked.set()
        if self.away:
            raise LogUnavailable("away")
        return 1000, 4000


async def scraped(memory: LogMemory, log: Log) -> dict[str, float]:
    """The values of a scrape; returns when the question that it asked has been answered."""
    log.asked.clear()
    found = {family.name: family.samples[0].value for family in memory.families()}
    await log.asked.wait()
    await memory._tasks.settled()
    return found


async def test_a_scrape_tells_what_the_one_before_asked_for() -> None:
    log = Log()
    memory = LogMemory(log)
    assert await scraped(memory, log) == {}
    known = {"charonia_log_memory_used_bytes": 1000, "charonia_log_memory_max_bytes": 4000}
    assert await scraped(memory, log) == known
    log.away = True
    assert await scraped(memory, log) == known
    assert await scraped(memory, log) == {}
    await memory.close()


def test_parts_that_see_the_same_log_do_not_add_it_up() -> None:
    page = (
        "# TYPE charonia_log_memory_used_bytes gauge\ncharonia_log_memory_used_bytes {}\n# TYPE other gauge\nother 1\n"
    )
    joint = merge([page.format(1000), page.format(1004)]).decode()
    assert "charonia_log_memory_used_bytes 1004\n" in joint
    assert "other 2\n" in joint
