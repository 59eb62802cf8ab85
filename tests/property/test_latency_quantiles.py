"""Quantiles of summaries are near a value that was measured, and of several parts the same as of one (M5)."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from charonia.metrics.exposition import merge
from charonia.metrics.latencies import Latencies, Summary
from charonia.metrics.quantiles import quantile
from charonia.models.config_forms import parse
from charonia.options.settings import MetricsSettings

DURATIONS_NS = st.lists(st.integers(0, 10**12), min_size=1, max_size=60)
QUANTILES = (0.0, 0.25, 0.5, 0.9, 1.0)
MODEL = 'a" ,quantile="0.5"} 1\n'
CONFIG = parse('backend: "python"')
CONFIG.name = MODEL


@example([172_000], 0.0)
@given(DURATIONS_NS, st.floats(0, 1))
def test_near_the_value_at_its_rank(durations_ns: list[int], wanted: float) -> None:
    summary = Summary()
    for duration_ns in durations_ns:
        summary.observe(duration_ns, 0)
    values = sorted(duration_ns // 1000 for duration_ns in durations_ns)
    exact = values[max(1, ceil(wanted * len(values))) - 1]
    assert quantile(summary.within(0), wanted) == pytest.approx(exact, rel=0.01)


@given(st.lists(DURATIONS_NS, min_size=1, max_size=4))
def test_parts_added_up_are_the_whole(parts: list[list[int]]) -> None:
    settings = MetricsSettings(summaries=True, quantiles=QUANTILES)
    pages, whole = [], Latencies(settings)
    all_of_it = whole.add(1, CONFIG)
    assert all_of_it is not None
    for durations_ns in parts:
        part = Latencies(settings, joint=True)
        measured = part.add(1, CONFIG)
        assert measured is not None
        for duration_ns in durations_ns:
            measured.observe("request", duration_ns, 0)
            all_of_it.observe("request", duration_ns, 0)
        pages.append(part.render(0).decode())
    assert merge(pages).decode() == whole.render(0).decode()
