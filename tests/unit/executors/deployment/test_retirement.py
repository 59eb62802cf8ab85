"""What is done when the versions of a model have ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from executors.deployment.retirement import Retirement


class Pool:
    """Ends when it is told to."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def idle(self) -> None:
        await self.ended.wait()

    async def close(self) -> None:
        pass


def incarnation(model: str, pool: Pool) -> Any:
    return SimpleNamespace(model=model, version=1, health=None, pool=pool)


async def test_work_waits_for_what_retires_of_its_model_and_no_other() -> None:
    retirement = Retirement(*cast(Any, (None, {}, None, None, None)))
    pools = {name: Pool() for name in "ab"}
    for name, pool in pools.items():
        retirement.retire(incarnation(name, pool))
    done: list[str] = []
    finished = {name: asyncio.Event() for name in "ab"}
    for name in "ab":

        async def work(name: str = name) -> None:
            done.append(name)
            finished[name].set()

        retirement.afterwards(name, work)
    pools["b"].ended.set()
    await asyncio.wait_for(finished["b"].wait(), 60)
    assert done == ["b"], "the other one still runs"
    pools["a"].ended.set()
    await asyncio.wait_for(retirement.idle(), 60)
    assert done == ["b", "a"]
