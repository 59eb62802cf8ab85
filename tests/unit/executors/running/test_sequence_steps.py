"""Requests of sequences on an instance that streams: null requests between, and before a START in a slot in use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from charonia.backend import InstanceDied, ModelRequest, ModelResponse, ResponseStream
from charonia.errors import InternalError
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from executors.batches.sequence_batch import BatchSteps
from executors.batches.sequence_tensors import SequenceTensors, Step
from executors.configuration.config import normalise
from executors.running.stream_workers import execute_steps
from protos.model_config_pb2 import ModelConfig

TEXT = """
name: "m" backend: "python" max_batch_size: 4 model_transaction_policy { decoupled: true }
sequence_batching { direct { }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } } }
"""


class Telling:
    """Answers each request with its inputs; keeps what it was given."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.responses_sent: list[list[dict[str, int]]] = []
        self._failure = failure

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        self.responses_sent.append([{t.name: int(t.array().ravel()[0]) for t in one.inputs} for one in requests])
        responses.free()
        for index, request in enumerate(requests):
            responses.send(index, ModelResponse(request.inputs), final=False)
            responses.send(index, None, final=True)
        if self._failure is not None and len(self.responses_sent) == 1:
            raise self._failure

    async def close_instance(self) -> None: ...


class Kept:
    full = False

    def __init__(self) -> None:
        self.all: list[tuple[int, int | None]] = []

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        self.all.append((index, None if response is None else int(response.outputs[0].array().ravel()[0])))

    async def drain(self) -> None: ...

    def free(self) -> None: ...


def batch(slots: list[int], *, rows: int, clears_slots: bool = False) -> tuple[BatchSteps, list[ModelRequest]]:
    interface = ModelInterface.of(normalise(text_format.Parse(TEXT, ModelConfig())))
    steps = [Step(7 + slot, True, False, slot, {}) for slot in slots]
    made = BatchSteps(SequenceTensors(interface, Path("/none")), rows, steps, {}, clears_slots)
    requests = []
    for index, slot in enumerate(slots):
        request = ModelRequest("", 0, [Tensor.of("x", np.array([[10 + slot]], np.int32))], ("x",), {})
        made.prepare(index, request)
        requests.append(request)
    return made, requests


async def test_answers_of_null_requests_go_nowhere() -> None:
    steps, requests = batch([1, 3], rows=4)
    instance, kept = Telling(), Kept()
    await execute_steps(instance, steps, [0, 1], requests, kept)
    assert [(one["x"], one["READY"]) for one in instance.responses_sent[0]] == [(0, 0), (11, 1), (0, 0), (13, 1)]
    assert kept.all == [(0, 11), (0, None), (1, 13), (1, None)]


@pytest.mark.parametrize("failure", [None, InternalError("it does not like that")])
async def test_a_slot_is_shown_empty_first(failure: Exception | None) -> None:
    steps, requests = batch([0, 1], rows=2, clears_slots=True)
    instance, kept = Telling(failure), Kept()
    await execute_steps(instance, steps, [0, 1], requests, kept)
    assert [[one["READY"] for one in responses_sent] for responses_sent in instance.responses_sent] == [[0, 0], [1, 1]]
    assert kept.all == [(0, 10), (0, None), (1, 11), (1, None)]


async def test_an_instance_that_dies_of_empty_slots_is_dead() -> None:
    class Dying(Telling):
        async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
            raise InstanceDied("it is gone")

    steps, requests = batch([0], rows=1, clears_slots=True)
    with pytest.raises(InstanceDied):
        await execute_steps(Dying(), steps, [0], requests, Kept())
