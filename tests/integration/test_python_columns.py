"""Requests that come to a python model as columns: the same as single ones, in real model processes."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_calls import instance_of
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from python_instances import ECHO, Load, loading, source

from charonia.backend import (
    CancellableInstance,
    ColumnInput,
    ColumnInstance,
    ColumnOutput,
    InstanceDied,
    InstanceSpec,
    ModelRequest,
    ModelResponse,
    RequestColumns,
)
from charonia.datatypes import DataType
from charonia.errors import ErrorCode
from charonia.inference import InferenceRequest, Parameters
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor, join_bytes_elements
from executors.backends.python import PythonBackend
from executors.backends.python.protocol.shared_slots import INPUT_SLOTS, OUTPUT_SLOTS, SHARED_BYTES, SLOT_BYTES
from executors.backends.python.python_instance import PythonInstance
from protos.model_config_pb2 import ModelConfig

CONFIG = """
    input { name: "A" data_type: TYPE_FP32 dims: -1 }
    output { name: "A" data_type: TYPE_FP32 dims: -1 } output { name: "B" data_type: TYPE_FP32 dims: -1 }
"""
"""A python model may answer in other types than it says: its executor looks at that, not its instance."""

MANY_WAYS = """
    import asyncio, json, operator

    # not by its name: a model that names it takes no columns
    SENDER_OF = operator.methodcaller("get_response" + "_sender")

    def tensor(name, values):
        return pb_utils.Tensor(name, np.asarray(values))

    class TritonPythonModel:
        def execute(self, requests):
            what = json.loads(requests[0].parameters())["do"]
            if what == "raise":
                raise ValueError("no " + requests[-1].request_id())
            if what == "too few":
                return [pb_utils.InferenceResponse([])] * (len(requests) - 1)
            if what == "no list":
                return tuple(pb_utils.InferenceResponse([]) for _ in requests)
            if what == "no responses":
                return [None for _ in requests]
            if what == "asynchronous":
                return self.later(requests)
            return [self.answer(what, index, request) for index, request in enumerate(requests)]

        async def later(self, requests):
            await asyncio.sleep(0)
            return [self.answer("echo", index, request) for index, request in enumerate(requests)]

        def answer(self, what, index, request):
            inputs, odd = request.inputs(), index % 2 == 1
            arrays = [one.as_numpy() for one in inputs] if what != "pass on" else []
            outputs = [pb_utils.Tensor(one.name(), array) for one, array in zip(inputs, arrays)]
            if what == "pass on":
                outputs = inputs
            elif what == "some error" and odd:
                return pb_utils.InferenceResponse(error=pb_utils.TritonError("odd", pb_utils.TritonError.NOT_FOUND))
            elif what == "some parameters" and odd:
                return pb_utils.InferenceResponse(outputs, parameters={"i": index})
            elif what == "some missing" and odd:
                outputs = outputs[1:]
            elif what == "none":
                outputs = []
            elif what == "some other shape" and odd:
                outputs[0] = tensor(inputs[0].name(), np.stack([arrays[0], arrays[0]]))
            elif what == "some other type" and odd:
                outputs[0] = tensor(inputs[0].name(), np.zeros(arrays[0].shape, np.int8))
            elif what == "shape after" and odd:
                arrays[0].shape = (arrays[0].size,)
            elif what == "scalar":
                outputs = [tensor("A", np.float32(index)), tensor("B", np.bytes_(b"x"))]
            elif what == "layouts":
                grid = np.arange(12, dtype=np.float32).reshape(3, 4) + index
                outputs = [tensor("A", grid.T), tensor("B", grid.astype(">f4"))]
            elif what == "mixed order":
                outputs = [tensor("A", np.arange(3, dtype=">i4" if odd else "<i4") + index)]
            elif what == "matrix":
                outputs = [pb_utils.Tensor("A", np.matrix([[index, 2.0]]))]
            elif what == "masked":
                outputs = [pb_utils.Tensor("A", np.ma.masked_array([1.0, index], [False, True]))]
            elif what == "bytes":
                outputs = [tensor("B", np.array([b"%03d" % index, b"ab"], np.object_))]
            elif what == "other bytes":
                outputs = [tensor("B", np.array([b"x" * index, "text"], np.object_))]
            elif what == "bad text":
                outputs = [tensor("B", np.array(["\\ud800"], np.object_))]
            elif what == "others" and odd:
                request.outputs.append("B")
                outputs = [tensor("A", [index]), tensor("B", [index])]
            elif what == "write":
                for array in arrays:
                    if array.dtype != np.object_ and array.size:
                        array[...] = index % 2
            elif what == "sender":
                SENDER_OF(request).send(pb_utils.InferenceResponse(outputs))
                return None
            elif what == "unused sender":
                SENDER_OF(request)
            elif what == "again" and odd:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                return None
            elif what == "facts":
                facts = [request.request_id(), request.correlation_id(), sorted(request.requested_output_names()),
                         request.flags(), request.timeout(), request.parameters(), request.is_cancelled(),
                         request.model_name(), request.model_version(), request.trace().get_context(),
                         request.preferred_memory().preferred_memory_type, request.is_rescheduled(),
                         type(request) is pb_utils.InferenceRequest,
                         [[one.name(), one.shape(), one.triton_dtype(), one.is_cpu(), str(array.dtype),
                           list(array.shape), array.flags.writeable, array.flags.c_contiguous, array.flags.aligned]
                          for one, array in zip(inputs, arrays)]]
                request.set_flags(3)
                request.inputs().clear()
                outputs = [tensor("A", np.array([json.dumps(facts)], np.object_))]
            return pb_utils.InferenceResponse(outputs)
