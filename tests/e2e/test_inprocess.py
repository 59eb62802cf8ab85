"""Triton's in-process API (R42): what a program sees that asks models in its own process, with real processes behind.

How such a server starts, stops and fails is in `test_inprocess_lives.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from e2e_asking import until
from e2e_models import gated, python, scaling, strings

import charonia.inprocess as tritonserver
from charonia.composition.children import descendants
from charonia.inprocess import (
    AlreadyExistsError,
    InternalError,
    InvalidArgumentError,
    Metric,
    MetricFamily,
    MetricKind,
    ModelBatchFlag,
    ModelTxnPropertyFlag,
    NotFoundError,
    RequestFlag,
    Server,
    Tensor,
    TritonError,
    UnavailableError,
    UnknownError,
    UnsupportedError,
)

ECHO = '''
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with its inputs and its parameters; an input CODE fails it with that code, or ends its process (-1)."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        outputs = [pb_utils.Tensor("PARAMETERS", np.array([request.parameters()], np.object_))]
        for tensor in request.inputs():
            if tensor.name() == "CODE":
                code = int(tensor.as_numpy()[0])
                if code == -1:
                    os._exit(3)
                return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"code {code}", code))
            outputs.append(pb_utils.Tensor("OUT" + tensor.name()[2:], tensor.as_numpy()))
        return pb_utils.InferenceResponse(outputs)
'''
TYPES = {"FP16": np.float16, "BOOL": np.bool_, "UINT64": np.uint64, "STRING": np.object_}
ECHO_IO = (
    "".join(
        f'input {{ name: "IN_{t}" data_type: TYPE_{t} dims: [-1] optional: true }}\n'
        f'output {{ name: "OUT_{t}" data_type: TYPE_{t} dims: [-1] }}\n'
        for t in TYPES
    )
    + 'input { name: "CODE" data_type: TYPE_INT32 dims: [1] optional: true }\n'
    + 'output { name: "PARAMETERS" data_type: TYPE_STRING dims: [1] }\n'
)
COUNTING = '''
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """X [n] -> n responses Y [1], 0 to n - 1; `gate`: a file to wait for before the last of them."""

    def execute(self, requests):
        for request in requests:
            count = int(request.inputs()[0].as_numpy()[0])
            gate = json.loads(request.parameters()).get("gate", "")
            sender = request.get_response_sender()
            for number in range(count):
                give_up_at = time.monotonic() + 60
                while number == count - 1 and gate and not os.path.exists(gate) and time.monotonic() < give_up_at:
                    if request.is_cancelled():
                        break
                    time.sleep(0.002)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
COUNTING_IO = """
input { name: "X" data_type: TYPE_INT32 dims: [1] } output { name: "Y" data_type: TYPE_INT32 dims: [1] }
model_transaction_policy { decoupled: true }
"""
SUMMING = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            key = request.correlation_id()
            value, start = (pb_utils.get_input_tensor_by_name(request, n).as_numpy().ravel()[0] for n in ("X", "START"))
            self.sums[key] = value + (0 if start else self.sums[key])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([[self.sums[key]]], np.int32))]))
        return responses
"""
SUMMING_IO = """
max_batch_size: 4
input { name: "X" data_type: TYPE_INT32 dims: [1] } output { name: "Y" data_type: TYPE_INT32 dims: [1] }
sequence_batching { control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } } }
"""


def row(value: float = 1.0) -> dict[str, Any]:
    return {"INPUT0": np.full((1, 4), value, np.float32)}


def numbers(count: int) -> dict[str, Any]:
    return {"X": np.array([count], np.int32)}


def value(responses: Any, name: str) -> Any:
    """The output of a request's only response."""
    (response,) = list(responses)
    assert response.final
    return np.from_dlpack(response.outputs[name]).tolist()


