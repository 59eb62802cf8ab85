"""Sequences that are about to leave: what of their states gets into the log."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from memory_log.log import MemoryLog

from charonia.errors import LogUnavailable
from charonia.eventlog.port import Limits
from charonia.facts.sequence_states import SequenceState, SequenceStep
from charonia.models.interface import ModelInterface
from charonia.wire import (
    BatchHeader,
    BatchPlaces,
    SequenceMark,
    SequencePlace,
    pack_request,
    request_meta,
    unpack_request,
)
from executors.batches.sequence_tensors import SequenceTensors
from executors.batches.sequences import Sequences
from executors.configuration.config import normalise
from executors.settling import checkpoints
from executors.settling.checkpoints import Checkpoints, end_leaving, is_late, restore
from protos.model_config_pb2 import ModelConfig

WIDTH = 100_000
CONFIG = (
    'name: "m" backend: "python" max_batch_size: 4 '
    "sequence_batching { state { "
    f'input_name: "h" output_name: "hn" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} }}'
)


class World:
    """Sequences that have run their first step, whose settlements are under way or done."""

    def __init__(self, checkpoint_every: int = 5) -> None:
        config = text_format.Parse(CONFIG, ModelConfig())
        config.parameters["charonia.checkpoint_every"].string_value = str(checkpoint_every)
        interface = ModelInterface.of(normalise(config))
        self.sequences = Sequences(interface, 1, SequenceTensors(interface, Path("/none")), "states")
        self.incarnation: Any = SimpleNamespace(model="m", pool=SimpleNamespace(sequences=self.sequences))
        self.log = MemoryLog()
        self.open: dict[bytes, SequenceStep] = {}

    async def run(self, number: int) -> None:
        request_id, mark = bytes([number]) * 16, SequenceMark(number, True, False)
        meta = request_meta(1, "", [], (), {})
        packed = pack_request(
            request_id, b"", b"", meta, (), rows=1, signature=0, level=0, accepted_ns=1, sequence=mark
        )
        places = BatchPlaces(0, 0, (SequencePlace(number, request_id, 1, False),))
        header = BatchHeader("b", "m", 1, "hash", 1, (1,), b"f", sequences=places)
        record = unpack_request(packed)
        steps = self.sequences.begin(places, [record], 1)
        steps.steps[0].state_after = {"h": np.full(WIDTH, number, np.float32)}
        written, _ = self.sequences.commit(header, [record], steps, {0}, (), (), "e", 1)
        await self.log.accept("m", 0, 0, [(request_id, 1)], [b"r", packed], Limits())
        self.open |= written

    def taken(self, number: int) -> bool:
        """Whether a sequence can go on here."""
        mark, run = SequenceMark(number), bytes([number]) * 16
        meta = request_meta(1, "", [], (), {})
        packed = pack_request(bytes(16), b"", b"", meta, (), rows=1, signature=0, level=0, accepted_ns=1, sequence=mark)
        places = BatchPlaces(0, 0, (SequencePlace(number, run, 1, False),))
        return not self.sequences.begin(places, [unpack_request(packed)], 1).errors

    async def settle(self) -> None:
        done, self.open = self.open, {}
        requests = [(request_id, 0) for request_id in done]
        assert all(await self.log.settle("m", requests, None, [], sequences=done))

    async def states(self) -> dict[int, int]:
        """By sequence the number in its state, where the log has one."""
        keys = sorted(await self.log.sequences("m"))
        found = await self.log.sequence_states("m", keys)
        states = [SequenceState.unpack(one[1]) if one is not None and one[1] else None for one in found]
        return {s.run[0]: int(s.tensors[0].array()[0]) for s in states if s is not None}


async def test_all_states_are_written_those_that_are_not_settled_yet_when_they_are() -> None:
    world = World()
    for number in range(1, 8):
        await world.run(number)
        if number < 6:
            await world.settle()
    assert await world.states() == {}
    await Checkpoints(world.log, world.settle).write(world.incarnation)
    assert await world.states() == {number: number for number in range(1, 8)}
    assert world.sequences.unwritten() == []
    await world.run(8)
    assert world.sequences.unwritten() == [], "from now on each step is written with its settlement"
    await world.settle()
    assert (await world.states())[8] == 8
    await Checkpoints(world.log, world.settle).write(world.incarnation)  # for another reason
    for number in (9, 10):
        end_leaving(world.incarnation)
        await world.run(number)
        await world.settle()
    assert len(world.sequences.unwritten()) == 1, "as seldom as before, once nothing leaves"


@pytest.mark.parametrize(("most", "parts"), [(1000, [3, 2]), (2, [2, 2, 1])])
async def test_no_write_keeps_the_log_for_long(most: int, parts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither many nor large ones: others wait meanwhile."""
    world = World()
    for number in range(1, 6):
        await world.run(number)
    await world.settle()
    sizes: list[int] = []
    keep = world.log.keep_states

    async def kept(model: str, states: Mapping[bytes, tuple[bytes, bytes]]) -> list[bool]:
        sizes.append(len(states))
        return await keep(model, states)

    monkeypatch.setattr(world.log, "keep_states", kept)
    monkeypatch.setattr(checkpoints, "_MAX_STATES", most)
    await Checkpoints(world.log, world.settle).write(world.incarnation)
    assert sizes == parts
    assert len(await world.states()) == 5


@pytest.mark.parametrize("error", [LogUnavailable("away"), TypeError("ours")])
async def test_who_cannot_write_leaves_all_the_same(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    await world.run(1)

    async def settled() -> None:
        raise error

    await Checkpoints(world.log, settled).write(world.incarnation)
    assert f"the states of 1 sequences of 'm' were not written: {error}" in caplog.text
    assert await world.states() == {}


@pytest.mark.parametrize("checkpoint_every", [5, 1])
async def test_who_takes_sequences_over_waits_for_what_is_written_yet_once(checkpoint_every: int) -> None:
    world, other = World(), World(checkpoint_every)
    for number in (1, 2):
        await world.run(number)
    await world.settle()
    keys = sorted(await world.log.sequences("m"))
    coming = asyncio.create_task(restore(world.log, other.incarnation, keys))
    await asyncio.sleep(0)
    kept = world.sequences.newest(keys[1])
    assert kept is not None
    assert await world.log.keep_states("m", {keys[1]: kept}) == [True]
    await coming
    assert [bool(other.taken(number)) for number in (1, 2)] == [False, True]
    # of the other one nothing comes, and nobody waits for it a second time
    asked = 0
    look = world.log.sequence_states

    async def counted(model: str, names: Sequence[bytes]) -> Any:
        nonlocal asked
        asked += 1
        return await look(model, names)

    world.log.sequence_states = counted  # type: ignore[method-assign]
    await restore(world.log, other.incarnation, keys[:1])
    assert asked == 1


def test_batches_that_were_sent_before_somebody_left() -> None:
    incarnation: Any = SimpleNamespace(content_hash="hash", pool=SimpleNamespace(slots=2))

    def sent(instance: int, content_hash: str = "hash") -> BatchHeader:
        places = BatchPlaces(instance, 0, (SequencePlace(0, bytes(16), 1, False),))
        return BatchHeader("b", "m", 1, content_hash, 1, (1,), b"f", sequences=places)

    assert not is_late(incarnation, sent(1))
    assert is_late(incarnation, sent(2))
    assert is_late(incarnation, sent(1, "another"))
