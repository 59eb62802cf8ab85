"""Summaries and histograms as their page shows them (M4, M5, C26)."""

from __future__ import annotations

import math

import pytest

from charonia.metrics.latencies import WINDOW_NS, Latencies, Summary
from charonia.metrics.quantiles import joint_quantiles, quantile
from charonia.models.config_forms import parse
from charonia.options.settings import MetricsSettings

PLAIN = parse('name: "m" backend: "python" metric_tags { key: "team" value: "a\\"b" }')
CACHED = parse('name: "c" backend: "python" response_cache { enable: true }')
BUCKETS = parse(
    'name: "d" model_metrics { metric_control { metric_identifier { family: '
    '"nv_inference_first_response_histogram_ms" } histogram_options { buckets: [ -1, 0.0, 1, 2.5 ] } } }'
)
MEASURED = MetricsSettings(histograms=True, summaries=True, quantiles=(0.5, 0.99))


def lines(latencies: Latencies, now_ns: int = 0) -> list[str]:
    return latencies.render(now_ns).decode().splitlines()


def test_nothing_is_measured_unless_it_is_asked_for() -> None:
    latencies = Latencies(MetricsSettings())
    assert not latencies.measures
    assert latencies.add(1, PLAIN) is None
    assert latencies.render(0) == b""


def test_a_summary() -> None:
    latencies = Latencies(MEASURED)
    measured = latencies.add(1, PLAIN)
    assert measured is not None
    for duration_ns in (10_000, 10_999, 3_000_000):
        measured.observe("queue", duration_ns, 0)
    measured.observe("cache_hit", 1, 0)  # not of this model
    page = lines(latencies)
    labels = '_team="a\\"b",model="m",version="1"'
    assert "# TYPE nv_inference_queue_summary_us summary" in page
    assert f"nv_inference_queue_summary_us_count{{{labels}}} 3" in page
    assert f"nv_inference_queue_summary_us_sum{{{labels}}} 3020" in page
    assert f'nv_inference_queue_summary_us{{{labels},quantile="0.5"}} 10' in page
    (p99,) = [line for line in page if line.startswith(f'nv_inference_queue_summary_us{{{labels},quantile="0.99"')]
    assert float(p99.rpartition(" ")[2]) == pytest.approx(3000, rel=0.011)
    assert f'nv_inference_request_summary_us{{{labels},quantile="0.5"}} NaN' in page
    assert not any(line.startswith("nv_cache") for line in page)


def test_a_model_with_the_cache_on_shows_other_summaries() -> None:
    latencies = Latencies(MEASURED, caches=True)
    latencies.add(1, CACHED)
    latencies.add(1, PLAIN)
    counts = {line.partition("{")[0] for line in lines(latencies) if "_count{" in line and 'model="c"' in line}
    assert {name for name in counts if "summary" in name} == {
        f"{name}_count"
        for name in (
            "nv_inference_queue_summary_us",
            "nv_inference_compute_input_summary_us",
            "nv_inference_compute_infer_summary_us",
            "nv_inference_compute_output_summary_us",
            "nv_cache_hit_summary_per_model",
            "nv_cache_miss_summary_per_model",
        )
    }
    assert 'nv_inference_request_summary_us_count{_team="a\\"b",model="m"' in latencies.render(0).decode()


def test_every_model_has_a_histogram_of_first_responses() -> None:
    latencies = Latencies(MetricsSettings(histograms=True))
    usual = latencies.add(1, PLAIN)
    chosen = latencies.add(2, BUCKETS)
    assert latencies.add(1, CACHED) is not None
    assert usual is not None
    assert chosen is not None
    for measured in (usual, chosen):
        for duration_ms in (0, 1, 100, 101, 9000):
            measured.responded(duration_ms * 1_000_000)
    page = lines(latencies)
    name = "nv_inference_first_response_histogram_ms"
    of_m = '_team="a\\"b",model="m",version="1"'
    assert [line for line in page if 'model="m"' in line] == [
        f"{name}_count{{{of_m}}} 5",
        f"{name}_sum{{{of_m}}} 9202",
        *(f'{name}_bucket{{{of_m},le="{le}"}} {n}' for le, n in (("100", 3), ("500", 4), ("2000", 4), ("5000", 4))),
        f'{name}_bucket{{{of_m},le="+Inf"}} 5',
    ]
    assert [line for line in page if f"{name}_bucket" in line and 'model="d"' in line] == [
        f'{name}_bucket{{model="d",version="2",le="{le}"}} {n}'
        for le, n in (("-1", 0), ("0", 1), ("1", 2), ("2.5", 2), ("+Inf", 5))
    ]
    assert f'{name}_count{{model="c",version="1"}} 0' in page, "from its load on"


def test_a_version_that_is_served_anew_goes_on_and_one_that_goes_is_forgotten() -> None:
    latencies = Latencies(MEASURED)
    first = latencies.add(1, PLAIN)
    assert first is not None
    first.observe("request", 1000, 0)
    first.responded(0)
    assert latencies.add(1, PLAIN) is first
    assert 'request_summary_us_count{_team="a\\"b",model="m",version="1"} 1' in latencies.render(0).decode()
    latencies.drop("m", 1)
    latencies.drop("m", 1)
    assert not any("{" in line for line in lines(latencies))


def test_quantiles_forget_and_sums_do_not() -> None:
    summary = Summary()
    summary.observe(5_000, 0)
    summary.observe(5_000, 10 * WINDOW_NS)
    assert (summary.count, summary.sum_us) == (2, 10)
    assert sum(summary.within(10 * WINDOW_NS).values()) == 1
    assert sum(summary.within(12 * WINDOW_NS).values()) == 0
    assert math.isnan(quantile({}, 0.5))


def test_parts_that_are_added_up_show_their_ranges() -> None:
    latencies = Latencies(MEASURED, joint=True)
    measured = latencies.add(1, CACHED)
    assert measured is not None
    measured.observe("queue", 0, 0)
    page = lines(latencies)
    within = 'nv_inference_queue_summary_us_within{model="c",version="1",range="0"}'
    assert f"{within} 1" in page
    family = "nv_inference_queue_summary_us"
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page if line.startswith(family)}
    joint = joint_quantiles(family, values)
    assert within not in joint
    assert joint[f'{family}{{model="c",version="1",quantile="0.5"}}'] == 0
    assert joint[f'{family}_count{{model="c",version="1"}}'] == 1
