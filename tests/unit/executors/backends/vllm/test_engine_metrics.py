"""An engine's statistics on the board of its process."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from executors.backends.python.api import metrics
from executors.backends.python.protocol import metric_board
from executors.backends.python.protocol.metric_board import BoardWriter
from executors.backends.vllm.engine_metrics import EngineMetrics

SCHEDULED = SimpleNamespace(
    num_running_reqs=3,
    num_waiting_reqs=2,
    num_skipped_waiting_reqs=1,
    kv_cache_usage=0.25,
    prefix_cache_stats=SimpleNamespace(queries=10, hits=4),
)
FINISHED = SimpleNamespace(e2e_latency=1.5, num_prompt_tokens=12, num_generation_tokens=4)
ITERATED = SimpleNamespace(
    num_prompt_tokens=12,
    num_generation_tokens=4,
    num_preempted_reqs=1,
    time_to_first_tokens_iter=[0.03],
    inter_token_latencies_iter=[0.02, 0.06],
    n_params_iter=[1],
    finished_requests=[FINISHED],
)


def test_what_an_engine_says_is_on_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = metric_board.create()
    monkeypatch.setattr(metrics, "_board", BoardWriter(descriptor))
    monkeypatch.setattr(metrics, "_families", {})
    engine = EngineMetrics({"model": "m", "version": "1"}, 512)
    for _ in range(2):
        engine.scheduled(SCHEDULED)
        engine.iterated(ITERATED)
    found = {series.family: series.values for series in metric_board.read(descriptor)}
    os.close(descriptor)
    assert found["vllm:prompt_tokens_total"] == (24,)
    assert found["vllm:generation_tokens_total"] == (8,)
    assert found["vllm:num_preemptions_total"] == (2,)
    assert (found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]) == ((20,), (8,))
    assert found["vllm:num_requests_running"][0] == 3
    assert found["vllm:num_requests_waiting"][0] == 3
    assert found["vllm:kv_cache_usage_perc"][0] == 0.25
    for family, total in (
        ("time_to_first_token_seconds", 0.06),
        ("time_per_output_token_seconds", 0.16),
        ("inter_token_latency_seconds", 0.16),
        ("e2e_request_latency_seconds", 3.0),
        ("request_prompt_tokens", 24),
        ("request_generation_tokens", 8),
        ("request_params_n", 2),
    ):
        assert found[f"vllm:{family}"][-1] == pytest.approx(total), family
