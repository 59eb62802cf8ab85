"""`pb_utils.MetricFamily` as models use it (P16)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from executors.backends.python.api import metrics
from executors.backends.python.api.errors import TritonModelException
from executors.backends.python.api.metrics import MetricFamily
from executors.backends.python.protocol import metric_board
from executors.backends.python.protocol.metric_board import Series


@pytest.fixture(autouse=True)
def board() -> Iterator[int]:
    """A board of the test's own, as a new process has."""
    descriptor = metric_board.create()
    metrics.write_to(descriptor)
    metrics._families.clear()
    yield descriptor
    metrics._board = None


def series(board: int) -> dict[str, Series]:
    return {found.family + "".join(f" {k}={v}" for k, v in found.labels): found for found in metric_board.read(board)}


def test_a_counter_counts(board: int) -> None:
    family = MetricFamily("hits", "what was hit", MetricFamily.COUNTER)
    metric = family.Metric(labels={"model": "m"})
    assert metric.value() == 0
    metric.increment(2)
    metric.increment(0.5)
    assert metric.value() == 2.5
    assert series(board)["hits model=m"].values == (2.5,)
    for wrong in (-1, float("nan")):
        with pytest.raises(TritonModelException, match=r"^Failed to increment metric value: "):
            metric.increment(wrong)
    with pytest.raises(TritonModelException, match=r"^Failed to set metric value: "):
        metric.set(1)
    with pytest.raises(TritonModelException, match=r"^Failed to observe metric value: "):
        metric.observe(1)
    assert metric.value() == 2.5


def test_a_gauge_goes_up_and_down(board: int) -> None:
    metric = MetricFamily("level", "how high", MetricFamily.GAUGE).Metric()
    with pytest.raises(TritonModelException, match="has been deleted"):
        metric.set(1)  # its family went with the expression that made it
    family = MetricFamily("level", "how high", MetricFamily.GAUGE)
    metric = family.Metric()
    metric.increment(3)
    metric.increment(-1)
    assert metric.value() == 2
    metric.set(10)
    metric.increment(5)
    assert metric.value() == 15
    value, at, added = series(board)["level"].values
    assert (value, added) == (10, 5)
    assert at > 0


def test_a_histogram_observes(board: int) -> None:
    family = MetricFamily("sizes", "how large", MetricFamily.HISTOGRAM)
    metric = family.Metric(buckets=[1, 2.5])
    for value in (0.5, 1, 2, 9, -1):
        metric.observe(value)
    assert series(board)["sizes"].values == (3, 1, 1, 11.5)
    assert series(board)["sizes"].bounds == (1, 2.5)
    without_bounds = MetricFamily("all", "d", MetricFamily.HISTOGRAM)
    metric = without_bounds.Metric(buckets=[])
    with pytest.raises(TypeError):
        metric.observe("1")  # type: ignore[arg-type]
    assert series(board)["all"].values == (0, 0)
    metric = family.Metric(buckets=[1, 2.5])
    for call in (metric.value, lambda: metric.increment(1), lambda: metric.set(1)):
        with pytest.raises(
            TritonModelException,
            match=r"_KIND_HISTOGRAM does not support (Value|Increment|Set)$",
        ):
            call()


def test_the_same_family_and_the_same_metric(board: int) -> None:
    first, second = (MetricFamily("hits", "d", MetricFamily.COUNTER) for _ in range(2))
    one, two = first.Metric(labels={"a": "1", "b": "2"}), second.Metric(labels={"b": "2", "a": "1"})
    one.increment(1)
    two.increment(1)
    assert one.value() == two.value() == 2
    del one, first
    gc.collect()
    assert two.value() == 2
    assert MetricFamily("hits", "other", MetricFamily.COUNTER).Metric(labels={"a": "1", "b": "2"}).value() == 2
    with pytest.raises(TritonModelException, match=r"message: Family name already exists with different type$"):
        MetricFamily("hits", "d", MetricFamily.GAUGE)


def test_deleting_removes_series(board: int) -> None:
    family = MetricFamily("hits", "d", MetricFamily.COUNTER)
    kept, dropped = family.Metric(labels={"a": "kept"}), family.Metric(labels={"a": "dropped"})
    del dropped
    gc.collect()
    assert set(series(board)) == {"hits a=kept"}
    del family
    gc.collect()
    assert series(board) == {}
    for call in (lambda: kept.increment(1), kept.value):
        with pytest.raises(
            TritonModelException,
            match=r"^Failed to .* metric value: Invalid metric operation as the corresponding",
        ):
            call()
    again = MetricFamily("hits", "another", MetricFamily.GAUGE)
    assert again.Metric(labels={"a": "kept"}).value() == 0


@pytest.mark.parametrize(
    ("labels", "buckets", "kind", "text"),
    [
        (
            {"a": 1},
            None,
            MetricFamily.COUNTER,
            "^Error when .* access JSON non-string as string$",
        ),
        ({"le": "1"}, None, MetricFamily.COUNTER, "^Error when creating Metric: .* message: Invalid label name$"),
        ({1: "1"}, None, MetricFamily.COUNTER, "message: Invalid label name$"),
        ([], None, MetricFamily.COUNTER, r"^Failed to create metric\. Labels must be a dictionary\.$"),
        ({}, [1], MetricFamily.COUNTER, r"^Failed to create metric\. Unexpected buckets found\.$"),
        ({}, None, MetricFamily.HISTOGRAM, r"^Failed to create metric\. Missing required buckets\.$"),
        ({}, (1, 2), MetricFamily.HISTOGRAM, r"^Failed to create metric\. Buckets must be a list\.$"),
        ({}, [1, 1], MetricFamily.HISTOGRAM, "message: Bucket Boundaries must be strictly sorted$"),
        ({}, [float(n) for n in range(2000)], MetricFamily.HISTOGRAM, "no room for another series"),
    ],
)
def test_metrics_that_cannot_be(labels: Any, buckets: Any, kind: int, text: str) -> None:
    family = MetricFamily("hits", "d", kind)
    with pytest.raises(TritonModelException, match=text):
        family.Metric(labels=labels, buckets=buckets)


@pytest.mark.parametrize("name", ["nv_inference_count", "1st", ""])
def test_families_that_cannot_be(name: str) -> None:
    with pytest.raises(TritonModelException, match=r"^Error when creating MetricFamily: .* Invalid metric name$"):
        MetricFamily(name, "d", MetricFamily.COUNTER)


def test_a_family_has_a_name_and_a_kind(board: int) -> None:
    for name, kind in ((None, 0), ("hits", 3), ("hits", None)):
        with pytest.raises(TypeError):
            MetricFamily(name, "d", kind)  # type: ignore[arg-type]
    family = MetricFamily("sizes", "d", MetricFamily.HISTOGRAM)
    metric = family.Metric(buckets=[])
    metric.observe(3)
    assert series(board)["sizes"].values == (1, 3)


def test_threads_lose_nothing() -> None:
    family = MetricFamily("hits", "d", MetricFamily.COUNTER)
    metric = family.Metric()

    def work() -> None:
        for _ in range(2000):
            metric.increment(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metric.value() == 8000
