"""Waves as a gateway writes them, for tests without one: of requests x INT32 [1,1] for the models of the rigs."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import numpy as np

from charonia import keys
from charonia.clock import wall_ns
from charonia.eventlog.port import EventLog
from charonia.tensors import Tensor
from charonia.wire import RequestMeta, request_meta, wave_head


@dataclass(frozen=True)
class SentWave:
    """A wave in the log."""

    prefix: bytes
    entry_id: bytes
    stream: bytes
    count: int

    @property
    def ids(self) -> list[bytes]:
        return [self.prefix + bytes((index,)) for index in range(self.count)]


def meta_of_one(tensor: Tensor, output: str) -> RequestMeta:
    return request_meta(1, "", [tensor], (output,), {})


async def send_wave(
    log: EventLog, model: str, tensors: list[Tensor], endpoint: str, *, output: str = "y", accepted_ns: int = 0
) -> SentWave:
    """Append a wave of requests with one input each, of one row, and return once the log has it."""
    prefix = os.urandom(15)
    stream = keys.queue(model, 0, 0)
    head = wave_head(
        *(prefix, len(tensors), endpoint.encode(), meta_of_one(tensors[0], output)),
        rows=1,
        signature=7,
        level=0,
        accepted_ns=accepted_ns or wall_ns(),
    )
    accepted: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    assert log.waves.send(stream, [head, *[tensor.data for tensor in tensors]], accepted.set_result)
    entry_id = await accepted
    assert isinstance(entry_id, bytes), entry_id
    return SentWave(prefix, entry_id, stream, len(tensors))


def numbers(*values: int) -> list[Tensor]:
    """Inputs of the echo model of `batching_cluster`."""
    return [Tensor.of("x", np.full((1, 1), value, np.int32)) for value in values]
