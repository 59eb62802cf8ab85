"""The families of metrics that engines of language models share, with the names, texts and buckets of vLLM's.

`vllm.engine_metrics` fills them with what vLLM says, `llm.generation_metrics` with what our own engine does: they stand
on one page, where a name has one text. Series are on the board of the model's process, so a value costs a store.
"""

from __future__ import annotations

from collections.abc import Mapping

from executors.backends.python.api.metrics import Metric, MetricFamily

OWNED = "charonia_llm_"
"""What the names of families begin with that vLLM does not have."""

_COUNTER, _GAUGE, _HISTOGRAM = MetricFamily.COUNTER, MetricFamily.GAUGE, MetricFamily.HISTOGRAM

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST_S = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_TEXTS = (1, 2, 5, 10, 20)

VLLM: Mapping[str, tuple[str, int, tuple[float, ...] | None]] = {
    "prompt_tokens_total": ("Number of prefill tokens processed.", _COUNTER, None),
    "generation_tokens_total": ("Number of generation tokens processed.", _COUNTER, None),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _HISTOGRAM, _TTFT_S),
    "time_per_output_token_seconds": ("Histogram of time per output token in seconds.", _HISTOGRAM, _TOKEN_S),
    "inter_token_latency_seconds": ("Histogram of time between tokens in seconds.", _HISTOGRAM, _TOKEN_S),
    "e2e_request_latency_seconds": ("Histogram of end to end request latency in seconds.", _HISTOGRAM, _REQUEST_S),
    "request_prompt_tokens": ("Number of prefill tokens processed.", _HISTOGRAM, None),
    "request_generation_tokens": ("Number of generation tokens processed.", _HISTOGRAM, None),
    "request_params_n": ("Histogram of the n request parameter.", _HISTOGRAM, _TEXTS),
    "request_success_total": ("Count of successfully processed requests.", _COUNTER, None),
    "num_preemptions_total": ("Number of requests that gave their blocks up.", _COUNTER, None),
    "prefix_cache_queries_total": ("Prompt tokens looked up in the prefix cache.", _COUNTER, None),
    "prefix_cache_hits_total": ("Prompt tokens found in the prefix cache.", _COUNTER, None),
    "num_requests_running": ("Number of requests in the engine's batch.", _GAUGE, None),
    "num_requests_waiting": ("Number of requests that wait for the engine.", _GAUGE, None),
    "kv_cache_usage_perc": ("Share of the blocks of keys and values in use, 1 for all.", _GAUGE, None),
}
"""By name without the prefix `vllm:`: text, kind, and the buckets of a histogram; None of tokens of a request."""


class OwnFamily(MetricFamily):
    """A family with a name of ours, which models may not have."""

    _owned = OWNED


class EngineSeries:
    """Makes the series of one engine, all with the same labels; they end with this object.

    `longest` is the context length, up to which the tokens of requests are counted in buckets.
    """

    def __init__(self, labels: Mapping[str, str], longest: int) -> None:
        self._labels = labels
        self._tokens = token_buckets(longest)
        self._families: list[MetricFamily] = []

    def of_vllm(self, name: str, **labels: str) -> Metric:
        """The series of a family `vllm:name`. Raises `TritonModelException` when the board is full."""
        text, kind, buckets = VLLM[name]
        family = MetricFamily(f"vllm:{name}", text, kind)
        self._families.append(family)
        if kind == _HISTOGRAM and buckets is None:
            buckets = self._tokens
        return family.Metric({**self._labels, **labels}, None if buckets is None else list(buckets))

    def own(self, name: str, text: str, kind: int) -> Metric:
        """The series of a counter or gauge whose name begins with `OWNED`. Raises as `of_vllm`."""
        family = OwnFamily(name, text, kind)
        self._families.append(family)
        return family.Metric(dict(self._labels))


def token_buckets(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to `longest`, at least 1."""
    found: list[float] = []
    scale = 1
    while scale <= max(1, longest):
        found += [scale * step for step in (1, 2, 5) if scale * step <= max(1, longest)]
        scale *= 10
    return tuple(found)
