"""A backend that generates text over a decoder without a model; `install` makes a distribution of it, named `stubtext`.

Its steps take `step_ms`, whatever they compute, so that a text is under way for a while. Where `STUBTEXT_COUNTS` names
a directory, each process leaves what its engine did there, as `<pid>.json`. With `STUBTEXT_HOLD` = `<steps>:<path>` an
engine makes so many steps, and no more until the file is there. With `STUBTEXT_HURRY` = `<path>` steps take no time
once the file is there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from small_tokenizers import byte_level
from stub_decoder import StubDecoder

from charonia.backend import InstanceSpec, ModelSource
from charonia.generation.text_tensors import ENGINE_INPUTS, ENGINE_OUTPUTS, TextTensor
from executors.generation.generating_instance import GeneratingInstance, InstanceSettings
from executors.generation.step_scheduler import SchedulerSettings
from executors.generation.token_engine import TokenEngine

CONTEXT = 4000
STEP_TOKENS = 128


def install(directory: Path) -> str:
    """Make the distribution; returns what is to be put on PYTHONPATH."""
    information = directory / "stubtext-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: stubtext\nVersion: 1\n")
    (information / "entry_points.txt").write_text(f"[charonia.backends]\nstubtext = {__name__}:StubText\n")
    return os.pathsep.join([str(directory), str(Path(__file__).parent)])


def write_model(repository: Path, name: str, step_ms: int, more: str = "", step_tokens: int = STEP_TOKENS) -> None:
    """`step_tokens`: how many tokens a step computes at most."""
    (repository / name / "1").mkdir(parents=True)
    lines = ['backend: "stubtext" max_batch_size: 0', "model_transaction_policy { decoupled: true }", more]
    lines += [f"input {{ {_described(tensor)} optional: {str(tensor.optional).lower()} }}" for tensor in ENGINE_INPUTS]
    lines += [f"output {{ {_described(tensor)} }}" for tensor in ENGINE_OUTPUTS]
    lines += ["instance_group { count: 1 kind: KIND_CPU }"]
    settings = {"step_ms": str(step_ms), "step_tokens": str(step_tokens), "charonia.resumable": "true"}
    for key, value in settings.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    (repository / name / "config.pbtxt").write_text("\n".join(lines))


def _described(tensor: TextTensor) -> str:
    word = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    return f'name: "{tensor.name}" data_type: TYPE_{word} dims: {list(tensor.dims)}'


def make_text_engine(step_ms: int = 0, step_tokens: int = STEP_TOKENS) -> TokenEngine:
    tokenizer = byte_level()
    decoder = StubDecoder(vocabulary=tokenizer.vocabulary, context=CONTEXT, block_tokens=16, blocks=2000)
    if step_ms:
        hurry = os.environ.get("STUBTEXT_HURRY", "")
        decoder.before_step = lambda step: None if hurry and os.path.exists(hurry) else time.sleep(step_ms / 1000)
    if hold := os.environ.get("STUBTEXT_HOLD"):
        decoder.before_step = _held(decoder, *hold.split(":", 1))
    return TokenEngine(decoder, tokenizer, SchedulerSettings(16, step_tokens))


def _held(decoder: StubDecoder, steps: str, path: str) -> Callable[[object], None]:
    def wait(_step: object) -> None:
        while decoder.steps >= int(steps) and not os.path.exists(path):
            time.sleep(0.002)

    return wait


def count_into(engine: TokenEngine, path: Path) -> None:
    """Write the engine's counters, what it holds, and how many requests found a block computed, as it ends requests."""
    forget = engine._forget
    counts = {"requests": 0, "warm": 0}

    def forget_and_write(key: bytes) -> None:
        one = engine.scheduler.find(key)
        if one is not None:
            counts["requests"] += 1
            counts["warm"] += one.hit_tokens > 0
        forget(key)
        load = engine.load()
        held = {"running": load.running, "waiting": load.waiting, "blocks": load.blocks - load.free_blocks}
        path.with_suffix(".new").write_text(json.dumps({**dataclasses.asdict(engine.counters), **counts, **held}))
        path.with_suffix(".new").rename(path)

    engine._forget = forget_and_write  # type: ignore[method-assign]


class StubText:
    name = "stubtext"
    api = (1, 0)

    async def load(self, source: ModelSource) -> StubTextModel:
        step_tokens = source.integer("step_tokens") or STEP_TOKENS
        return StubTextModel(source.integer("step_ms") or 0, step_tokens, source.integer("max_open") or 64)


class StubTextModel:
    def __init__(self, step_ms: int, step_tokens: int, max_open: int) -> None:
        self._step_ms = step_ms
        self._step_tokens = step_tokens
        self._max_open = max_open

    async def signature(self) -> None:
        return None

    async def create_instance(self, spec: InstanceSpec) -> GeneratingInstance:
        engine = make_text_engine(self._step_ms, self._step_tokens)
        if directory := os.environ.get("STUBTEXT_COUNTS"):
            count_into(engine, Path(directory) / f"{os.getpid()}.json")
        return GeneratingInstance(engine, byte_level(), InstanceSettings(engine.context, self._max_open, spec.name))

    async def close(self) -> None: ...
