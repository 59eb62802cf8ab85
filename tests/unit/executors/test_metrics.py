"""The executor's own metric families."""

from __future__ import annotations

import time

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from charonia.catalog.catalog import Catalog
from charonia.errors import InternalError
from charonia.facts.events import ProcessJoined, VersionLoaded, VersionUnloaded
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.options.settings import MetricsSettings
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, pack_request, request_meta, unpack_request
from executors.batches.batch_results import BACKEND, Executed, Execution, Failure
from executors.configuration.config import normalise
from executors.metrics import ExecutorMetrics


def samples(metrics: ExecutorMetrics) -> dict[tuple[str, ...], float]:
    return {
        # label names in the text are in alphabetical order
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def record(accepted_ns: int) -> RequestRecord:
    tensor = Tensor.of("x", np.zeros((1, 1), np.float32))
    meta = request_meta(1, "", [tensor], (), {})
    data = [tensor.data]
    return unpack_request(
        pack_request(bytes(16), b"", b"", meta, data, rows=1, signature=0, level=0, accepted_ns=accepted_ns)
    )


CONFIG = normalise(parse('name: "m" backend: "python" metric_tags { key: "team" value: "t" }'))


def loaded(metrics: ExecutorMetrics, load_ns: int = 0) -> None:
    metrics.loaded("m", ModelInterface.of(CONFIG), 1, 2, load_ns, CONFIG)


def test_batches_are_counted_by_model_and_version() -> None:
    metrics = ExecutorMetrics()
    loaded(metrics, 1_500_000_000)
    before = samples(metrics)
    assert before[("charonia_executor_executions_total", "m", "1")] == 0
    assert before[("nv_model_load_duration_secs", "t", "m", "1")] == 1.5
    failure = Failure(1, InternalError("no"), BACKEND, 0)
    metrics.executed("m", 1, Executed([b""] * 2, [Execution((0,), 3, 0, 0, 1000, 2000, 3000)], [failure]))
    metrics.executed("m", 1, Executed([b""], [Execution((0,), 300, 0, 0, 0, 0, 0)]))
    metrics.returned("m", 2)
    metrics.invalid()
    found = samples(metrics)
    assert found[("charonia_executor_executions_total", "m", "1")] == 2
    assert found[("charonia_executor_request_failures_total", "m", "1")] == 1
    assert found[("charonia_executor_compute_seconds_total", "m", "infer", "1")] == 2e-6
    assert found[("charonia_executor_batch_rows_bucket", "2", "m", "1")] == 0
    assert found[("charonia_executor_batch_rows_bucket", "4", "m", "1")] == 1
    assert found[("charonia_executor_batch_rows_bucket", "+Inf", "m", "1")] == 2
    assert found[("charonia_executor_batch_rows_sum", "m", "1")] == 303
    assert found[("charonia_executor_batches_returned_total", "m", "2")] == 1
    assert found[("charonia_executor_invalid_entries_total",)] == 1
    assert found[("charonia_executor_loaded_instances", "m", "1")] == 2


def test_gauges_go_with_the_version_and_counters_stay() -> None:
    metrics = ExecutorMetrics()
    loaded(metrics)
    metrics.unloaded("m", 1)
    metrics.unloaded("m", 1)
    found = samples(metrics)
    assert ("charonia_executor_loaded_instances", "m", "1") not in found
    assert found[("charonia_executor_executions_total", "m", "1")] == 0


def test_what_is_triton_s_goes_with_the_version_and_carries_its_tags() -> None:
    catalog, metrics = Catalog(), ExecutorMetrics(MetricsSettings(summaries=True, histograms=True), joint=True)
    metrics.follow(catalog)
    tagged, plain = '{_team="t",model="m",version="1"}', '{model="m",version="1"}'

    def found(name: str, labels: str = tagged) -> str:
        lines = [line for line in metrics.render().decode().splitlines() if line.startswith(name + labels)]
        return lines[0].rpartition(" ")[2] if lines else ""

    for executor in ("here", "there"):
        catalog.apply(ProcessJoined("executor", executor))
        catalog.apply(VersionLoaded(executor, "m", 1, "h", 1, CONFIG.SerializeToString()))
    loaded(metrics)
    metrics.settled("m", 1, {"inference_count": 3, "queue_ns": 2_999})
    metrics.unawaited("m", 1, "", 40_000)
    metrics.responded("m", 1, 5_000_000)
    counted = ("nv_inference_count", "nv_inference_request_summary_us_count")
    counted += ("nv_inference_first_response_histogram_ms_count",)
    assert [found(name) for name in counted] == ["3.0", "1", "1"]
    assert found("nv_inference_queue_duration_us") == "2.0"
    assert found("charonia_executor_executions_total", plain) == "0.0"
    metrics.unloaded("m", 1)
    catalog.apply(VersionUnloaded("here", "m", 1))
    assert [found(name) for name in counted] == ["3.0", "1", "1"], "another executor holds it"
    assert found("nv_model_load_duration_secs") == ""
    loaded(metrics)
    catalog.apply(VersionUnloaded("there", "m", 1))
    assert [found(name) for name in counted] == ["0.0", "0", "0"], "all executors had unloaded it"
    metrics.settled("m", 1, {"inference_count": 2})
    catalog.apply(VersionLoaded("here", "m", 1, "h", 1, CONFIG.SerializeToString()))
    assert found("nv_inference_count") == "2.0"
    metrics.unloaded("m", 1)
    catalog.apply(VersionUnloaded("here", "m", 1))
    assert [found(name) for name in counted] == ["", "", ""]
    assert found("counter_restarts", plain) == "2.0", "for the page of all parts"
    assert found("charonia_executor_executions_total", plain) == "0.0"
    loaded(metrics)
    assert [found(name) for name in counted] == ["0.0", "0", "0"]


def test_a_change_of_each_of_many_models_takes_a_short_time() -> None:
    """As when an executor that holds them drains."""
    catalog, metrics, models = Catalog(), ExecutorMetrics(), [f"m{number}" for number in range(10_000)]
    metrics.follow(catalog)
    interface = ModelInterface.of(CONFIG)
    for model in models:
        metrics.loaded(model, interface, 1, 1, 0, CONFIG)
    begin = time.process_time()
    for model in models:
        for listener in catalog.listeners:
            listener(model)
    assert time.process_time() - begin < 1.0


def test_durations_of_each_request_that_was_won() -> None:
    metrics = ExecutorMetrics(MetricsSettings(counters=False, summaries=True))
    loaded(metrics)
    records = [record(1_000_000), record(2_000_000)]
    executed = Executed([b""] * 2, [Execution((0, 1), 2, 3_000_000, 0, 10_000, 20_000, 30_000)])
    metrics.observe("m", 1, records, executed, {0: True, 1: False})
    metrics.observe("other", 1, records, executed, {0: True})
    metrics.unawaited("m", 1, "", 40_000)
    page = metrics.render().decode()
    for name, sum_us in (("queue", 2000), ("compute_input", 10), ("compute_infer", 20), ("compute_output", 30)):
        assert f'nv_inference_{name}_summary_us_count{{_team="t",model="m",version="1"}} 1\n' in page
        assert f'nv_inference_{name}_summary_us_sum{{_team="t",model="m",version="1"}} {sum_us}\n' in page
    assert 'nv_inference_request_summary_us_sum{_team="t",model="m",version="1"} 40\n' in page
    assert "duration_us" not in page
    assert "nv_inference_exec_count" in page
