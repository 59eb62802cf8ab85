"""Counts of texts that the OpenAI API generated: calls, tokens, and how long clients waited for them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from charonia.clock import monotonic_ns
from charonia.facts.usage import OTHERS

from .shapes.text_answers import TextDelta

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)

MAX_TENANTS = 256
"""Tenants with counts of their own; later ones are counted together, as `OTHERS`."""


class Histogram:
    """Observations in seconds, by bucket. `bounds` are the upper bounds, ascending."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, value_s: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value_s)] += times
        self.sum_s += value_s * times

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus has them."""
        total, found = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


@dataclass(slots=True)
class CountedCall:
    """One call while it runs."""

    counts: TextCounts
    model: str
    tenant: str
    prompt_tokens: int
    started_ns: int
    completion_tokens: int = 0
    reported_prompts: dict[int, int] = field(default_factory=dict)
    last_ns: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, delta: TextDelta) -> None:
        """A delta of a choice has come."""
        if delta.prompt_tokens is not None:
            self.reported_prompts[index] = delta.prompt_tokens
        if not (delta.count or delta.text):
            return
        now_ns = monotonic_ns()
        self.completion_tokens += delta.count
        before_ns = self.last_ns.get(index)
        self.last_ns[index] = now_ns
        if before_ns is None:
            self.counts.first_token.setdefault(self.model, Histogram(FIRST_TOKEN_S)).observe(
                (now_ns - self.started_ns) / 1e9
            )
        else:
            tokens = max(1, delta.count)
            self.counts.between_tokens.setdefault(self.model, Histogram(BETWEEN_TOKENS_S)).observe(
                (now_ns - before_ns) / 1e9 / tokens, tokens
            )


class TextCounts:
    """The counts of one gateway."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str, str], int] = {}
        """By endpoint, model and outcome: finished, failed, cancelled."""
        self.tokens: dict[tuple[str, str, str], int] = {}
        """By model, tenant and kind: prompt, completion."""
        self._tenants: set[str] = set()
        self.first_token: dict[str, Histogram] = {}
        self.between_tokens: dict[str, Histogram] = {}

    @contextmanager
    def call(self, endpoint: str, model: str, tenant: str, prompt_tokens: int) -> Iterator[CountedCall]:
        """Count one call, however it ends: what was generated until then counts."""
        counted = CountedCall(self, model, tenant, prompt_tokens, monotonic_ns())
        outcome = "cancelled"
        try:
            yield counted
            outcome = "finished"
        except Exception:
            outcome = "failed"
            raise
        finally:
            prompts = prompt_tokens or max(counted.reported_prompts.values(), default=0)
            self.count(endpoint, model, tenant, outcome, prompts, counted.completion_tokens)

    def count(self, endpoint: str, model: str, tenant: str, outcome: str, prompt: int, completion: int) -> None:
        """Count a call that has ended."""
        self.calls[endpoint, model, outcome] = self.calls.get((endpoint, model, outcome), 0) + 1
        if tenant not in self._tenants:
            if len(self._tenants) < MAX_TENANTS:
                self._tenants.add(tenant)
            else:
                tenant = OTHERS
        for kind, tokens in (("prompt", prompt), ("completion", completion)):
            self.tokens[model, tenant, kind] = self.tokens.get((model, tenant, kind), 0) + tokens

    def collect(self) -> Iterable[Metric]:
        """The families, made at a scrape."""
        calls = CounterMetricFamily(
            "charonia_openai_requests", "Calls of the OpenAI API", labels=["endpoint", "model", "outcome"]
        )
        for labels, value in self.calls.items():
            calls.add_metric(labels, value)
        yield calls
        tokens = CounterMetricFamily(
            "charonia_openai_tokens",
            "Tokens of prompts and completions, of calls that ended early as well",
            labels=["model", "tenant", "kind"],
        )
        for labels, value in self.tokens.items():
            tokens.add_metric(labels, value)
        yield tokens
        yield _family(
            "charonia_openai_time_to_first_token_seconds", "Time from a call to its first token", self.first_token
        )
        yield _family(
            "charonia_openai_inter_token_latency_seconds", "Time between tokens of a stream", self.between_tokens
        )


def _family(name: str, text: str, found: dict[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["model"])
    for model, histogram in found.items():
        family.add_metric([model], histogram.buckets, histogram.sum_s)
    return family