@pytest.fixture(scope="module")
def repository(few_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("inprocess") / "models"
    models.mkdir()
    for model in few_models.iterdir():
        (models / model.name).symlink_to(model.resolve())
    scaling(models, "double", 2.0)
    strings(models, "strings")
    python(models, "echo", ECHO, ECHO_IO)
    python(models, "counting", COUNTING, COUNTING_IO)
    python(models, "summing", SUMMING, SUMMING_IO)
    gated(models, "gated", "")
    policy = "default_queue_policy { default_timeout_microseconds: 600000000 allow_timeout_override: true }"
    gated(models, "impatient", f"max_batch_size: 1 dynamic_batching {{ {policy} }}")
    return models


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    """A server over real models, in this process."""
    with Server(model_repository=str(repository), server_id="inside", exit_timeout=20) as started:
        yield started


def test_arrays_of_a_real_model(server: Server, few_models: Path, examples: ModuleType, expected: ModuleType) -> None:
    inputs = examples.magika()
    (right,) = expected.onnxruntime_outputs(few_models, "magika", inputs).values()
    (response,) = server.model("magika").infer(inputs=inputs, request_id="mine")
    answer = np.from_dlpack(response.outputs["target_label"])
    assert (answer.dtype, answer.shape) == (np.float32, (1, 214))
    assert np.allclose(answer, right, atol=1e-5)
    assert (response.request_id, response.final, response.error) == ("mine", True, None)
    assert (response.model.name, response.model.version) == ("magika", 1)


def test_strings_of_a_real_model(server: Server, examples: ModuleType) -> None:
    (response,) = server.model("magika_features").infer(inputs=examples.magika_features())
    features = np.from_dlpack(response.outputs["bytes"])
    assert (features == examples.magika()["bytes"]).all()
    words = [["a", "bé", "", "x" * 300]]
    for given in (words, np.array(words), Tensor.from_string_array(words)):
        (response,) = server.model("strings").infer(inputs={"INPUT0": given})
        assert response.outputs["OUTPUT0"].to_string_array().tolist() == words
    (response,) = server.model("echo").infer(inputs={"IN_STRING": [b"\0", b"\xff\0"]})
    assert response.outputs["OUT_STRING"].to_bytes_array().tolist() == [b"\0", b"\xff\0"]


def test_types_and_parameters(server: Server) -> None:
    inputs = {f"IN_{name}": np.array([0, 1, 2]).astype(dtype) for name, dtype in TYPES.items() if name != "STRING"}
    parameters = {"int": 0, "float": 0.5, "bool": False, "string": "test"}
    (response,) = server.model("echo").infer(inputs=inputs, parameters=parameters)
    for name, given in inputs.items():
        assert (np.from_dlpack(response.outputs["OUT" + name[2:]]) == given).all()
    assert json.loads(response.outputs["PARAMETERS"].to_string_array()[0]) == parameters
    assert value_of_list(server) == [True, False]


def value_of_list(server: Server) -> Any:
    (response,) = server.model("echo").infer(inputs={"IN_BOOL": [True, False]})
    return np.from_dlpack(response.outputs["OUT_BOOL"]).tolist()


def test_large_tensors_come_back_whole_and_stay(server: Server) -> None:
    given = np.arange(2_000_000, dtype=np.uint64)
    kept = []
    for _ in range(3):
        (response,) = server.model("echo").infer(inputs={"IN_UINT64": given})
        kept.append(np.from_dlpack(response.outputs["OUT_UINT64"]))
    assert all((array == given).all() for array in kept)


def test_a_decoupled_model(server: Server) -> None:
    model = server.model("counting")
    responses = list(model.infer(inputs=numbers(3)))
    assert [response.final for response in responses] == [False, False, False, True]
    assert [np.from_dlpack(response.outputs["Y"]).tolist() for response in responses[:-1]] == [[0], [1], [2]]
    assert (responses[-1].outputs, responses[-1].error) == ({}, None)
    (only,) = list(model.infer(inputs=numbers(0)))
    assert only.final
    # more than wait for a reader, read late
    late = model.infer(inputs=numbers(500))
    assert [len(response.outputs) for response in late] == [1] * 500 + [0]
    with pytest.raises(StopIteration):
        next(late)


async def test_a_decoupled_model_in_the_programs_own_loop(server: Server) -> None:
    model = server.model("counting")

    async def ask(count: int) -> list[int]:
        found = [response async for response in model.async_infer(inputs=numbers(count))]
        assert found[-1].final
        return [int(np.from_dlpack(response.outputs["Y"])[0]) for response in found[:-1]]

    assert await asyncio.gather(*map(ask, range(20))) == [list(range(count)) for count in range(20)]


async def test_a_response_is_not_lost_to_a_reader_that_gave_up(server: Server, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    responses = server.model("counting").async_infer(inputs=numbers(2), parameters={"gate": str(gate)})
    assert np.from_dlpack((await anext(responses)).outputs["Y"]).tolist() == [0]
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(responses), 0.01)
    gate.touch()
    assert np.from_dlpack((await anext(responses)).outputs["Y"]).tolist() == [1]
    assert [response.final async for response in responses] == [True]


def test_responses_that_nobody_reads(server: Server, tmp_path: Path) -> None:
    """The request goes on, as it does in Triton."""
    model = server.model("counting")

    def succeeded() -> int:
        return int(model.statistics()["model_stats"][0]["inference_stats"]["success"]["count"])

    before, gate = succeeded(), tmp_path / "gate"
    for _response in model.infer(inputs=numbers(200), parameters={"gate": str(gate)}):
        break
    gate.touch()
    until("it has run to its end", lambda: succeeded() == before + 1)


def test_cancelling(server: Server, tmp_path: Path) -> None:
    gate, entered = tmp_path / "gate", tmp_path / "entered"
    for raises in (True, False):
        entered.unlink(missing_ok=True)
        responses = server.model("gated").infer(
            inputs={"VALUE": np.array([1], np.int32)},
            parameters={"gate": str(gate), "entered": str(entered)},
            raise_on_error=raises,
        )
        until("it runs", entered.exists)
        responses.cancel()
        if raises:
            with pytest.raises(UnknownError, match=r"^request was cancelled$") as caught:
                next(responses)
            response = caught.value.args[1]
        else:
            response = next(responses)
        assert (response.final, str(response.error), response.outputs) == (True, "request was cancelled", {})
        with pytest.raises(StopIteration):
            next(responses)
        responses.cancel()
        gate.touch()  # its instance is free again
        (response,) = server.model("gated").infer(inputs={"VALUE": np.array([1], np.int32)})
        gate.unlink()


async def test_cancelling_in_a_loop(server: Server, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    responses = server.model("counting").async_infer(inputs=numbers(2), parameters={"gate": str(gate)})
    await anext(responses)
    responses.cancel()
    with pytest.raises(UnknownError, match="request was cancelled"):
        await anext(responses)


def test_a_time_out_in_the_queue(server: Server, tmp_path: Path) -> None:
    gate, entered = tmp_path / "gate", tmp_path / "entered"
    model, inputs = server.model("impatient"), {"VALUE": np.array([[1]], np.int32)}
    first = model.infer(inputs=inputs, parameters={"gate": str(gate), "entered": str(entered)})
    until("the instance is taken", entered.exists)
    with pytest.raises(UnavailableError, match="Request timeout expired"):
        list(model.infer(inputs=inputs, timeout=1000))
    gate.touch()
    assert value(first, "ECHO") == [[1]]


def test_sequences(server: Server) -> None:
    model = server.model("summing")
    flags = [RequestFlag.SEQUENCE_START, 0, RequestFlag.SEQUENCE_END]
    answers = [
        value(model.infer(inputs={"X": np.array([[number]], np.int32)}, correlation_id=7, flags=flag), "Y")
        for number, flag in zip((5, 6, 7), flags, strict=True)
    ]
    assert answers == [[[5]], [[11]], [[18]]]


CODES = {0: UnknownError, 1: InternalError, 2: NotFoundError, 3: InvalidArgumentError, 4: UnavailableError}
CODES |= {5: UnsupportedError, 6: AlreadyExistsError}


@pytest.mark.parametrize("code", CODES)
def test_errors_of_models_by_class(server: Server, code: int) -> None:
    with pytest.raises(TritonError, match=f"code {code}") as caught:
        list(server.model("echo").infer(inputs={"CODE": np.array([code], np.int32)}, request_id="failing"))
    assert type(caught.value) is CODES[code]
    response = caught.value.args[1]
    assert (response.request_id, response.final, response.error) == ("failing", True, caught.value)


REFUSED: list[tuple[str, dict[str, Any], type[TritonError], str]] = [
    ("nothing", {}, NotFoundError, "Request for unknown model: 'nothing' is not found"),
    ("double", {"inputs": {"INPUT0": np.ones((1, 3), np.float32)}}, InvalidArgumentError, "unexpected shape for input"),
    ("double", {"inputs": {"INPUT0": np.ones((1, 4))}}, InvalidArgumentError, "but model 'double' expects 'FP32'"),
    ("double", {"inputs": {"OTHER": row()["INPUT0"]}}, InvalidArgumentError, "unexpected inference input 'OTHER'"),
    ("double", {"inputs": {"INPUT0": "text"}}, InvalidArgumentError, "Input type <class 'str'> not supported"),
    ("double", {"parameters": {"a": {}}}, InvalidArgumentError, "Unsupported Value. Can't convert <class 'dict'>"),
    ("double", {"parameters": {"a": None}}, InvalidArgumentError, "Can't convert <class 'NoneType'> to Request"),
    ("double", {"parameters": {"triton_a": 1}}, InvalidArgumentError, "are reserved for Triton usage"),
    ("double", {"request_id": "x" * 100_000}, InvalidArgumentError, "exceeds the maximum"),
    ("double", {"priority": -1}, InvalidArgumentError, "'priority' must be a whole number"),
    ("double", {"timeout": 1.5}, InvalidArgumentError, "'timeout' must be a whole number"),
    ("double", {"correlation_id": 2**64}, InvalidArgumentError, "'correlation_id' must be a whole number"),
    ("double", {"output_memory_type": "gpu"}, InvalidArgumentError, "Memory type gpu not supported: Conversion"),
    ("double", {"output_memory_type": "none"}, InvalidArgumentError, "Memory type none not supported: Unsupported"),
    ("double", {"response_queue": asyncio.Queue()}, InvalidArgumentError, "response_queue must be a queue.SimpleQueue"),
]


@pytest.mark.parametrize(("model", "fields", "error", "text"), REFUSED)
def test_what_cannot_be_sent_is_refused_at_once(
    server: Server, model: str, fields: dict[str, Any], error: type[TritonError], text: str
) -> None:
    asked = server.model(model)
    before = accepted(server)
    with pytest.raises(TritonError, match=text) as caught:
        asked.infer(**{"inputs": row(), **fields})
    assert type(caught.value) is error
    assert accepted(server) == before, "nothing happened"


def accepted(server: Server) -> list[tuple[Any, ...]]:
    """What the log has counted by the time of an answer: an executor's own counters may follow it by a moment."""
    rows = [server.model(name).statistics()["model_stats"][0] for name, _ in server.models()]
    counts = ("name", "inference_count", "execution_count")
    return [(*(row[count] for count in counts), row["inference_stats"]["success"]["count"]) for row in rows]


def test_malformed_strings_are_refused(server: Server) -> None:
    raw = np.frombuffer(b"\xff\xff\0\0ab", np.uint8)
    broken = Tensor(tritonserver.DataType.BYTES, [1, 1], tritonserver.MemoryBuffer.from_dlpack(raw.copy()))
    with pytest.raises(
        InvalidArgumentError, match="incomplete string data for inference input 'INPUT0' for model 'str"
    ):
        server.model("strings").infer(inputs={"INPUT0": broken})


def test_a_version_that_is_not_there(server: Server) -> None:
    with pytest.raises(NotFoundError, match="Request for unknown model: 'double' version 9 is not found"):
        server.model("double", 9).infer(inputs=row())
    assert value(server.model("double", 1).infer(inputs=row()), "OUTPUT0") == [[2.0] * 4]
    with pytest.raises(InvalidArgumentError):
        server.model("double", -3).infer(inputs=row())


def test_a_request_may_be_made_once_and_sent_often(server: Server) -> None:
    request = server.models()["double"].create_request(request_id="again")
    request.inputs.update(row(3))
    for _ in range(3):
        assert value(server.model("double").infer(request), "OUTPUT0") == [[6.0] * 4]
    assert tritonserver.InferenceRequest(server.model("double")).inputs == {}


def test_many_threads(server: Server) -> None:
    model = server.model("double")

    def ask(number: int) -> bool:
        streamed = list(server.model("counting").infer(inputs=numbers(number % 3))) if number % 10 == 0 else []
        assert len(streamed) == (number % 3 + 1 if number % 10 == 0 else 0)
        return bool(value(model.infer(inputs=row(number)), "OUTPUT0") == [[2.0 * number] * 4])

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(400)))


