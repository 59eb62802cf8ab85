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


class Busy:
    """A log whose queue of the model is never the same twice, nor empty."""

    def __init__(self) -> None:
        self.waves, self.asked = self, 0

    async def pending(self, _model: str) -> tuple[int, int]:
        self.asked += 1
        return self.asked, 0

    async def queue_entries(self, _model: str) -> int:
        return 1


async def test_a_version_that_was_loaded_again_meanwhile_drains_no_longer() -> None:
    """The requests that come since are for its successor."""
    log = Busy()
    pool = SimpleNamespace(unfinished=0)
    drained, loaded = incarnation("m", cast(Any, pool)), incarnation("m", cast(Any, pool))
    serving = {("m", 1): drained}
    retirement = Retirement(*cast(Any, (log, serving, None, None, None)))
    retirement.drain(drained, ())
    async with asyncio.timeout(30):
        while log.asked < 3:
            await asyncio.sleep(0.001)
        serving["m", 1] = loaded
        await retirement.idle()
    assert serving == {("m", 1): loaded}
