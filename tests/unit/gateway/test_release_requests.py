"""What becomes of requests that a candidate fails, and of copies for a shadow."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
from job_bench import CONFIG, MODEL, JobBench, numbers, options
from job_bench import request as request_of

from charonia.clock import monotonic_ns
from charonia.datatypes import DataType
from charonia.errors import InternalError
from charonia.facts.events import VersionLoaded
from charonia.inference import InferenceRequest
from charonia.models.config_forms import parse
from charonia.releases.route_rule import CANARY, WHOLE, RouteRule, route_fact
from charonia.tensors import Tensor
from charonia.traces.contexts import TIMESTAMPS, Context
from charonia.traces.reports import REQUEST_END, REQUEST_START
from executors.configuration.config import normalise
from gateway.tracing.trace import Trace

CANDIDATE = RouteRule(1, 2, WHOLE, stage=CANARY)
OTHER = CONFIG.replace('"x" data_type: TYPE_INT32', '"w" data_type: TYPE_FP32')
"""A version that refuses the requests of this file."""


class Data(bytearray):
    """Can be watched by a weak reference."""


@pytest.fixture
async def bench() -> AsyncIterator[Any]:
    bench = JobBench()
    yield bench
    await bench.close()


async def released(bench: Any, rule: RouteRule, config: str = CONFIG, other: str = CONFIG) -> Any:
    """A gateway with the versions 1 (of `config`) and 2 (of `other`), and a rule."""
    await bench.serve(config)
    await bench.tell(VersionLoaded("e", MODEL, 2, "other", 1, normalise(parse(other)).SerializeToString()))
    await bench.tell(route_fact(MODEL, 1, rule))
    return await bench.gateway()


def failures(gateway: Any) -> list[int]:
    """How many requests the versions 1 and 2 have failed."""
    return [sum(gateway.metrics.counts(MODEL, version).failures.values()) for version in (1, 2)]


async def test_what_a_candidate_fails_is_run_again_while_the_gateway_drains(bench: Any) -> None:
    gateway = await released(bench, CANDIDATE)
    call = asyncio.create_task(gateway.infer(request_of(3, headers=[])))
    (record,) = await bench.comes()
    gateway.begin_drain()
    drained = asyncio.create_task(gateway.drained())
    await bench.finish(record, error=InternalError("broken"))
    (again,) = await bench.comes()
    assert not drained.done()
    await bench.finish(again)
    assert numbers((await call).outputs)["y"] == 3
    await drained
    assert gateway._entrances.choice.reruns == {MODEL: 1}
    assert failures(gateway) == [0, 1]


async def test_a_request_that_cannot_be_run_again_fails_once_and_as_the_candidates(bench: Any) -> None:
    gateway = await released(bench, CANDIDATE, OTHER)
    trace = Trace(Context(TIMESTAMPS, b"t" * 16, b"s" * 8))
    call = asyncio.create_task(gateway.infer(request_of(3, headers=[], trace=trace)))
    (record,) = await bench.comes()
    await bench.finish(record, error=InternalError("broken"))
    with pytest.raises(InternalError, match="broken"):
        await call
    assert gateway._entrances.choice.reruns == {}
    assert failures(gateway) == [0, 1]
    assert [name for name, _ in trace.own] == [REQUEST_START, REQUEST_END]
    assert trace.version == 2


async def test_inputs_that_a_candidate_refuses_are_freed_with_their_request(bench: Any) -> None:
    gateway = await released(bench, CANDIDATE, other=OTHER)
    data = Data(4)
    freed = weakref.ref(data)
    request = InferenceRequest(MODEL, -1, [Tensor("x", DataType.INT32, (1, 1), data)], headers=[])
    gc.disable()  # it may be far away
    try:
        assert gateway._entrances.admit(request, monotonic_ns())[0].served.version == 1
        del data, request
        assert freed() is None
    finally:
        gc.enable()
    assert gateway._entrances.choice.reruns == {MODEL: 1}


async def test_copies_are_of_no_tenant(bench: Any) -> None:
    gateway = await released(bench, RouteRule(1, shadow=2))
    call = asyncio.create_task(gateway.infer(request_of(3, headers=[]), options=options(tenant="acme")))
    (record,) = await bench.comes()
    await bench.finish(record)
    await call
    (copy,) = await bench.comes()
    assert (record.meta.tenant, copy.meta.tenant) == ("acme", "")
    await bench.finish(copy)
    await gateway._shadows.settled()
    assert gateway._shadows.counts == {(MODEL, "same"): 1}
