"""The gateway's families under Triton's names (M1, M3), and what it publishes of its open streams."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.calls.unsent_counts import UnsentCounts, failure_reason
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
from charonia.facts.stream_notes import StreamsNote
from charonia.models.config_forms import parse
from charonia.options.settings import GatewaySettings, MetricsSettings
from executors.configuration.config import normalise
from gateway.dataplane import DataPlane
from gateway.entrances import Entrances
from gateway.metrics import GatewayMetrics, JobCounts, OpenStreams


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


async def test_a_version_that_is_loaded_again_begins_at_0_also_between_two_scrapes() -> None:
    catalog = Catalog()
    metrics = GatewayMetrics(catalog, DataPlane(MemoryLog(), GatewaySettings("g")), JobCounts(), joint=True)
    tensor = '{ name: "x" data_type: TYPE_FP32 dims: 1 }'
    config = normalise(parse(f'name: "m" backend: "python" input {tensor} output {tensor}')).SerializeToString()
    for executor in ("e", "f"):
        catalog.apply(ProcessJoined("executor", executor))
        for version in (3, 4):
            catalog.apply(VersionLoaded(executor, "m", version, "h", 1, config))
    for version in (3, 4):
        metrics.counts("m", version).succeeded(1000)
        metrics.counts("m", version).failures["BACKEND"] = 5

    def found(version: int) -> list[str]:
        lines = metrics.render().decode().splitlines()
        counted = "nv_inference_request_success{", 'nv_inference_request_failure{model="m",reason="BACKEND"'
        return [line[-3:] for line in lines if line.startswith(counted) and f'version="{version}"' in line]

    catalog.apply(VersionLoaded("e", "m", 3, "i", 1, config))  # a load of what is loaded: Triton's counters go on
    assert found(3) == found(4) == ["1.0", "5.0"]
    catalog.apply(VersionUnloaded("e", "m", 3))
    assert found(3) == ["1.0", "5.0"], "the other executor has it still"
    catalog.apply(VersionUnloaded("f", "m", 3))
    catalog.apply(VersionLoaded("f", "m", 3, "h", 1, config))
    assert found(3) == ["0.0", "0.0"]
    assert found(4) == ["1.0", "5.0"]
    restarts = [line for line in metrics.render().decode().splitlines() if line.startswith("counter_restarts")]
    assert restarts == ['counter_restarts{model="m",version="3"} 1.0'], "for the page of all parts"


async def test_latencies_of_a_version_that_is_loaded_again_are_measured_from_its_first_request() -> None:
    """Also before the page is read."""
    catalog, log = Catalog(), MemoryLog()
    measured = MetricsSettings(summaries=True)
    metrics = GatewayMetrics(catalog, DataPlane(log, GatewaySettings("g")), JobCounts(), measured)
    entrances = Entrances(catalog, metrics, UnsentCounts(log), caches=False)
    tensor = '{ name: "x" data_type: TYPE_FP32 dims: 1 }'
    config = normalise(parse(f'name: "m" backend: "python" input {tensor} output {tensor}')).SerializeToString()
    catalog.apply(ProcessJoined("executor", "e"))
    for _ in range(2):
        catalog.apply(VersionLoaded("e", "m", 1, "h", 1, config))
        entrances.of(catalog.find("m", 1)).counts.succeeded(1000)
        assert '_request_summary_us_count{model="m",version="1"} 1\n' in metrics.render().decode()
        catalog.apply(VersionUnloaded("e", "m", 1))


async def test_a_change_of_each_of_many_models_takes_a_short_time() -> None:
    """As when an executor that holds them drains."""
    catalog = Catalog()
    metrics = GatewayMetrics(catalog, DataPlane(MemoryLog(), GatewaySettings("g")), JobCounts())
    models = [f"m{number}" for number in range(10_000)]
    for model in models:
        metrics.counts(model, 1)
    begin = time.process_time()
    for model in models:
        for listener in catalog.listeners:
            listener(model)
    assert time.process_time() - begin < 1.0


class Log(MemoryLog):
    """Counts notes, and can refuse them."""

    away = False
    written = 0

    async def put_note(self, key: bytes, data: bytes, ttl_s: int) -> None:
        if self.away:
            raise LogUnavailable("it is away")
        await super().put_note(key, data, ttl_s)
        self.written += 1


async def noted(log: Log, streams: int) -> StreamsNote:
    """The note once it has so many streams."""
    async with asyncio.timeout(30):
        while True:
            (data,) = await log.notes([keys.open_streams("g")])
            if data is not None and (note := StreamsNote.unpack(data)).open == streams:
                return note
            await asyncio.sleep(0.001)


@pytest.fixture
async def log() -> Log:
    return Log()


@pytest.fixture
async def streams(log: Log) -> AsyncIterator[OpenStreams]:
    made = OpenStreams(log, "g", interval_s=0.002)
    yield made
    await made.close()


async def test_a_stream_is_published_while_it_is_open(log: Log, streams: OpenStreams) -> None:
    assert not log.written
    first = streams.opened("m", 2, "acme", "mine")
    first.responses, first.last_ns = 3, first.since_ns + 5_000_000
    second = streams.opened("other", 1, "", "")
    row, _ = (await noted(log, 2)).rows
    assert (row.model, row.version, row.tenant, row.client_id, row.responses) == ("m", 2, "acme", "mine", 3)
    assert row.last_us - row.since_us == 5_000
    streams.closed(first)
    assert (await noted(log, 1)).rows[0].model == "other"
    streams.closed(second)
    assert (await noted(log, 0)).rows == ()
    third = streams.opened("m", 2, "", "")
    await noted(log, 1)
    streams.closed(third)


async def test_a_log_that_is_away_costs_no_stream(
    log: Log, streams: OpenStreams, caplog: pytest.LogCaptureFixture
) -> None:
    log.away = True
    stream = streams.opened("m", 1, "", "")
    async with asyncio.timeout(30):
        while "open streams are not published: it is away" not in caplog.text:
            await asyncio.sleep(0.001)
    log.away = False
    await noted(log, 1)
    assert caplog.text.count("are not published") == 1
    streams.closed(stream)
