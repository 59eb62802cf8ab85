"""How the end of an ensemble's request gets into the log, however long that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_log.log import MemoryLog

from batcher.ensembles import ensemble_endings as module
from batcher.ensembles.ensemble_endings import Endings
from batcher.ensembles.ensemble_statistics import Tally
from batcher.entries.carriers import Carried, CarrierEntry
from batcher.scheduling.ensembles.ensemble_planner import AnswerRequest
from batcher.scheduling.observations import RequestQueued
from charonia import keys
from charonia.calls.unsent_counts import FAILURES_IN_ENSEMBLE
from charonia.errors import LogUnavailable
from charonia.eventlog import port
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory
from charonia.eventlog.port import Limits
from charonia.metrics.latencies import Latencies
from charonia.options.settings import MetricsSettings
from charonia.tensors import Tensor
from charonia.wire import (
    FLAG_REPLY_BY_REFERENCE,
    pack_request,
    records_of,
    request_meta,
    unpack_request,
    unpack_response,
)

REQUEST_ID = b"r" * 16


class AwayAtFirst(MemoryLog):
    """Loses the answers of the first settlements."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    async def settle(self, *arguments: Any, **more: Any) -> list[bool]:
        if self.left:
            self.left -= 1
            raise LogUnavailable("away")
        return await super().settle(*arguments, **more)


async def answer(log: MemoryLog, own: PayloadDirectory, large: Tensor, *, several: bool = False) -> None:
    """End a request, whose caller reads large answers out of band, with this answer; with `several` after another."""
    await log.accept("m", 0, 0, [(REQUEST_ID, 4)], [b"r", b""], Limits())
    packed = pack_request(
        *(REQUEST_ID, b"gateway-1", b""),
        request_meta(1, "", [Tensor.of("x", np.zeros((1, 1), np.float32))], (), {}),
        [b"\0" * 4],
        rows=1,
        signature=0,
        level=0,
        accepted_ns=1,
        flags=FLAG_REPLY_BY_REFERENCE,
    )
    carried = Carried(unpack_request(packed), CarrierEntry(b"q", b"1-0", 1), 0)
    request = RequestQueued(REQUEST_ID, 1, 0, 1, 0, 0, 0, 0, carrier=carried)
    tasks: list[asyncio.Task[None]] = []
    settled: list[object] = []

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.create_task(work))

    endings = Endings(log, "m", own, spawn, settled.extend, Latencies(MetricsSettings()))
    if several:
        first = AnswerRequest(request, {"y": large}, final=False)
        endings.answer(first, [large], {}, Tally(), several=True)
    endings.answer(AnswerRequest(request, {"y": large}), [large], {}, Tally(), several=several)
    async with asyncio.timeout(30):
        while not settled:
            await asyncio.sleep(0)


async def test_a_large_answer_is_put_beside_the_log_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0)
    gateway, own = (PayloadDirectory(str(tmp_path), name) for name in ("gateway-1", keys.ensemble_endpoint("m")))
    gateway.open()
    own.open()
    log = AwayAtFirst(3)
    await answer(log, own, Tensor.of("y", np.zeros(BY_REFERENCE_BYTES, np.uint8)))

    assert len(await log.range(keys.replies("gateway-1"))) == 1
    beside = [file for file in (tmp_path / "gateway-1").iterdir() if file.name not in {"token", "slots"}]
    assert len(beside) == 1


@pytest.mark.parametrize("several", [False, True])
async def test_an_answer_that_finds_no_room_and_is_too_large_for_the_log_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0)
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", BY_REFERENCE_BYTES)
    log = AwayAtFirst(3)
    large = Tensor.of("y", np.zeros(BY_REFERENCE_BYTES, np.uint8))
    await answer(log, PayloadDirectory("", keys.ensemble_endpoint("m")), large, several=several)

    entries = await log.range(keys.replies("gateway-1"))
    found = [unpack_response(record) for entry in entries for record in records_of(entry.fields)]
    assert [one.final for one in found] == ([False, True] if several else [True])
    for one in found:
        assert str(one.error).startswith("the answer of model 'm' has ")
    assert [one.place for one in found] == ([(1, 0), (1, 1)] if several else [None])
    assert await log.pending("m") == (0, 0)
    counted = await log.statistics(keys.statistics("m", 1, ""))
    assert (counted.get("fail_count"), counted.get("success_count", 0)) == (FAILURES_IN_ENSEMBLE, 0)
