"""What one engine does, as metric families: vLLM's names where it has them, and `charonia_llm_*`.

They are written to the board of the model's process, which the executor reads at a scrape. Several instances of a model
share their series: gauges are the sum of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from executors.backends.engine_families import EngineSeries
from executors.backends.python.api.metrics import Metric, MetricFamily
from executors.generation.engine import EngineLoad, TokenEvent
from executors.generation.token_engine import TokenEngine


class GenerationMetrics:
    """An `executors.generation.engine.EngineObserver` of our engine. `labels` are those of every series.

    Times are from a request's arrival in this process: what it waited in the log before is not in them. Raises
    `TritonModelException` when the board of the process has no capacity for more series.
    """

    def __init__(self, engine: TokenEngine, labels: Mapping[str, str]) -> None:
        self._engine = engine
        self._series = series = EngineSeries(labels, engine.context)
        self._first = series.of_vllm("time_to_first_token_seconds")
        self._between = (series.of_vllm("inter_token_latency_seconds"), series.of_vllm("time_per_output_token_seconds"))
        self._whole = series.of_vllm("e2e_request_latency_seconds")
        self._prompts = series.of_vllm("request_prompt_tokens")
        self._lengths = series.of_vllm("request_generation_tokens")
        self._texts = series.of_vllm("request_params_n")
        self._ends = {
            finish: series.of_vllm("request_success_total", finished_reason=finish) for finish in ("stop", "length")
        }
        counter, gauge = MetricFamily.COUNTER, MetricFamily.GAUGE
        self._counters: list[tuple[str, Metric]] = [
            ("prompt_tokens", series.of_vllm("prompt_tokens_total")),
            ("generated_tokens", series.of_vllm("generation_tokens_total")),
            ("preemptions", series.of_vllm("num_preemptions_total")),
            ("queried_tokens", series.of_vllm("prefix_cache_queries_total")),
            ("hit_tokens", series.of_vllm("prefix_cache_hits_total")),
            ("steps", series.own("charonia_llm_steps_total", "Steps of engines.", counter)),
            (
                "computed_tokens",
                series.own(
                    "charonia_llm_computed_tokens_total", "Tokens whose keys and values were computed.", counter
                ),
            ),
            (
                "adapter_loads",
                series.own("charonia_llm_adapter_loads_total", "Adapters that were loaded into a slot.", counter),
            ),
        ]
        self._counted = {name: 0 for name, _ in self._counters}
        self._usage = series.of_vllm("kv_cache_usage_perc")
        self._gauges: dict[str, _Share] = {
            "running": _Share(series.of_vllm("num_requests_running")),
            "waiting": _Share(series.of_vllm("num_requests_waiting")),
            "tokens": _Share(
                series.own("charonia_llm_waiting_prompt_tokens", "Tokens of prompts that are still to be read.", gauge)
            ),
            "blocks": _Share(series.own("charonia_llm_kv_blocks", "Blocks of keys and values.", gauge)),
            "used": _Share(
                series.own("charonia_llm_kv_blocks_used", "Blocks that running requests hold or wait for.", gauge)
            ),
            "adapters": _Share(series.own("charonia_llm_adapters_loaded", "Adapters that lie in a slot.", gauge)),
            "slots": _Share(series.own("charonia_llm_adapter_slots", "Slots for adapters.", gauge)),
        }
        self._requests: dict[bytes, _Times] = {}
        self._report(engine.load())

    def arrived(self, key: bytes) -> None:
        """See `EngineObserver`."""
        self._requests[key] = _Times(time.monotonic())

    def admitted(self, key: bytes, prompt_tokens: int) -> None:
        """See `EngineObserver`."""
        times = self._requests.get(key)
        if times is not None:
            times.prompt_tokens = prompt_tokens

    def left(self, key: bytes) -> None:
        """See `EngineObserver`."""
        self._requests.pop(key, None)

    def stepped(self, events: Sequence[TokenEvent], load: EngineLoad) -> None:
        """See `EngineObserver`."""
        now_s = time.monotonic()
        gaps: Counter[float] = Counter()
        for event in events:
            times = self._requests.get(event.key)
            if times is None:  # given up meanwhile
                continue
            if event.tokens:
                if times.last_s:
                    gaps[(now_s - times.last_s) / len(event.tokens)] += len(event.tokens)
                elif event.index == 0:  # else an earlier attempt gave the first
                    self._first.observe(now_s - times.arrived_s)
                times.last_s = now_s
            if event.finish:
                self._ends[event.finish].increment(1)
                self._whole.observe(now_s - times.arrived_s)
                self._prompts.observe(times.prompt_tokens)
                self._lengths.observe(event.index + len(event.tokens))
                self._texts.observe(1)  # each text of a call is a request of its own
        for gap_s, count in gaps.items():
            for metric in self._between:
                metric.observe_times(gap_s, count)
        self._report(load)

    def closed(self) -> None:
        """See `EngineObserver`."""
        for share in self._gauges.values():
            share.set(0)
        self._usage.set(0)

    def _report(self, load: EngineLoad) -> None:
        counters = self._engine.counters
        for name, metric in self._counters:
            count = getattr(counters, name)
            if count != self._counted[name]:
                metric.increment(count - self._counted[name])
                self._counted[name] = count
        used = load.blocks - load.free_blocks
        adapters = self._engine.scheduler.adapters
        for name, value in (
            ("running", load.running),
            ("waiting", load.waiting),
            ("tokens", load.waiting_tokens),
            ("blocks", load.blocks),
            ("used", used),
            ("adapters", adapters.occupied),
            ("slots", adapters.count),
        ):
            self._gauges[name].set(value)
        self._usage.set(used / load.blocks)


@dataclass(slots=True)
class _Times:
    """Of one request: when it came, when its last token did, 0 before the first, and the length of its prompt."""

    arrived_s: float
    last_s: float = 0.0
    prompt_tokens: int = 0


class _Share:
    """The part of one engine in a gauge that is the sum of several."""

    def __init__(self, gauge: Metric) -> None:
        self._gauge = gauge
        self._value = 0

    def set(self, value: int) -> None:
        if value != self._value:
            self._gauge.increment(value - self._value)
            self._value = value
