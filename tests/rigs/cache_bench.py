"""A gateway that caches responses, asked by the tests of the cache."""

from __future__ import annotations

import asyncio
from typing import Any

from job_bench import CONFIG, numbers, until_so
from job_bench import request as request_of
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import LogUnavailable

CACHED = CONFIG + "response_cache { enable: true }\n"
SIZE = 1_000_000


class CountingLog(MemoryLog):
    """Counts how often responses are looked up; `broken` makes looking and storing fail."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.broken = False

    async def notes(self, keys: Any) -> list[bytes | None]:
        self.looks += 1
        if self.broken:
            raise LogUnavailable("away")
        return await super().notes(keys)

    async def keep_recent(self, *arguments: Any, **more: Any) -> list[bytes]:
        if self.broken:
            raise LogUnavailable("away")
        return await super().keep_recent(*arguments, **more)


async def cached_gateway(bench: Any, name: str = "g", **settings: Any) -> Any:
    return await bench.gateway(name, response_cache_size_bytes=SIZE, **settings)


async def ask(gateway: Any, value: int = 1, wishes: Any = None, **more: Any) -> dict[str, int]:
    response = await gateway.infer(request_of(value, **more), options=wishes)
    return numbers(response.outputs)


def asking(gateway: Any, value: int = 1, wishes: Any = None, **more: Any) -> asyncio.Task[dict[str, int]]:
    return asyncio.create_task(ask(gateway, value, wishes, **more))


async def executed(bench: Any, gateway: Any, value: int = 1, wishes: Any = None, **more: Any) -> dict[str, int]:
    """One request that is not in the cache, and its execution."""
    task = asking(gateway, value, wishes, **more)
    (record,) = await bench.comes()
    assert await bench.finish(record)
    return await task


async def stored(bench: Any, count: int = 1) -> None:
    async def there() -> bool:
        return bool(await bench.log.count_times(keys.CACHE_EXPIRIES) >= count)

    await until_so(there)