async def test_many_tasks(server: Server) -> None:
    model = server.model("double")

    async def ask(number: int) -> Any:
        (response,) = [response async for response in model.async_infer(inputs=row(number))]
        return np.from_dlpack(response.outputs["OUTPUT0"]).tolist()

    answers = await asyncio.gather(*map(ask, range(200)))
    assert answers == [[[2.0 * number] * 4] for number in range(200)]


def test_a_queue_of_responses(server: Server) -> None:
    responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
    iterators = [server.model("counting").infer(inputs=numbers(100), response_queue=responses) for _ in range(2)]
    seen = [responses.get(timeout=60) for _ in range(202)]
    assert [sum(response.final for response in seen), responses.empty()] == [2, True]
    for iterator in iterators:
        assert len(list(iterator)) == 101
    assert responses.empty()
    failing = server.model("echo").infer(inputs={"CODE": np.array([2], np.int32)}, response_queue=responses)
    assert isinstance(responses.get(timeout=60).error, NotFoundError)
    with pytest.raises(NotFoundError):
        next(failing)


async def test_an_asyncio_queue_of_responses(server: Server) -> None:
    responses: asyncio.Queue[Any] = asyncio.Queue()
    iterator = server.model("counting").async_infer(inputs=numbers(3), response_queue=responses)
    assert [(await responses.get()).final for _ in range(4)] == [False, False, False, True]
    assert len([response async for response in iterator]) == 4
    assert responses.empty()


