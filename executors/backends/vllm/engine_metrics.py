"""The statistics of one engine as metric families: those of Triton's vLLM backend, and vLLM's gauges of its scheduler.

They are written to the board of the model's process, which the executor reads at a scrape; a value costs a store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from executors.backends.python.api.metrics import Metric, MetricFamily

_log = logging.getLogger(__name__)

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST_S = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_TEXTS = (1, 2, 5, 10, 20)


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
        counter, gauge, histogram = MetricFamily.COUNTER, MetricFamily.GAUGE, MetricFamily.HISTOGRAM
        tokens = token_buckets(longest)

        self._families: list[MetricFamily] = []
        """Their series end with them."""

        def made(name: str, what: str, kind: int, buckets: tuple[float, ...] | None = None) -> Metric:
            family = MetricFamily(f"vllm:{name}", what, kind)
            self._families.append(family)
            return family.Metric(labels, buckets)

        self._prompt = made("prompt_tokens_total", "Number of prefill tokens processed.", counter)
        self._generated = made("generation_tokens_total", "Number of generation tokens processed.", counter)
        self._first = made(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", histogram, _TTFT_S
        )
        self._each = made(
            "time_per_output_token_seconds", "Histogram of time per output token in seconds.", histogram, _TOKEN_S
        )
        self._whole = made(
            "e2e_request_latency_seconds", "Histogram of end to end request latency in seconds.", histogram, _REQUEST_S
        )
        self._prompts = made("request_prompt_tokens", "Number of prefill tokens processed.", histogram, tokens)
        self._lengths = made("request_generation_tokens", "Number of generation tokens processed.", histogram, tokens)
        self._texts = made("request_params_n", "Histogram of the n request parameter.", histogram, _TEXTS)
        self._preempted = made("num_preemptions_total", "Number of requests that gave their blocks up.", counter)
        self._queried = made("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", counter)
        self._hits = made("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", counter)
        self._running = made("num_requests_running", "Number of requests in the engine's batch.", gauge)
        self._waiting = made("num_requests_waiting", "Number of requests that wait for the engine.", gauge)
        self._usage = made("kv_cache_usage_perc", "Share of the blocks of keys and values in use, 1 for all.", gauge)

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
            (self._texts, stats.n_params_iter),
        ):
            for value in values:
                metric.observe(value)
        for one in stats.finished_requests:
            self._whole.observe(one.e2e_latency)
            self._prompts.observe(one.num_prompt_tokens)
            self._lengths.observe(one.num_generation_tokens)


def token_buckets(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to `longest`, at least 1."""
    found: list[float] = []
    scale = 1
    while scale <= max(1, longest):
        found += [scale * step for step in (1, 2, 5) if scale * step <= max(1, longest)]
        scale *= 10
    return tuple(found)
