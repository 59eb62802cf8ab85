"""Reports of guidellm and aiperf: their figures, and what counts as a failed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.clients.chats import REQUESTS, Figures, aiperf_figures, guidellm_figures, measured
from loadtest.clients.outcome import Outcome


def guidellm_report(folder: Path, requests: int) -> None:
    def of(**one: float) -> dict[str, Any]:
        return {"successful": one}

    metrics = {
        "request_totals": {"successful": requests, "errored": REQUESTS - requests},
        "output_token_count": of(total_sum=960.0),
        "time_to_first_token_ms": of(median=250.0, mean=400.0),
        "inter_token_latency_ms": of(median=14.0, mean=20.0),
    }
    (folder / "report.json").write_text(json.dumps({"benchmarks": [{"metrics": metrics, "duration": 15.0}]}))


def test_figures_of_guidellm(tmp_path: Path) -> None:
    guidellm_report(tmp_path, REQUESTS)
    assert guidellm_figures(tmp_path) == Figures(REQUESTS, 64.0, 250.0, 14.0)


def test_figures_of_aiperf(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    report = {
        "request_count": {"unit": "requests", "avg": 30.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 39.0},
        "time_to_first_token": {"unit": "ms", "avg": 700.0, "p50": 684.0},
        "inter_token_latency": {"unit": "ms", "avg": 4.0, "p50": 3.5},
    }
    (tmp_path / "run" / "profile_export_aiperf.json").write_text(json.dumps(report))
    assert aiperf_figures(tmp_path) == Figures(30.0, 39.0, 684.0, 3.5)


@pytest.mark.parametrize(("requests", "state"), [(REQUESTS, "ok"), (REQUESTS - 1, "failed")])
def test_a_run_fails_with_one_of_its_requests(tmp_path: Path, requests: int, state: str) -> None:
    guidellm_report(tmp_path, requests)
    found = measured(Outcome("guidellm", "ok"), guidellm_figures, tmp_path)
    assert (found.state, "64.0 tokens/s" in found.figures + found.reason) == (state, True)


def test_a_run_without_a_report(tmp_path: Path) -> None:
    for figures in (guidellm_figures, aiperf_figures):
        assert measured(Outcome("x", "ok"), figures, tmp_path).state == "failed"
