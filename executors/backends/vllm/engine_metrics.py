"""The statistics of one engine as metric families: those of Triton's vLLM backend, and vLLM's gauges of its scheduler.

They are written to the board of the model's process, which the executor reads at a scrape; a value costs a store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from executors.backends.engine_families import EngineSeries

_log = logging.getLogger(__name__)


def logger_factory(labels: Mapping[str, str]) -> Callable[..., Any]:
    """What `AsyncLLM` takes as a factory of loggers. `labels` are those of every series."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class EngineLogger(StatLoggerBase):  # type: ignore[misc]  # its types are not read
        """Counts what an engine says after each of its steps. Called in the event loop of the engine's client."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._metrics: EngineMetrics | None = EngineMetrics(labels, vllm_config.model_config.max_model_len)

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if self._metrics is None:
                return
            try:
                if scheduler_stats is not None:
                    self._metrics.scheduled(scheduler_stats)
                if iteration_stats is not None:
                    self._metrics.iterated(iteration_stats)
            except Exception:  # what these objects have changes with vLLM's releases; raised here, it ends the engine
                _log.exception("[vllm] this release has other statistics: no more metrics")
                self._metrics = None

        def log_engine_initialized(self) -> None: ...

    return EngineLogger


class EngineMetrics:
    """The series of one engine. `longest` is the context length, up to which tokens are counted in buckets."""

    def __init__(self, labels: Mapping[str, str], longest: int) -> None:
        self._series = series = EngineSeries(labels, longest)
        self._prompt = series.of_vllm("prompt_tokens_total")
        self._generated = series.of_vllm("generation_tokens_total")
        self._first = series.of_vllm("time_to_first_token_seconds")
        self._each = series.of_vllm("time_per_output_token_seconds")
        self._between = series.of_vllm("inter_token_latency_seconds")
        self._whole = series.of_vllm("e2e_request_latency_seconds")
        self._prompts = series.of_vllm("request_prompt_tokens")
        self._lengths = series.of_vllm("request_generation_tokens")
        self._texts = series.of_vllm("request_params_n")
        self._preempted = series.of_vllm("num_preemptions_total")
        self._queried = series.of_vllm("prefix_cache_queries_total")
        self._hits = series.of_vllm("prefix_cache_hits_total")
        self._running = series.of_vllm("num_requests_running")
        self._waiting = series.of_vllm("num_requests_waiting")
        self._usage = series.of_vllm("kv_cache_usage_perc")

    def scheduled(self, stats: Any) -> None:
        """Take what vLLM says of its scheduler."""
        self._running.set(stats.num_running_reqs)
        self._waiting.set(stats.num_waiting_reqs + getattr(stats, "num_skipped_waiting_reqs", 0))
        self._usage.set(stats.kv_cache_usage)
        self._queried.increment(stats.prefix_cache_stats.queries)
        self._hits.increment(stats.prefix_cache_stats.hits)

    def iterated(self, stats: Any) -> None:
        """Take what vLLM says of a step."""
        self._prompt.increment(stats.num_prompt_tokens)
        self._generated.increment(stats.num_generation_tokens)
        self._preempted.increment(stats.num_preempted_reqs)
        for metric, values in (
            (self._first, stats.time_to_first_tokens_iter),
            (self._each, stats.inter_token_latencies_iter),
            (self._between, stats.inter_token_latencies_iter),
            (self._texts, stats.n_params_iter),
        ):
            for value in values:
                metric.observe(value)
        for one in stats.finished_requests:
            self._whole.observe(one.e2e_latency)
            self._prompts.observe(one.num_prompt_tokens)
            self._lengths.observe(one.num_generation_tokens)
