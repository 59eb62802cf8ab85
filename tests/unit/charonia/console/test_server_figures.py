"""Rates and means between two metrics pages, as the endpoint renders them."""

from __future__ import annotations

from dataclasses import replace

from charonia.console.metric_samples import Scrape, read_page
from charonia.console.server_figures import FAMILIES, bars, batch_fill, figures, growth, model_figures, quantiles_ms

PAGE = """# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{{model="a",version="1"}} {a}
nv_inference_request_success{{model="b",version="1"}} {b}
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{{model="a",reason="OTHER",version="1"}} {failed}
# TYPE nv_inference_request_duration_us counter
nv_inference_request_duration_us{{model="a",version="1"}} {us}
# TYPE nv_inference_queue_duration_us counter
nv_inference_queue_duration_us{{model="a",version="1"}} {us}
# TYPE nv_inference_count counter
nv_inference_count{{model="a",version="1"}} {rows}
# TYPE nv_inference_exec_count counter
nv_inference_exec_count{{model="a",version="1"}} {a}
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{{model="a",version="1"}} 7
# TYPE charonia_batcher_running_requests gauge
charonia_batcher_running_requests{{model="a"}} 3
# TYPE nv_inference_request_summary_us summary
nv_inference_request_summary_us_count{{model="a",version="1"}} 1
nv_inference_request_summary_us{{model="a",version="1",quantile="0.5"}} 2000
nv_inference_request_summary_us{{model="a",version="1",quantile="0.99"}} NaN
"""


def page(time_s: float, **values: int) -> Scrape:
    return read_page(PAGE.format(**{"a": 0, "b": 0, "failed": 0, "us": 0, "rows": 0, **values}), time_s)


def test_rates_and_means_between_two_readings() -> None:
    before = page(10.0, a=100, b=50, failed=1, us=1_000_000, rows=100)
    after = page(20.0, a=300, b=50, failed=11, us=3_000_000, rows=900)
    found = figures(before, after)
    assert [(one.model, one.version, one.rate) for one in found.models] == [("a", "1", 20.0), ("b", "1", 0.0)]
    a, b = found.models
    assert (a.error_rate, a.latency_ms, a.phases_ms["queue"], a.rows_per_execution) == (1.0, 10.0, 10.0, 4.0)
    assert (a.pending, a.running) == (7, 3)
    assert (b.latency_ms, b.rows_per_execution, b.error_share) == (None, None, 0.0)
    assert (found.whole.rate, round(found.whole.error_share, 4)) == (20.0, 0.0476)
    assert model_figures(before, after, "a").rate == 20.0
    assert model_figures(before, after, "") == found.whole


def test_batches_are_as_full_as_their_rows_are_of_what_they_could_have_had() -> None:
    found = figures(page(10.0), page(20.0, a=100, rows=400)).models
    assert batch_fill(found, {("a", "1"): 8}) == 0.5
    assert batch_fill(found, {("a", "1"): 8, ("b", "1"): 4}) == 0.5  # b executed nothing
    assert batch_fill(found, {("a", "1"): 0}) is None
    # 100 executions with 4 rows of 8, and 50 with 2 rows of 2: 500 rows of 900
    other = replace(found[0], model="c", rows_per_execution=2.0, execution_rate=found[0].execution_rate / 2)
    assert batch_fill([found[0], other], {("a", "1"): 8, ("c", "1"): 2}) == 500 / 900


def test_only_families_that_are_used_are_kept() -> None:
    text = "# TYPE other counter\nother 1\n" + PAGE.format(a=1, b=1, failed=1, us=1, rows=1)
    kept, every = read_page(text, 1.0, FAMILIES), read_page(text, 1.0)
    assert set(every.families) - set(kept.families) == {"other", "nv_inference_request_summary_us_count"}
    assert figures(kept, kept) == figures(every, every)
    assert quantiles_ms(kept, "a") == quantiles_ms(every, "a")


def test_a_counter_that_went_back_begins_again() -> None:
    assert growth(100, 30) == 30
    assert figures(page(0.0, a=100), page(1.0, a=30)).models[0].rate == 30.0


def test_quantiles_leave_out_what_was_not_measured() -> None:
    assert quantiles_ms(page(0.0), "a") == {"0.5": 2.0}


def test_pages_that_are_none_have_no_figures() -> None:
    for text in ("", "\0 nothing {", "# TYPE a counter\na{ 1"):
        scrape = read_page(text, 1.0)
        assert scrape.versions() == []
        assert figures(scrape, scrape).whole.rate == 0.0


def test_bars_are_shares_of_the_highest() -> None:
    assert [(one.label, one.share) for one in bars([("1", 5), ("2", 10), ("3", 0)])] == [
        ("1", 0.5),
        ("2", 1.0),
        ("3", 0.0),
    ]
    assert bars([("1", 0)])[0].share == 0.0