"""
WAYS = [
    "echo",
    "pass on",
    "asynchronous",
    "some error",
    "some parameters",
    "some missing",
    "none",
    "some other shape",
    "some other type",
    "shape after",
    "scalar",
    "layouts",
    "mixed order",
    "matrix",
    "masked",
    "bytes",
    "other bytes",
    "bad text",
    "others",
    "write",
    "sender",
    "unused sender",
    "again",
    "facts",
    "raise",
    "too few",
    "no list",
    "no responses",
]


@dataclass
class Batch:
    """Requests of one form, in both forms."""

    count: int
    inputs: list[tuple[str, DataType, tuple[int, ...], list[bytes]]]
    outputs: tuple[str, ...]
    parameters: Parameters
    ids: list[str] | None
    timeout_us: int

    def columns(self, *, sizes: bool = False, form: Hashable = None) -> RequestColumns:
        inputs = []
        for name, datatype, shape, parts in self.inputs:
            lengths = [len(part) for part in parts]
            told = lengths if sizes or len(set(lengths)) > 1 else None
            inputs.append(ColumnInput(name, datatype, shape, b"".join(parts), told))
        return RequestColumns(self.count, inputs, self.outputs, self.parameters, self.ids, self.timeout_us, form=form)

    def requests(self) -> list[ModelRequest]:
        return [
            ModelRequest(
                "" if self.ids is None else self.ids[index],
                0,
                [Tensor(name, datatype, shape, parts[index]) for name, datatype, shape, parts in self.inputs],
                self.outputs,
                self.parameters,
                self.timeout_us,
            )
            for index in range(self.count)
        ]


def told(responses: Sequence[ModelResponse]) -> list[Any]:
    return [
        (
            one.error and (one.error.code, one.error.message),
            one.parameters,
            one.again,
            [(output.name, output.datatype, output.shape, bytes(output.data)) for output in one.outputs],
        )
        for one in responses
    ]


def cut(outputs: Sequence[ColumnOutput], count: int) -> list[ModelResponse]:
    """The single responses that columns stand for."""
    responses = []
    for index in range(count):
        tensors = []
        for output in outputs:
            size = len(output.data) // count
            assert size * count == len(output.data)
            part = output.data[index * size : (index + 1) * size]
            tensors.append(Tensor(output.name, output.datatype, output.shape, part))
        responses.append(ModelResponse(tensors))
    return responses


def responses_to(found: Sequence[ColumnOutput] | Sequence[ModelResponse], count: int) -> list[ModelResponse]:
    """What was found, as single responses."""
    assert found
    outputs = [one for one in found if isinstance(one, ColumnOutput)]
    return cut(outputs, count) if outputs else [one for one in found if isinstance(one, ModelResponse)]


def is_columns(found: Sequence[Any]) -> bool:
    return all(isinstance(one, ColumnOutput) for one in found)


MOST_ELEMENTS = 400_000
"""Of one input of a batch: more takes seconds and hundreds of megabytes, and shows nothing else."""


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    count = draw(st.sampled_from([1, 2, 3, 8, 64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    inputs = []
    for name in ["A", "B", "C"][: draw(st.integers(1, 3))]:
        datatype = draw(st.sampled_from(list(DataType)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        if draw(st.booleans()) and datatype is not DataType.BYTES:
            shape = (*shape, draw(st.sampled_from([16, 1000, 5000])))
        while math.prod(shape) * count > MOST_ELEMENTS:
            shape = shape[1:]
        elements = math.prod(shape)
        parts = []
        for _ in range(count):
            if datatype is DataType.BYTES:
                longest = draw(st.sampled_from([0, 3]))
                parts.append(join_bytes_elements(rng.bytes(rng.integers(0, longest + 1)) for _ in range(elements)))
            elif datatype is DataType.BOOL:
                parts.append(rng.integers(0, 2, elements).astype(np.bool_).tobytes())
            else:
                parts.append(rng.bytes(elements * datatype.size_bytes))
        inputs.append((name, datatype, shape, parts))
    return Batch(
        count,
        inputs,
        draw(st.sampled_from([(), (), ("A",), ("B", "A"), ("nothing",)])),
        {"do": draw(st.sampled_from(WAYS)), "k": draw(st.integers(-5, 5))},
        draw(st.sampled_from([None, [f"id {index}" for index in range(count)], [""] * count])),
        draw(st.sampled_from([0, 7])),
    )


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, PythonInstance]]:
    """One process for all examples, and what it is used in."""
    with asyncio.Runner() as runner:
        lent = loading(tmp_path_factory.mktemp("columns"))
        load = runner.run(lent.__aenter__())
        yield runner, runner.run(_loaded(load))
        runner.run(lent.__aexit__(None, None, None))


async def _loaded(load: Load) -> PythonInstance:
    return await load(MANY_WAYS, CONFIG)


@settings(max_examples=examples(400))
@given(batch=batches(), sizes=st.booleans())
def test_columns_are_answered_as_the_same_requests(
    standing: tuple[asyncio.Runner, PythonInstance], batch: Batch, sizes: bool
) -> None:
    runner, instance = standing

    async def each_way() -> tuple[Any, list[Any]]:
        async with asyncio.timeout(60):
            single = await instance.execute_requests(batch.requests())
            found = [told(responses_to(await instance.execute_columns(batch.columns(sizes=sizes)), batch.count))]
            form = object()
            for _ in range(2):  # the second finds what both ends remember of the first
                call = instance.begin_columns(batch.columns(sizes=sizes, form=form))
                call.look()
                answers = call.columns()
                found.append(told(responses_to(await call.answers() if answers is None else answers, batch.count)))
            return told(single), found

    single, found = runner.run(each_way())
    assert found == [single] * 3


def numbers(count: int, elements: int, first: float = 0) -> Batch:
    """FP32 of [1, elements], each with its place among all."""
    rows = [np.full(elements, first + index, np.float32).tobytes() for index in range(count)]
    return Batch(count, [("IN", DataType.FP32, (1, elements), rows)], (), {}, None, 0)


def values(outputs: Sequence[Any]) -> list[float]:
    """The first element of each request's output."""
    (output,) = outputs
    assert isinstance(output, ColumnOutput)
    return np.frombuffer(output.data, np.float32).reshape(-1, output.shape[-1])[:, 0].tolist()


