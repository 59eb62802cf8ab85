"""The gateway's families under Triton's names (M1, M3)."""

from __future__ import annotations

from collections import Counter

import pytest
from memory_log.log import MemoryLog

from charonia.calls.unsent_counts import failure_reason
from charonia.catalog.catalog import Catalog
from charonia.errors import (
    Cancelled,
    CharoniaError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    LogUnavailable,
    ResourceExhausted,
    Unavailable,
)
from charonia.facts.events import ProcessJoined, VersionLoaded, VersionUnloaded
from charonia.options.settings import GatewaySettings
from executors.configuration.config import normalise
from executors.repository.pbtxt import parse
from gateway.dataplane import DataPlane
from gateway.metrics import GatewayMetrics, JobCounts


@pytest.mark.parametrize(
    ("error", "executed", "reason"),
    [
        (Cancelled(""), True, "CANCELED"),
        (Unavailable(""), True, "REJECTED"),
        (LogUnavailable(""), False, "REJECTED"),
        (ResourceExhausted(""), False, "REJECTED"),
        (DeadlineExceeded(""), True, "REJECTED"),
        (InternalError(""), True, "BACKEND"),
        (InvalidArgument(""), False, "OTHER"),
    ],
)
def test_reasons(error: CharoniaError, executed: bool, reason: str) -> None:
    assert failure_reason(error, executed=executed) == reason


async def test_the_page() -> None:
    catalog = Catalog()
    metrics = GatewayMetrics(
        catalog, DataPlane(MemoryLog(), GatewaySettings("g")), JobCounts(Counter(m=2), Counter(), Counter(m=1))
    )
    tensor = '{ name: "x" data_type: TYPE_FP32 dims: 1 }'
    config = normalise(parse(f'name: "m" backend: "python" input {tensor} output {tensor}'))
    catalog.apply(ProcessJoined("executor", "e"))
    catalog.apply(VersionLoaded("e", "m", 3, "h", 1, config.SerializeToString()))

    lines = metrics.render().decode().splitlines()
    assert "# TYPE nv_inference_request_success counter" in lines
    assert 'nv_inference_request_success{model="m",version="3"} 0.0' in lines
    assert {line for line in lines if line.startswith("nv_inference_request_failure{")} == {
        f'nv_inference_request_failure{{model="m",reason="{reason}",version="3"}} 0.0'
        for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    }

    assert 'charonia_jobs_accepted_total{model="m"} 2.0' in lines
    assert 'charonia_idempotent_replays_total{model="m"} 1.0' in lines
    assert "charonia_requests_expired_total 0.0" in lines
    assert "charonia_rechecks_total 0.0" in lines

    counts = metrics.counts("m", 3)
    counts.success, counts.duration_ns = 2, 5_999
    counts.failures["OTHER"] = 1
    lines = metrics.render().decode().splitlines()
    assert 'nv_inference_request_success{model="m",version="3"} 2.0' in lines
    assert 'nv_inference_request_duration_us{model="m",version="3"} 5.0' in lines
    assert 'nv_inference_request_failure{model="m",reason="OTHER",version="3"} 1.0' in lines

    catalog.apply(VersionUnloaded("e", "m", 3))
    assert 'model="m",' not in metrics.render().decode()
