"""What a question of `charonia simulate` means for a real server, and models to ask about. Pure but for the files.

A question is words NAME=VALUE, as `charonia simulate --what-if` takes them; those of `NAMES` can be made real here,
those of `TOLD` tell the simulation about this machine.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from loadtest.model import LoadTestError
from protos.model_config_pb2 import ModelConfig

NAMES = ("executors", "instances", "delay", "max-batch", "preferred", "rate")
TOLD = ("cores",)
_UNITS_US = {"us": 1, "ms": 1_000, "s": 1_000_000}

MODELS = {
    "device": ("time.sleep(seconds)", 0.02, 0.0025),
    "quick-device": ("time.sleep(seconds)", 0.006, 0.0008),
    "computing": ("busy(seconds)", 0.006, 0.0008),
}
"""Python models: `device` waits for 20 ms and 2.5 ms a row, as for a device, so long that requests, client and server
use little of two cores also at three times the rate; `quick-device` waits for 6 ms and 0.8 ms a row; `computing` uses
as much time of a core, so that its instances share the machine's cores."""
_MODEL = '''"""{name}: {fixed} s and {row} s a row."""

import time

import triton_python_backend_utils as pb_utils


def busy(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class TritonPythonModel:
    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        seconds = {fixed} + {row} * sum(len(value) for value in values)
        {work}
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", value)]) for value in values]
'''
_CONFIG = """backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
instance_group { count: 1 kind: KIND_CPU }
dynamic_batching { }
"""


@dataclass(frozen=True, slots=True)
class Question:
    """What a server is given: options beside the usual ones, and how many times as fast requests arrive."""

    text: str
    flags: tuple[str, ...] = ()
    rate: float = 1.0
    _fields: dict[str, str] = field(default_factory=dict)

    def change(self, config: Any) -> None:
        """Changes a model's configuration as the question has it."""
        if "instances" in self._fields:
            if not config.instance_group:
                config.instance_group.add()
            for group in config.instance_group:
                group.count = _counted(group.count or 1, self._fields["instances"])
        if "max-batch" in self._fields:
            config.max_batch_size = int(self._fields["max-batch"])
        if "delay" in self._fields:
            config.dynamic_batching.max_queue_delay_microseconds = _microseconds(self._fields["delay"])
        if "preferred" in self._fields:
            sizes = self._fields["preferred"]
            del config.dynamic_batching.preferred_batch_size[:]
            config.dynamic_batching.preferred_batch_size.extend(map(int, sizes.split(",") if sizes != "none" else ()))


AS_RECORDED = Question("")


def question(text: str) -> Question:
    """The question that the words are. Raises LoadTestError for what no server here can be given."""
    fields = dict[str, str]()
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in (*NAMES, *TOLD) or not value:
            raise LoadTestError(f"'{word}' cannot be measured: NAME=VALUE with NAME one of {', '.join(NAMES)}")
        fields[name] = value
    if fields and not fields.keys() - set(TOLD):
        raise LoadTestError(f"'{text}' changes nothing that could be measured: name one of {', '.join(NAMES)} as well")
    try:
        flags = (f"--executors={_counted(1, fields['executors'])}",) if "executors" in fields else ()
        asked = Question(text, flags, float(fields.get("rate", "x1").removeprefix("x")), fields)
        asked.change(ModelConfig())
    except (KeyError, ValueError):
        raise LoadTestError(f"'{text}' cannot be measured: a value is wrong") from None
    return asked


def write_model(repository: Path, model: str, asked: Question) -> str:
    """Puts the model, one of `MODELS` or a folder, into a new repository as the question has it; its name there."""
    if model in MODELS:
        name, place = model, repository / model
        (place / "1").mkdir(parents=True)
        work, fixed, row = MODELS[model]
        (place / "1" / "model.py").write_text(_MODEL.format(name=name, work=work, fixed=fixed, row=row))
        text = _CONFIG
    else:
        name = Path(model).resolve().name
        place = repository / name
        try:
            shutil.copytree(Path(model).resolve(), place)
            text = (place / "config.pbtxt").read_text()
        except OSError as error:
            raise LoadTestError(f"'{model}' is neither {' nor '.join(MODELS)} nor a model's folder: {error}") from None
    config: Any = text_format.Parse(text, ModelConfig())
    asked.change(config)
    (place / "config.pbtxt").write_text(text_format.MessageToString(config))
    return name


def arrivals_us(requests: int, rate: float, seed: int) -> list[int]:
    """Microseconds between the requests of a Poisson process of `rate` requests a second."""
    chance = random.Random(seed)
    return [round(chance.expovariate(rate) * 1e6) for _ in range(requests)]


def faster(intervals_us: Sequence[int], factor: float) -> list[int]:
    """The same pattern, so many times as fast. What is rounded away is not lost: the last arrival keeps its place."""
    whole, at, found = 0, 0, []
    for interval in intervals_us:
        whole += interval
        then = round(whole / factor)
        found.append(then - at)
        at = then
    return found


def _counted(before: int, value: str) -> int:
    return before + int(value) if value[:1] in "+-" else int(value)


def _microseconds(value: str) -> int:
    unit = value.lstrip("0123456789.")
    return round(float(value.removesuffix(unit)) * _UNITS_US[unit or "ms"])