@pytest.mark.parametrize(
    ("way", "as_columns"),
    [
        ("echo", True),
        ("pass on", True),
        ("asynchronous", True),
        ("bytes", True),
        ("scalar", True),
        ("layouts", True),
        ("mixed order", True),
        ("matrix", True),
        ("write", True),
        ("none", False),
        ("other bytes", False),
        ("some error", False),
        ("some parameters", False),
        ("unused sender", False),
    ],
)
async def test_answers_of_one_form_come_as_columns(load: Load, way: str, as_columns: bool) -> None:
    instance = await load(MANY_WAYS, CONFIG)
    assert isinstance(instance, ColumnInstance)
    assert isinstance(instance, CancellableInstance)
    assert instance.takes_columns
    batch = Batch(4, [("A", DataType.INT8, (2,), [b"12", b"34", b"56", b"78"])], (), {"do": way}, None, 0)
    assert is_columns(await instance.execute_columns(batch.columns())) is as_columns


@pytest.mark.parametrize("decoupled", [False, True])
async def test_models_with_senders_take_no_columns(load: Load, decoupled: bool) -> None:
    code = """
        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    request.get_response_sender()
    """
    policy = f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}"
    instance = await load(code, CONFIG + policy)
    assert not instance.takes_columns


LARGE = SHARED_BYTES // 4
"""So many FP32 lie in shared memory."""


