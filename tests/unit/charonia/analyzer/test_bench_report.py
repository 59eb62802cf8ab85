"""What is shown of figures: text, perf_analyzer's columns, the document and the page."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from html import escape
from typing import Any
from xml.etree import ElementTree

import pytest

from charonia.analyzer.bench_options import parsed
from charonia.analyzer.bench_report import (
    LevelResult,
    Run,
    csv_text,
    document,
    level_text,
    summary_table,
    threshold_text,
)
from charonia.analyzer.input_data import model_view
from charonia.analyzer.latency_histogram import LatencyHistogram
from charonia.analyzer.report_page import linear, page
from charonia.analyzer.window_figures import ServerFigures, WindowFigures, gauges


def statistics(requests: int, us: int) -> dict[str, Any]:
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    spent = {name: {"count": requests, "ns": requests * us * 1000} for name in parts}
    spent["success"] = {"count": requests, "ns": requests * us * 5000}
    return {"version": "1", "inference_count": requests, "execution_count": requests // 2, "inference_stats": spent}


def figures(requests: int = 100, latency_us: int = 1000) -> WindowFigures:
    latency = LatencyHistogram.of([latency_us * 1000] * requests)
    made = WindowFigures(
        duration_ns=2_000_000_000, completed=requests, responses=requests, send_ns=requests * 20_000,
        receive_ns=requests * 10_000, busy_ns=500_000_000, busiest=0.25, latency=latency, service=latency,
    )  # fmt: skip
    made.server["simple"] = ServerFigures.between([statistics(50, 100)], [statistics(50 + requests, 100)])
    return made


def run(line: str = "", config: dict[str, Any] | None = None) -> Run:
    options = parsed(["bench", "-m", "simple", *line.split()])
    view = model_view("simple", "", {"inputs": [], "outputs": []}, config or {}, {})
    return Run(options, view, 1, "2026-01-01T00:00:00+00:00", [0.5, 1.5])


def result(level: float = 4, **more: Any) -> LevelResult:
    made = figures(**more)
    return LevelResult(level, True, True, (made, made, made), made)


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_differences_of_statistics() -> None:
    server = figures().server["simple"]
    assert (server.inferences, server.executions, server.counts["success"]) == (100, 50, 100)
    assert server.mean_us("queue") == pytest.approx(100)
    assert server.overhead_us == pytest.approx(100)
    assert ServerFigures.between([], [statistics(10, 5)]).inferences == 10
    assert ServerFigures().mean_us("queue") == 0


def test_the_columns_are_perf_analyzers() -> None:
    (row,) = rows(csv_text(run("--verbose-csv"), [result()]))
    assert ",".join(row) == (
        "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
        "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency,"
        "Avg latency,request/response,response wait"
    )
    assert row["Inferences/Second"] == "50"
    assert [row[name] for name in ("Client Send", "Client Recv", "Network+Server Send/Recv")] == ["20", "10", "570"]
    assert (row["Avg latency"], row["request/response"], row["response wait"]) == ("1000", "30", "970")


def test_columns_that_come_when_they_are_asked_for() -> None:
    cached = run("--request-rate-range 5 --percentile 80", {"response_cache": {"enable": True}})
    (row,) = rows(csv_text(cached, [result()]))
    assert next(iter(row)) == "Request Rate"
    assert {"Server Cache Hit", "Server Cache Miss", "p80 latency"} <= set(row)
    streamed = result()
    streamed.figures.responses = 300
    assert rows(csv_text(run(), [streamed]))[0]["Response Throughput"] == "150"
    measured = result()
    measured.figures.metrics["nv_gpu_utilization"] = {"GPU-1": [0.5, 1.0]}
    (row,) = rows(csv_text(run("--collect-metrics --verbose-csv"), [measured]))
    assert row["Avg GPU Utilization"] == "GPU-1:0.75;"
    unknown = result()
    unknown.figures.server.clear()
    assert "Server Queue" not in rows(csv_text(run(), [unknown]))[0]


def test_text() -> None:
    bad = LevelResult(8, False, True, (figures(),), figures())
    bad.figures.errors.update(Counter({"HTTP 400: no": 3}))
    bad.figures.due = 1000
    bad.figures.busiest = 0.95
    bad.figures.service = LatencyHistogram.of([400_000] * 100)
    text = level_text(run("--request-rate-range 8"), bad)
    for part in (
        "Throughput: 50.00 infer/sec", "p99 latency: 1000 usec", "Failed: 3 times: HTTP 400: no", "raise --max-threads",
        "not stable within 1 windows", "did not keep up", "Generator: 25 % of a core", "queue 100 usec",
        "Avg service time: 400 usec", "p50 service time: 400 usec", "p99 service time: 400 usec",
    ):  # fmt: skip
        assert part in text
    assert not bad.is_good
    assert "service time" not in level_text(run(), bad)
    assert "no" in summary_table(run(), [result(), bad]).splitlines()[2].split()


@pytest.mark.parametrize("due", [100, 106])
def test_fewer_arrivals_than_the_rate_are_not_the_servers_fault(due: int) -> None:
    """A Poisson process at 60 a second may have 100 arrivals in two seconds, where 120 are the mean."""
    kept_up = LevelResult(60, True, True, (figures(),), figures())
    kept_up.figures.due = due
    assert "keep up" not in level_text(run("--request-rate-range 60 --request-distribution poisson"), kept_up)


def judged(level: float, latency_us: int, *, within: bool) -> LevelResult:
    made = figures(latency_us=latency_us)
    return LevelResult(level, True, within, (made,), made)


@pytest.mark.parametrize(
    ("line", "results", "said"),
    [
        ("", [judged(1, 9000, within=True)], ""),
        (
            "--latency-threshold 5 --binary-search --concurrency-range 1:8",
            [judged(1, 9000, within=False)],
            "No measured level met the latency threshold: asked was a mean latency of at most 5 ms, the best measured "
            "is 9.000 ms, of concurrency 1. Raise --latency-threshold, or make the model faster (charonia tune).",
        ),
        (
            "--latency-threshold 0.5 --request-rate-range 20:90 --percentile 99 -b 4",
            [judged(20, 9000, within=False), judged(40, 7000, within=False)],
            "No measured level met the latency threshold: asked was a p99 latency of at most 0.5 ms, the best measured "
            "is 7.000 ms, of request rate 40. Raise --latency-threshold, begin the range below 40, lower -b, or make "
            "the model faster (charonia tune).",
        ),
        (
            "--latency-threshold 5 --binary-search --concurrency-range 1:8",
            [judged(1, 1000, within=True), judged(8, 9000, within=False), judged(4, 4000, within=True)],
            "The highest measured level with a mean latency of at most 5 ms: concurrency 4, with 4.000 ms and 50.0 "
            "infer/s.",
        ),
        (
            "--latency-threshold 5 --concurrency-range 8",
            [LevelResult(8, False, True, (figures(),), figures())],
            "The highest measured level with a mean latency of at most 5 ms: concurrency 8, with 1.000 ms and 50.0 "
            "infer/s. It was not stable, or had failed requests. It is the end of the range: higher ones were not "
            "tried.",
        ),
        (
            "--latency-threshold 5",
            [LevelResult(1, False, False, (WindowFigures(),), WindowFigures())],
            "No measured level met the latency threshold: asked was a mean latency of at most 5 ms, and no request was "
            "answered.",
        ),
    ],
)
def test_every_output_says_what_met_the_threshold(line: str, results: list[LevelResult], said: str) -> None:
    described = run(line)
    # to three digits, as a histogram has them
    assert re.sub(r"\d\.\d{3} ms", _rounded, threshold_text(described, results)) == said
    found = json.loads(json.dumps(document(described, results)))
    assert found["latency_threshold_result"] == threshold_text(described, results)
    lines, columns = summary_table(described, results).splitlines(), rows(csv_text(described, results))
    if not said:
        assert "within" not in lines[0].lower()
        assert "Within Latency Threshold" not in columns[0]
        assert "<th>within" not in page(found)
        return
    limit = f"within {found['latency_threshold_ms']:g} ms"
    assert lines[0].endswith(limit.upper())
    assert [row.split()[-1] == "yes" for row in lines[1 : 1 + len(results)]] == [
        one.within_threshold for one in results
    ]
    assert lines[-1] == found["latency_threshold_result"]
    assert [row["Within Latency Threshold"] for row in columns] == [str(int(one.within_threshold)) for one in results]
    assert f"<th>{limit}</th>" in page(found)
    assert f"<dd>{escape(found['latency_threshold_result'])}</dd>" in page(found)


def _rounded(found: re.Match[str]) -> str:
    return f"{round(float(found[0].removesuffix(' ms')), 1):.3f} ms"


def test_a_report_holds_no_credentials() -> None:
    found = document(run("-u http://me:secret@host:8000"), [])
    assert found["url"] == "http://host:8000"


def test_the_document_and_the_page() -> None:
    results = [result(level, latency_us=100 * level) for level in (1, 4, 16)]
    for one in results:
        one.figures.first = one.figures.gaps = one.figures.latency
    for line in ("", "--request-rate-range 1:9"):
        found = json.loads(json.dumps(document(run(line), results)))
        assert [level["latency_us"]["p99"] for level in found["levels"]] == pytest.approx([100, 400, 1600], rel=0.001)
        assert found["levels"][0]["server"]["simple"]["queue_us"] == pytest.approx(100)
        text = page(found)
        plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
        assert len(plots) == (7 if not line else 8)
        for plot in plots:
            ElementTree.fromstring(plot)
        assert "<script" not in text
        assert not re.search(r"(?:src|href)=|url\(|@import", text)
        assert "nan" not in text


def test_the_page_escapes_what_others_wrote() -> None:
    bad = LevelResult(1, True, True, (figures(),), figures())
    bad.figures.errors["<script>alert(1)</script>"] = 1
    assert "<script" not in page(document(run(), [bad]))


def test_a_page_of_a_level_that_answered_nothing() -> None:
    empty = LevelResult(1, False, True, (WindowFigures(),), WindowFigures())
    assert "<svg" in page(json.loads(json.dumps(document(run(), [empty]))))
    assert rows(csv_text(run("--verbose-csv"), [empty]))[0]["Inferences/Second"] == "0"


@pytest.mark.parametrize("high", [0.0, 0.003, 1.0, 7.0, 99.0, 1234.5, 9e9])
def test_axes_hold_their_values(high: float) -> None:
    scale = linear(0, high)
    assert scale.high >= high
    assert 2 <= len(scale.ticks) <= 7
    assert scale.part(scale.low) == 0
    assert scale.part(scale.high) == 1


def test_gauges_of_a_page_of_metrics() -> None:
    text = "\n".join([
        "# HELP nv_gpu_utilization x", 'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5', "nv_cpu_utilization 0.25",
        'nv_inference_pending_request_count{model="simple",version="1"} 3',
        'nv_inference_pending_request_count{model="other",version="1"} 4', "nv_energy 7",
        'nv_gpu_power_usage{gpu_uuid="G"} x',
    ])  # fmt: skip
    assert list(gauges(text, "simple")) == [
        ("nv_gpu_utilization", "GPU-1", 0.5),
        ("nv_cpu_utilization", "", 0.25),
        ("nv_inference_pending_request_count", "", 3.0),
    ]
