"""Two loops over the same model: OpenVINO GenAI's continuous batching, and our engine. Each runs lists of prompts.

Both have keys and values in float32, as many threads, no cache of prefixes, and generate so many tokens greedily.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from charonia.generation.parameters import SamplingParameters
from charonia.generation.text_assets import assets_of_files
from charonia.generation.tokenizer import Tokenizer
from executors.backends.llm.conversion import IR
from executors.backends.llm.decoder import DecoderSettings, OpenVinoDecoder
from executors.generation.engine import GenerationRequest
from executors.generation.step_scheduler import SchedulerSettings
from executors.generation.token_engine import TokenEngine
from loadtest.measurement import median

BLOCKS, STEP_TOKENS = 512, 512
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Run:
    """What one list took: tokens a second, and of each request seconds to the first token and between tokens."""

    rate: float
    first_s: list[float]
    gaps_s: list[float]

    @property
    def first_ms(self) -> float:
        """The median time to the first token."""
        return median(self.first_s) * 1e3

    @property
    def between_ms(self) -> float:
        """The median time between tokens."""
        return median(self.gaps_s) * 1e3


class Ours:
    """Our engine; `exact` as in `charonia.exact`. `prefixes`: whether it keeps what prompts begin with."""

    def __init__(self, directory: Path, threads: int, *, exact: bool = True, prefixes: bool = False) -> None:
        names = ("tokenizer.json", "tokenizer_config.json", "config.json")
        assets = assets_of_files({name: (directory / name).read_bytes() for name in names})
        settings = DecoderSettings(threads=threads, context=assets.context, blocks=BLOCKS, exact=exact)
        self._decoder = OpenVinoDecoder(str(directory / IR), settings)
        self._prefixes = prefixes
        self._tokenizer = Tokenizer.from_bytes(assets.tokenizer_json, assets)
        self._engine = self._with(64)

    def _with(self, slots: int) -> TokenEngine:
        bounds = SchedulerSettings(max_num_seqs=slots, max_num_batched_tokens=STEP_TOKENS, prefix_cache=self._prefixes)
        return TokenEngine(self._decoder, self._tokenizer, bounds)

    def run_in_slots(self, prompts: Prompts, tokens: Sequence[int], slots: int) -> Run:
        """Continuous batching of so many requests at a time; the others wait."""
        engine, self._engine = self._engine, self._with(slots)
        try:
            return self.run(prompts, tokens)
        finally:
            self._engine = engine

    def run(self, prompts: Prompts, tokens: Sequence[int]) -> Run:
        for at, prompt in enumerate(prompts):
            parameters = SamplingParameters(seed=0, temperature=0.0, max_tokens=tokens[at], ignore_eos=True)
            self._engine.admit(GenerationRequest(at.to_bytes(4, "big"), prompt, parameters))
        clock = _Clock(len(prompts))
        left = len(prompts)
        while left:
            for event in self._engine.step():
                if event.error is not None:
                    raise event.error
                clock.tokens(int.from_bytes(event.key, "big"), len(event.tokens))
                left -= bool(event.finish)
        return clock.run()

    def run_statically(self, prompts: Prompts, tokens: Sequence[int], size: int) -> Run:
        """Batches of `size`, one after the other. Each is padded to its longest: a row that has its tokens is computed
        on until the last one has, as where a batch is one call of a model. Of the rate only the asked tokens count.
        """
        seconds = 0.0
        for at in range(0, len(prompts), size):
            longest = [max(tokens[at : at + size])] * len(prompts[at : at + size])
            seconds += sum(longest) / self.run(prompts[at : at + size], longest).rate
        return Run(sum(tokens) / seconds, [], [])


class Library:
    """OpenVINO GenAI's `ContinuousBatchingPipeline`."""

    def __init__(self, directory: Path, threads: int) -> None:
        import openvino_genai

        self._library = openvino_genai
        settings = openvino_genai.SchedulerConfig()
        settings.num_kv_blocks, settings.max_num_batched_tokens = BLOCKS, STEP_TOKENS
        settings.max_num_seqs, settings.enable_prefix_caching = 64, False
        properties = {
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": str(threads),
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(directory), settings, "CPU", {}, properties)

    def run(self, prompts: Prompts, tokens: Sequence[int]) -> Run:
        import openvino

        handles = []
        for at, prompt in enumerate(prompts):
            wanted = self._library.GenerationConfig()
            wanted.max_new_tokens, wanted.do_sample, wanted.ignore_eos = tokens[at], False, True
            ids = openvino.Tensor(np.array([prompt], np.int64))
            handles.append(self._pipeline.add_request(at, ids, wanted))
        clock = _Clock(len(prompts))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for at, handle in enumerate(handles):
                if handle.can_read():
                    clock.tokens(at, sum(len(one.generated_ids) for one in handle.read().values()))
        return clock.run()


class _Clock:
    """Notes when tokens come."""

    def __init__(self, requests: int) -> None:
        self._began = time.perf_counter()
        self._last: list[float] = [0.0] * requests
        self._first: list[float] = []
        self._gaps: list[float] = []
        self._count = 0

    def tokens(self, request: int, count: int) -> None:
        now = time.perf_counter()
        if not count:
            return
        if self._last[request]:
            self._gaps.append(now - self._last[request])
        else:
            self._first.append(now - self._began)
        self._last[request] = now
        self._count += count

    def run(self) -> Run:
        return Run(self._count / (time.perf_counter() - self._began), self._first, self._gaps)


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts that have nothing in common."""
    drawn: Any = np.random.default_rng(seed)
    return [drawn.integers(100, 40_000, length).tolist() for _ in range(count)]
