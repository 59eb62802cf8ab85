"""Counters of `s:{m}` as clients read them (X1-X4)."""

from __future__ import annotations

from gateway.handler import BatchStatistics, Duration, MemoryUsage, ResponseStatistics
from gateway.reports.model_statistics import model_statistics


def test_nothing_counted_is_zero() -> None:
    found = model_statistics("m", 3, {})
    assert (found.name, found.version, found.inference_count, found.execution_count) == ("m", "3", 0, 0)
    assert (found.success, found.fail, found.batches) == (Duration(0, 0), Duration(0, 0), ())
    assert found.failures == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}


def test_every_counter_has_its_place() -> None:
    fields = {
        "last_inference_ms": 7,
        "inference_count": 12,
        "execution_count": 2,
        "fail_REJECTED": 4,
        "fail_OTHER": 5,
        "something_new": 9,
        "b10_count": 1,
        "b10_input_ns": 2,
        "b10_infer_ns": 3,
        "b10_output_ns": 4,
        "b2_count": 1,
    }
    whats = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    for number, what in enumerate(whats):
        fields |= {f"{what}_count": number + 1, f"{what}_ns": 100 * (number + 1)}
    found = model_statistics("m", 1, fields)
    assert (found.last_inference_ms, found.inference_count, found.execution_count) == (7, 12, 2)
    assert [
        found.success,
        found.fail,
        found.queue,
        found.compute_input,
        found.compute_infer,
        found.compute_output,
        found.cache_hit,
        found.cache_miss,
    ] == [Duration(n, 100 * n) for n in range(1, 9)]
    assert found.batches == (
        BatchStatistics(2, Duration(1, 0), Duration(1, 0), Duration(1, 0)),
        BatchStatistics(10, Duration(1, 2), Duration(1, 3), Duration(1, 4)),
    )
    assert found.failures == {"REJECTED": 4, "CANCELED": 0, "BACKEND": 0, "OTHER": 5}


def test_single_responses_are_told_of_where_they_are_counted() -> None:
    """X5."""
    fields = {
        f"r{place}_{what}_{of}": 10 * place + 1
        for place in (0, 10)
        for what in ("infer", "success")
        for of in ("count", "ns")
    }
    fields |= {"r0_output_count": 3, "r0_output_ns": 4, "r10_empty_count": 5, "r10_empty_ns": 6}
    found = model_statistics("m", 1, fields).responses
    assert list(found) == ["0", "10"]
    assert found["0"] == ResponseStatistics(Duration(1, 1), Duration(3, 4), Duration(1, 1))
    assert found["10"].empty_response == Duration(5, 6)
    assert (found["10"].cancel, found["10"].fail) == (Duration(), Duration())
    assert model_statistics("m", 1, {}).responses == {}
    only = model_statistics("m", 1, {"r2_cancel_count": 3, "r2_cancel_ns": 4}).responses
    assert only == {"2": ResponseStatistics(cancel=Duration(3, 4))}


def test_memory_is_listed_by_kind_and_device() -> None:
    """X7."""
    found = model_statistics("m", 1, {}, {"GPU 1": 3, "CPU_PINNED 0": 2, "GPU 0": 1}).memory
    assert found == (MemoryUsage("CPU_PINNED", 0, 2), MemoryUsage("GPU", 0, 1), MemoryUsage("GPU", 1, 3))
    assert model_statistics("m", 1, {}).memory == ()
