"""Steps that wait for the response cache: who is asked for, who takes whose answer, what giving up means."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from memory_log.log import MemoryLog

from batcher.ensembles.cached_steps import CachedSteps
from charonia.calls.cache.cached_calls import CachedCalls
from charonia.catalog.catalog import Catalog
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError
from charonia.facts.events import ProcessJoined, VersionLoaded
from charonia.inference import InferenceRequest
from charonia.models.config_forms import parse
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord
from executors.configuration.config import normalise

TENSOR = '{ name: "X" data_type: TYPE_INT32 dims: 1 }'
CACHED = f'name: "m" backend: "python" input {TENSOR} output {TENSOR} response_cache {{ enable: true }}'
A, B, C = b"a", b"b", b"c"


def tensor(value: int) -> Tensor:
    return Tensor("X", DataType.INT32, (1,), value.to_bytes(4, "little"))


def answer(value: int, error: CharoniaError | None = None) -> ResponseRecord:
    return ResponseRecord(bytes(16), "m", 1, [] if error else [tensor(value)], {}, error)


class World:
    def __init__(self) -> None:
        catalog = Catalog()
        catalog.apply(ProcessJoined("executor", "e"))
        catalog.apply(VersionLoaded("e", "m", 1, "h", 1, normalise(parse(CACHED)).SerializeToString()))
        self.served = catalog.served("m")[1]
        self.calls = CachedCalls(MemoryLog(), None, 1_000_000, catalog, lambda *_: None)
        self.steps = CachedSteps(self.calls)
        self.sent: list[bytes] = []
        self.ended: dict[bytes, Any] = {}

    def ask(self, step_id: bytes, value: int = 1, *, alone: bool = False, **more: Any) -> None:
        request = InferenceRequest("m", 1, [tensor(value)], **more)
        rules = self.steps.rules(request, self.served)
        assert rules is not None
        self.steps.ask(
            *(step_id, request, self.served, rules, ""),
            send=lambda: self.sent.append(step_id),
            ended=lambda outcome: self.ended.__setitem__(step_id, outcome),
            alone=alone,
        )

    async def settled(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    def value(self, step_id: bytes) -> int:
        return int.from_bytes(self.ended[step_id].outputs[0].data, "little")


@pytest.fixture
async def world() -> World:
    return World()


async def test_one_is_asked_for_and_the_others_take_its_answer(world: World) -> None:
    for step_id in (A, B, C):
        world.ask(step_id)
    await world.settled()
    assert world.sent == [A]
    assert not world.steps.answered(B, answer(0))  # not asked for from here
    assert world.steps.answered(A, answer(7))
    await world.settled()
    assert [world.value(step_id) for step_id in (A, B, C)] == [7, 7, 7]
    assert not world.steps.waits(A)
    world.ask(b"later")
    await world.settled()
    assert (world.value(b"later"), world.sent) == (7, [A])
    await world.calls.close()


async def test_one_that_another_may_wait_for_is_asked_for_by_itself(world: World) -> None:
    world.ask(A)
    world.ask(B, alone=True)
    world.ask(C)
    await world.settled()
    assert world.sent == [A, B]
    assert world.steps.answered(B, answer(8))
    assert world.steps.answered(A, answer(7))
    await world.settled()
    assert [world.value(step_id) for step_id in (A, B, C)] == [7, 8, 7]
    await world.calls.close()


async def test_a_failure_is_everybodys_and_is_not_kept(world: World) -> None:
    world.ask(A)
    world.ask(B)
    await world.settled()
    world.steps.answered(A, answer(0, InternalError("no")))
    await world.settled()
    assert [world.ended[step_id].error.message for step_id in (A, B)] == ["no", "no"]
    world.ask(C)
    await world.settled()
    assert world.sent == [A, C]
    world.steps.close()
    await world.calls.close()


async def test_when_the_one_asked_for_is_given_up_the_next_one_is_asked_for(world: World) -> None:
    world.ask(A)
    world.ask(B)
    await world.settled()
    world.steps.give_up(A)
    await world.settled()
    assert world.sent == [A, B]
    assert A not in world.ended
    assert not world.steps.answered(A, answer(1))
    assert world.steps.answered(B, answer(2))
    await world.settled()
    assert (world.value(B), A in world.ended) == (2, False)
    await world.calls.close()


async def test_who_waits_may_leave_and_all_may(world: World) -> None:
    world.ask(A)
    world.ask(B)
    await world.settled()
    world.steps.give_up(B)
    world.steps.give_up(B)
    world.steps.answered(A, answer(3))
    await world.settled()
    assert (world.value(A), B in world.ended) == (3, False)
    world.ask(C, value=9)
    await world.settled()
    world.steps.close()
    await world.settled()
    assert C not in world.ended
    await world.calls.close()


async def test_what_cannot_be_sent_fails(world: World) -> None:
    request = InferenceRequest("m", 1, [tensor(1)])
    rules = world.steps.rules(request, world.served)
    assert rules is not None

    def send() -> None:
        raise InternalError("too large")

    world.steps.ask(A, request, world.served, rules, "", send, lambda outcome: world.ended.__setitem__(A, outcome))
    await world.settled()
    assert world.ended[A].message == "too large"
    await world.calls.close()


def test_steps_of_sequences_are_not_cached() -> None:
    world = World()
    assert world.steps.rules(InferenceRequest("m", 1, [tensor(1)], sequence_id=3), world.served) is None
