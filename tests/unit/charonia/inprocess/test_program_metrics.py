"""Metrics that a program adds to a server's page."""

from __future__ import annotations

import gc

import pytest

from charonia.inprocess import InvalidArgumentError, Metric, MetricFamily, MetricKind, UnsupportedError
from charonia.inprocess.program_metrics import custom_page


def test_counters_and_gauges_are_shown_as_long_as_they_exist() -> None:
    family = MetricFamily(MetricKind.COUNTER, "test_seen", "What was seen\nso far")
    first = Metric(family, {"kind": 'a "b"'})
    again = Metric(MetricFamily(MetricKind.COUNTER, "test_seen", "else"), {"kind": 'a "b"'})
    first.increment(2)
    again.increment(0.5)
    assert (first.value, again.value, first.kind) == (2.5, 2.5, MetricKind.COUNTER)
    level = Metric(MetricFamily(MetricKind.GAUGE, "test_level", "Now"))
    level.set_value(7)
    level.increment(-2)
    page = custom_page()
    assert "# HELP test_seen What was seen\\nso far\n# TYPE test_seen counter\n" in page
    assert 'test_seen{kind="a \\"b\\""} 2.5\n' in page
    assert "# TYPE test_level gauge\ntest_level 5\n" in page
    del first, again, level
    gc.collect()
    assert "test_" not in custom_page()


def test_what_a_kind_cannot_do() -> None:
    counter = Metric(MetricFamily(MetricKind.COUNTER, "test_up", ""))
    with pytest.raises(InvalidArgumentError, match="can only be incremented monotonically by non-negative values"):
        counter.increment(-1)
    with pytest.raises(UnsupportedError, match=r"^TRITONSERVER_METRIC_KIND_COUNTER does not support Set$"):
        counter.set_value(1)
    with pytest.raises(InvalidArgumentError, match="'test_up' is the name of another metric, a COUNTER"):
        MetricFamily(MetricKind.GAUGE, "test_up", "")
    for name in ("", "1st", "a b", "é"):
        with pytest.raises(InvalidArgumentError, match="cannot be the name of a metric"):
            MetricFamily(MetricKind.GAUGE, name, "")
    family = MetricFamily(MetricKind.GAUGE, "test_labels", "")
    with pytest.raises(InvalidArgumentError, match="must have a type of TRITONSERVER_PARAMETER_STRING"):
        Metric(family, {"label": 1})  # type: ignore[dict-item]
    with pytest.raises(InvalidArgumentError, match="cannot be the name of a label"):
        Metric(family, {"a-b": "c"})