def test_what_a_server_says_of_itself(server: Server) -> None:
    assert server.live()
    assert server.ready()
    metadata = server.metadata()
    assert metadata["name"] == "inside"
    assert "model_repository" in metadata["extensions"]
    models = server.models()
    assert str(models["double", 1]) == "{'name': 'double', 'version': 1, 'state': 'READY'}"
    assert set(models) == set(server.models(exclude_not_ready=True))
    assert models["double"].version == -1
    for missing in ("nothing", ("double", 2)):
        with pytest.raises(KeyError, match="Unknown Model"):
            models[missing]
    with pytest.raises(InvalidArgumentError, match="Server already started"):
        server.start()


def test_what_a_server_says_of_its_models(server: Server) -> None:
    model = server.model("double")
    assert model.ready()
    assert model.metadata()["inputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}]
    assert (model.config()["max_batch_size"], model.config()["backend"]) == (8, "onnxruntime")
    with pytest.raises(
        InvalidArgumentError, match="model configuration version 2 not supported, supported versions ar"
    ):
        model.config(2)
    assert model.batch_properties() is ModelBatchFlag.FIRST_DIM
    assert server.model("echo").batch_properties() is ModelBatchFlag.UNKNOWN
    assert model.transaction_properties() is ModelTxnPropertyFlag.ONE_TO_ONE
    assert server.model("counting").transaction_properties() is ModelTxnPropertyFlag.DECOUPLED
    before = model.statistics()["model_stats"][0]
    list(model.infer(inputs=row()))
    until("it is counted", lambda: model.statistics()["model_stats"][0]["inference_count"] > before["inference_count"])
    assert not server.model("nothing").ready()
    assert not server.model("double", 9).ready()
    for ask in (server.model("nothing").metadata, server.model("nothing").config):
        with pytest.raises(NotFoundError, match="Request for unknown model: 'nothing' is not found"):
            ask()
    with pytest.raises(InvalidArgumentError, match="requested model 'nothing' is not available"):
        server.model("nothing").statistics()


def test_metrics(server: Server) -> None:
    list(server.model("double").infer(inputs=row()))
    seen = Metric(MetricFamily(MetricKind.COUNTER, "my_requests", "Requests of this program"), {"kind": "test"})
    seen.increment(3)
    counts = ("nv_inference_count", "nv_inference_request_success")
    counted = [rf'^{name}\{{model="double",version="1"\}} [1-9]' for name in counts]
    wanted = [*counted, r'^my_requests\{kind="test"\} 3$', "nv_cpu_utilization"]
    until("all is counted", lambda: (page := server.metrics()) and all(re.search(one, page, re.M) for one in wanted))


def test_what_only_other_modes_can_do(server: Server) -> None:
    text = "explicit model load / unload is not allowed if polling is enabled"
    with pytest.raises(UnavailableError, match=text):
        server.load("double")
    with pytest.raises(UnavailableError, match=text):
        server.unload("double")
    with pytest.raises(UnavailableError, match="polling is disabled"):
        server.poll_model_repository()
    for change in (server.register_model_repository, server.unregister_model_repository):
        with pytest.raises(UnsupportedError, match="is not allowed if model control mode is not EXPLICIT"):
            change("/models")


def test_a_model_whose_process_ends_in_a_request(server: Server) -> None:
    with pytest.raises(InternalError):
        list(server.model("echo").infer(inputs={"CODE": np.array([-1], np.int32)}))
    until("the model is ready again", lambda: server.model("echo").ready())
    assert value_of_list(server) == [True, False]


def test_an_accepted_request_survives_its_executor(server: Server, tmp_path: Path) -> None:
    gate, entered = tmp_path / "gate", tmp_path / "entered"
    responses = server.model("gated").infer(
        inputs={"VALUE": np.array([9], np.int32)}, parameters={"gate": str(gate), "entered": str(entered)}
    )
    until("it runs", entered.exists)
    entered.unlink()
    instance = next(pid for pid, name in descendants(os.getpid()) if name.startswith("instance:gated"))
    parent = int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{instance}/status").read_text())[0])
    os.kill(parent, signal.SIGKILL)
    until("another one runs it", entered.exists, 120)
    gate.touch()
    assert value(responses, "ECHO") == [9]
    until("all models are back", server.ready, 120)