async def test_large_columns_go_through_memory_that_is_used_again(load: Load) -> None:
    instance = await load(ECHO)
    slots = instance._child.slots
    assert slots is not None
    for turn in range(3 * OUTPUT_SLOTS):
        batch = numbers(4, LARGE, 10 * turn)
        assert values(await instance.execute_columns(batch.columns())) == [10 * turn + n for n in range(4)]
    assert [slot.generation for slot in slots._inputs] == [3 * OUTPUT_SLOTS, 0]
    assert [slot.generation for slot in slots._outputs[1:]] == [0, 0, 0]


async def test_outputs_that_are_kept_stay_as_they_are(load: Load) -> None:
    instance = await load(ECHO)
    kept = [await instance.execute_columns(numbers(2, LARGE, turn).columns()) for turn in range(OUTPUT_SLOTS + 3)]
    assert [values(one) for one in kept] == [[turn, turn + 1] for turn in range(OUTPUT_SLOTS + 3)]
    view = np.frombuffer(kept[0][0].data, np.float32)[5:9]  # type: ignore[union-attr]
    kept.clear()
    for turn in range(2 * OUTPUT_SLOTS):
        await instance.execute_columns(numbers(2, LARGE, 50 + turn).columns())
    assert view.tolist() == [0, 0, 0, 0]


KEEPS = """
    class TritonPythonModel:
        def initialize(self, args):
            self.kept = []

        def execute(self, requests):
            what = requests[0].request_id()
            if what == "forget":
                self.kept.clear()
            if what == "keep":
                self.kept.append([request.inputs()[0] for request in requests])
            if what == "array":
                self.kept.append([requests[0].inputs()[0].as_numpy()[0, 3:5]])
            if what == "cycle":
                requests.append(requests)
                requests[0].cycle = requests[0]
                requests.pop()
            first = [one[0] if isinstance(one[0], np.ndarray) else one[0].as_numpy()[0] for one in self.kept]
            found = np.array([array[0] for array in first] + [-1.0], np.float32)
            for request in requests:
                array = request.inputs()[0].as_numpy()
                if what == "write":
                    array += 1
            answers = [np.concatenate([found, request.inputs()[0].as_numpy()[0]]) for request in requests]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", answer)]) for answer in answers]
"""


@pytest.mark.parametrize("elements", [4 * LARGE, 8])
async def test_inputs_that_a_model_keeps_stay_as_they_are(load: Load, elements: int) -> None:
    instance = await load(KEEPS)

    async def run(what: str, first: float) -> list[float]:
        batch = numbers(2, elements, first)
        batch.ids = [what, ""]
        found = await instance.execute_columns(batch.columns())
        (output,) = found
        assert isinstance(output, ColumnOutput)
        array = np.frombuffer(output.data, np.float32).reshape(2, -1)
        known = array[0].tolist().index(-1)
        assert (array[0, :known] == array[1, :known]).all()
        assert array[:, -1].tolist() == ([first, first + 1] if what != "write" else [first + 1, first + 2])
        return array[0, :known].tolist()

    for turn in range(INPUT_SLOTS + 2):
        await run("keep" if turn % 2 else "array", 100 * (turn + 1))
    expected = [100.0 * (turn + 1) for turn in range(INPUT_SLOTS + 2)]
    assert await run("", 7) == expected
    assert await run("write", 7) == expected
    assert await run("", 7) == expected
    assert await run("forget", 8) == []
    slots = instance._child.slots
    assert slots is not None
    before = slots._inputs[0].generation
    assert await run("", 9) == []
    assert slots._inputs[0].generation == before + (1 if elements > LARGE else 0)


