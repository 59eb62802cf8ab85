"""The executor's own metric families."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from charonia.errors import InternalError
from executors.accounting import BACKEND, Executed, Execution, Failure
from executors.metrics import ExecutorMetrics


def samples(metrics: ExecutorMetrics) -> dict[tuple[str, ...], float]:
    return {
        # label names in the text are in alphabetical order
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_batches_are_counted_by_model_and_version() -> None:
    metrics = ExecutorMetrics()
    metrics.loaded("m", 1, 2, 1_500_000_000)
    before = samples(metrics)
    assert before[("charonia_executor_executions_total", "m", "1")] == 0
    assert before[("nv_model_load_duration_secs", "m", "1")] == 1.5
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
    metrics.loaded("m", 1, 2, 0)
    metrics.unloaded("m", 1)
    metrics.unloaded("m", 1)
    found = samples(metrics)
    assert ("charonia_executor_loaded_instances", "m", "1") not in found
    assert found[("charonia_executor_executions_total", "m", "1")] == 0
