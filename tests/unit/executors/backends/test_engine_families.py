"""The buckets of tokens, and names that only engines may have."""

from __future__ import annotations

import os

import pytest

from executors.backends.engine_families import OWNED, EngineSeries, token_buckets
from executors.backends.python.api import metrics
from executors.backends.python.api.errors import TritonModelException
from executors.backends.python.protocol import metric_board
from executors.backends.python.protocol.metric_board import BoardWriter


def test_buckets_of_tokens_end_with_the_context() -> None:
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(512) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
    assert token_buckets(0) == (1,)


def test_names_of_ours_are_read_for_their_backend_only(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = metric_board.create()
    monkeypatch.setattr(metrics, "_board", BoardWriter(descriptor))
    monkeypatch.setattr(metrics, "_families", {})
    series = EngineSeries({"model": "m"}, 64)
    steps = series.own(f"{OWNED}steps_total", "Steps.", metrics.MetricFamily.COUNTER)
    steps.increment(3)
    assert [(one.family, one.values) for one in metric_board.read(descriptor, OWNED)] == [(f"{OWNED}steps_total", (3,))]
    assert metric_board.read(descriptor) == []
    with pytest.raises(TritonModelException, match="Invalid metric name"):
        metrics.MetricFamily(f"{OWNED}other", "Of a model.", metrics.MetricFamily.COUNTER)
    with pytest.raises(TritonModelException, match="Invalid metric name"):
        series.own("charonia_executor_steps", "Of an executor.", metrics.MetricFamily.COUNTER)
    os.close(descriptor)