async def test_a_fork_of_the_model_keeps_the_inputs_it_has(load: Load) -> None:
    instance = await load("""
        import os

        class TritonPythonModel:
            def execute(self, requests):
                array = requests[0].inputs()[0].as_numpy()
                if requests[0].request_id() == "fork":
                    self.ready, write = os.pipe()
                    read, self.go = os.pipe()
                    if os.fork() == 0:
                        try:
                            os.close(self.go)
                            os.read(read, 1)
                            os.write(write, array[0, 5:6].tobytes())
                        finally:
                            os._exit(0)
                if requests[0].request_id() == "go":
                    os.write(self.go, b"x")
                    array = np.frombuffer(os.read(self.ready, 4), np.float32)[None]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for _ in requests]
    """)
    for index, what in enumerate(["fork", *"abcdef", "go"]):
        batch = numbers(1, 2 * LARGE, index)
        batch.ids = [what]
        found = await instance.execute_columns(batch.columns())
        assert values(found) == [0.0 if what == "go" else index]


async def test_more_than_a_slot_holds_goes_in_frames(load: Load) -> None:
    instance = await load(ECHO)
    elements = SLOT_BYTES // 4
    found = await instance.execute_columns(numbers(1, elements, 3).columns())
    assert values(found) == [3]


async def test_a_process_without_shared_memory_gets_frames(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    instance = await load(ECHO)
    assert instance._child.slots is None
    assert values(await instance.execute_columns(numbers(3, 4 * LARGE).columns())) == [0, 1, 2]


async def test_a_death_in_the_middle_leaves_what_was_answered(load: Load) -> None:
    instance = await load("""
        import os

        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    array = request.inputs()[0].as_numpy()
                    array += 1
                    if request.request_id() == "die":
                        os.kill(os.getpid(), 9)
                arrays = [request.inputs()[0].as_numpy() for request in requests]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in arrays]
    """)
    answered = await instance.execute_columns(numbers(2, LARGE, 1).columns())
    deadly = numbers(2, LARGE, 5)
    deadly.ids = ["", "die"]
    columns = deadly.columns()
    with pytest.raises(InstanceDied, match="SIGKILL"):
        await instance.execute_columns(columns)
    with pytest.raises(InstanceDied):
        await instance.execute_columns(columns)
    assert bytes(columns.inputs[0].data) == b"".join(deadly.inputs[0][3])
    view = answered[0]
    del answered
    await instance.close_instance()
    del instance
    gc.collect()
    assert values([view]) == [2, 3]


async def test_one_that_hangs_is_ended(load: Load) -> None:
    ceiling = CONFIG + ' parameters { key: "charonia.max_execution_s" value { string_value: "1" } }'
    code = """
        import time

        class TritonPythonModel:
            def execute(self, requests):
                time.sleep(1000)
    """
    instance = await load(code, ceiling)
    async with asyncio.timeout(20):
        with pytest.raises(InstanceDied, match="ran longer than 1 s"):
            await instance.execute_columns(numbers(2, 4).columns())


CANCELS = """
    import time

    class TritonPythonModel:
        def execute(self, requests):
            until = time.monotonic() + 20
            while not requests[1].is_cancelled() and time.monotonic() < until:
                time.sleep(0.001)
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([request.is_cancelled()]))])
                for request in requests
            ]
"""


async def test_a_model_sees_which_of_them_are_cancelled(load: Load) -> None:
    instance = await load(CANCELS)
    columns = numbers(3, 4).columns()
    call = asyncio.ensure_future(instance.execute_columns(columns))
    await asyncio.sleep(0)  # one turn of the loop: it has been sent
    instance.cancel_columns(columns, [1])
    (output,) = await call
    assert isinstance(output, ColumnOutput)
    assert bytes(output.data) == b"\0\1\0"
    instance.cancel_columns(columns, [2])  # too late


async def test_giving_up_a_call_keeps_its_slots_until_it_is_over(load: Load, tmp_path: Path) -> None:
    instance = await load("""
        import os

        class TritonPythonModel:
            def execute(self, requests):
                if requests[0].request_id():
                    with open(requests[0].request_id(), "rb") as gate:
                        gate.read()
                arrays = [request.inputs()[0].as_numpy() for request in requests]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in arrays]
    """)
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    try:
        batch = numbers(2, LARGE, 1)
        batch.ids = [gate, ""]
        call = asyncio.ensure_future(instance.execute_columns(batch.columns()))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        slots = instance._child.slots
        assert slots is not None
        others = [
            asyncio.ensure_future(instance.execute_columns(numbers(2, LARGE, 10 * n).columns())) for n in range(1, 4)
        ]
        await asyncio.sleep(0)
        assert [slot.generation for slot in slots._outputs] == [1, 1, 1, 1]
        assert [slot.generation for slot in slots._inputs] == [1, 1]
        await asyncio.to_thread(Path(gate).write_bytes, b"")
        assert [values(await one) for one in others] == [[10 * n, 10 * n + 1] for n in range(1, 4)]
        del others
        await instance.execute_columns(numbers(2, LARGE).columns())
        assert slots._outputs[0].generation == 2
    finally:
        os.unlink(gate)


CALLS = """
    class TritonPythonModel:
        def execute(self, requests):
            inputs = [pb_utils.Tensor("IN", requests[0].inputs()[0].as_numpy())]
            call = pb_utils.InferenceRequest(model_name="other", requested_output_names=["OUT"], inputs=inputs)
            answer = call.exec()
            if answer.has_error():
                return [pb_utils.InferenceResponse(error=answer.error()) for _ in requests]
            return [pb_utils.InferenceResponse(answer.output_tensors()) for _ in requests]
"""


class Call:
    """A call that is answered with its input, or, `held`, when it is cancelled."""

    def __init__(self, request: InferenceRequest, held: asyncio.Event | None) -> None:
        self._request = request
        self._held = held

    async def next(self) -> ModelResponse | None:
        if self._held is not None:
            self._held.set()
            await asyncio.get_running_loop().create_future()
        (tensor,) = self._request.inputs
        return ModelResponse([Tensor("OUT", tensor.datatype, tensor.shape, tensor.data)])

    def cancel(self) -> None:
        pass


class Calls:
    """Calls of the one other model."""

    def __init__(self) -> None:
        self.origins: list[object] = []
        self.held: asyncio.Event | None = None

    async def find(self, model: str, version: int) -> ModelInterface:
        return ModelInterface.of(ModelConfig(name=model, backend="python"))

    async def open(
        self, request: InferenceRequest, model: str, origins: Sequence[object], *, blocks: bool = False
    ) -> Call:
        assert blocks
        self.origins += origins
        return Call(request, self.held)

    async def load(self, model: str, config_json: str, files: dict[str, bytes]) -> None: ...

    async def unload(self, model: str, *, unload_dependents: bool) -> None: ...

    async def is_ready(self, model: str, version: str) -> bool:
        return True


@pytest.mark.parametrize("elements", [4, LARGE])
async def test_a_model_calls_others_for_the_callers_of_columns(tmp_path: Path, elements: int) -> None:
    model, calls = source(tmp_path, CALLS), Calls()
    instance = await instance_of(
        PythonBackend(), InstanceSpec("m_0_0", "CPU", -1, model, ModelInterface.of(model.config), calls=calls)
    )
    try:
        columns = numbers(3, elements, 4).columns()
        columns.origins = ["a", "b", "c"]
        assert values(await instance.execute_columns(columns)) == [4, 4, 4]
        assert calls.origins == ["a", "b", "c"]
        calls.held = asyncio.Event()
        call = asyncio.ensure_future(instance.execute_columns(columns))
        await calls.held.wait()
        instance.cancel_columns(columns, [0, 2])
        instance.cancel_columns(columns, [1])
        codes = {one.error and one.error.code for one in await call if isinstance(one, ModelResponse)}
        assert codes == {ErrorCode.CANCELLED}
    finally:
        await instance.close_instance()


async def test_metrics_and_health_work_between_columns(load: Load) -> None:
    instance = await load("""
        class TritonPythonModel:
            def initialize(self, args):
                self.family = pb_utils.MetricFamily("columns_total", "x", pb_utils.MetricFamily.COUNTER)
                self.counter = self.family.Metric(labels={})

            def is_ready(self):
                return self.counter.value() == 5

            def execute(self, requests):
                self.counter.increment(len(requests))
                arrays = [request.inputs()[0].as_numpy() for request in requests]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in arrays]
    """)
    assert not await instance.check_health()
    await instance.execute_columns(numbers(5, 4).columns())
    assert await instance.check_health()


async def test_a_stop_signal_does_not_end_a_batch(load: Load) -> None:
    instance = await load(ECHO)
    call = asyncio.ensure_future(instance.execute_columns(numbers(3, LARGE).columns()))
    await asyncio.sleep(0)
    os.kill(instance.pid, signal.SIGTERM)
    assert values(await call) == [0, 1, 2]
