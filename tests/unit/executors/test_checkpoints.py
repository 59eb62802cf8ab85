"""Sequences that are about to leave: what of their states gets into the log."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from charonia.errors import LogUnavailable
from charonia.eventlog.memory import MemoryLog
from charonia.eventlog.port import Limits
from charonia.models.config import normalise
from charonia.models.interface import ModelInterface
from charonia.sequences import SequenceState, SequenceStep
from charonia.wire import (
    BatchHeader,
    BatchPlaces,
    SequenceMark,
    SequencePlace,
    pack_request,
    request_meta,
    unpack_request,
)
from executors.checkpoints import Checkpoints
from executors.sequence_tensors import SequenceTensors
from executors.sequences import Sequences
from protos.model_config_pb2 import ModelConfig

WIDTH = 100_000
CONFIG = (
    'name: "m" backend: "python" max_batch_size: 4 '
    'parameters { key: "charonia.checkpoint_every" value { string_value: "5" } } '
    "sequence_batching { state { "
    f'input_name: "h" output_name: "hn" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} }}'
)


class World:
    """Sequences that have run their first step, whose settlements are under way or done."""

    def __init__(self) -> None:
        interface = ModelInterface.of(normalise(text_format.Parse(CONFIG, ModelConfig())))
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


async def test_who_cannot_write_leaves_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    await world.run(1)

    async def away() -> None:
        raise LogUnavailable("away")

    await Checkpoints(world.log, away).write(world.incarnation)
    assert "the states of 1 sequences of 'm' were not written: away" in caplog.text
    assert await world.states() == {}
