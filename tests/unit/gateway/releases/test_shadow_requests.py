"""Copies for a shadow are bounded, compared and counted, and delay no other request."""

from __future__ import annotations

import asyncio

import catalog_facts as facts
import numpy as np
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import InternalError, LogUnavailable
from charonia.inference import InferenceRequest
from charonia.releases.route_rule import RouteRule
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord
from gateway.releases.shadow_requests import MAX_IN_FLIGHT, ShadowRequests

SERVED = facts.catalog(facts.joined(), facts.loaded(version=2), facts.scanned()).find("m", 2)
RULE = RouteRule(1, shadow=2, tolerances=(("", 0.1),))


def tensor(value: float) -> Tensor:
    return Tensor.of("y", np.array([value], np.float32))


def answered(*outputs: Tensor, error: InternalError | None = None) -> ResponseRecord:
    return ResponseRecord(b"", "m", 2, list(outputs), {}, error)


async def test_answers_are_compared_and_counted() -> None:
    answers = [
        answered(tensor(1.05)),
        answered(tensor(2)),
        answered(error=InternalError("broken")),
        LogUnavailable("no log"),
    ]
    asked: list[InferenceRequest] = []

    async def send(request: InferenceRequest) -> ResponseRecord:
        asked.append(request)
        answer = answers[len(asked) - 1]
        if isinstance(answer, LogUnavailable):
            raise answer
        return answer

    log = MemoryLog()
    shadows = ShadowRequests(log, send)
    request = InferenceRequest("m", -1, [tensor(7)], id="mine", headers=[(b"a", b"b")])
    for _ in answers:
        shadows.copy(request, SERVED, RULE, [tensor(1)])
    await shadows.settled()
    assert {(found.served.version, found.headers, found.id) for found in asked} == {(2, None, "")}
    assert all(found.priority > 1 << 30 for found in asked), "callers come first"
    assert request.id == "mine"
    await shadows.close()
    counted = await log.statistics(keys.shadow_counts("m", 2))
    assert counted == {"same": 1, "different": 1, "different in y": 1, "failed": 1, "skipped": 1}


async def test_while_many_run_no_others_are_copied() -> None:
    gate = asyncio.Event()

    async def send(_request: InferenceRequest) -> ResponseRecord:
        await gate.wait()
        return answered(tensor(1))

    shadows = ShadowRequests(MemoryLog(), send)
    for _ in range(MAX_IN_FLIGHT + 3):
        shadows.copy(InferenceRequest("m", -1, [tensor(7)]), SERVED, RULE, [tensor(1)])
    large = Tensor.of("y", np.zeros(5_000_000, np.float32))
    shadows.copy(InferenceRequest("m", -1, [large]), SERVED, RULE, [large])
    assert shadows.counts == {("m", "skipped"): 4}
    gate.set()
    await shadows.settled()
    assert shadows.counts == {("m", "skipped"): 4, ("m", "same"): MAX_IN_FLIGHT}
    await shadows.close()


async def test_a_gateway_that_drains_waits_for_no_copy() -> None:
    begun = asyncio.Event()

    async def send(_request: InferenceRequest) -> ResponseRecord:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError("it never answers")

    shadows = ShadowRequests(MemoryLog(), send)
    shadows.copy(InferenceRequest("m", -1, [tensor(7)]), SERVED, RULE, [tensor(1)])
    await begun.wait()
    shadows.begin_drain()
    await shadows.settled()
    shadows.copy(InferenceRequest("m", -1, [tensor(7)]), SERVED, RULE, [tensor(1)])
    await shadows.settled()
    assert shadows.counts == {}
    await shadows.close()
