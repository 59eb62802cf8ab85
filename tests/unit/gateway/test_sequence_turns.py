"""The order of a sequence's requests while one of them waits."""

from __future__ import annotations

import asyncio

import pytest

from charonia.inference import InferenceRequest
from gateway.dataplane import SequenceTurns


def of(sequence: int | str, model: str = "m") -> InferenceRequest:
    return InferenceRequest(model, -1, [], sequence_id=sequence)


class World:
    """Requests that note when they are through; some wait for `gate` before."""

    def __init__(self) -> None:
        self.turns = SequenceTurns()
        self.gate = asyncio.Event()
        self.through: list[str] = []

    async def send(self, name: str, sequence: int | str, *, waits: bool = False, model: str = "m") -> None:
        if waits or self.turns:
            async with self.turns.of(of(sequence, model)):
                if waits:
                    await self.gate.wait()
        self.through.append(name)

    def start(self, name: str, sequence: int | str, *, waits: bool = False, model: str = "m") -> asyncio.Task[None]:
        return asyncio.ensure_future(self.send(name, sequence, waits=waits, model=model))


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_others_wait_for_the_one_before_them_in_their_sequence_alone() -> None:
    world = World()
    tasks = [
        world.start("1a", 1, waits=True),
        world.start("1b", 1),
        world.start("2a", 2),
        world.start("other model", 1, model="n"),
        world.start("text", "1"),
        world.start("none", 0),
    ]
    await settled()
    assert world.through == ["2a", "other model", "text", "none"]
    world.gate.set()
    tasks.append(world.start("1c", 1))
    await asyncio.gather(*tasks)
    assert world.through[4:] == ["1a", "1b", "1c"]
    assert not world.turns


@pytest.mark.parametrize("leaves", [0, 1])
async def test_one_that_leaves_does_not_let_the_next_overtake(leaves: int) -> None:
    world = World()
    tasks = [world.start("a", 1, waits=True), world.start("b", 1, waits=True), world.start("c", 1)]
    await settled()
    tasks.pop(leaves).cancel()
    await settled()
    assert world.through == []
    world.gate.set()
    await asyncio.gather(*tasks)
    assert world.through == [["b", "c"], ["a", "c"]][leaves]
