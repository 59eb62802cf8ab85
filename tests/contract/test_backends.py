"""Every backend in the tree keeps the contract of `charonia.backend`; and the suite notices backends that do not."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from charonia.backend import (
    Array,
    Backend,
    GraphSignature,
    InstanceSpec,
    Interrupted,
    ModelRequest,
    ModelResponse,
    ModelSource,
    Outcome,
    ResponseStream,
    TensorSignature,
    Timings,
)
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from charonia.testing import flow_checks, lasting_checks
from charonia.testing.backend_contract import (
    CHECKS,
    Check,
    ReferenceModel,
    check_backend,
    check_cancellations,
    check_close_in_a_call,
    check_late_calls,
    check_lock,
    check_refusals,
    check_repeated_loads,
    check_reused_inputs,
    check_submissions,
    check_window,
    same_as,
)
from executors.backends.bound import BoundBackend, BoundFunction, Request, Style
from executors.backends.onnxruntime import OnnxRuntimeBackend
from executors.backends.python import PythonBackend
from executors.configuration.config import normalise

TENSORS = """
input { name: "A" data_type: TYPE_FP32 dims: 3 } input { name: "B" data_type: TYPE_STRING dims: 2 }
output { name: "X" data_type: TYPE_FP32 dims: 3 } output { name: "Y" data_type: TYPE_STRING dims: 2 }
"""
PAIRS = {"X": "A", "Y": "B"}
MODEL_PY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "AB")
            if a.shape[-1] != 3:
                raise ValueError("not three columns")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("X", a), pb_utils.Tensor("Y", b)]))
        return responses
"""

STREAMED_PY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "AB")
            if a.shape[-1] != 3:
                raise ValueError("not three columns")
            sender = request.get_response_sender()
            for _ in range(3):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("X", a), pb_utils.Tensor("Y", b)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def inputs(first: float, rows: int | None) -> dict[str, Array]:
    """A request with values of its own: of `rows`, or without a batch dimension."""
    count = rows or 1
    numbers = np.arange(first, first + 3 * count, dtype=np.float32).reshape(count, 3)
    words = np.array([[f"{first} {row}".encode(), "ä".encode()] for row in range(count)], dtype=np.object_)
    return {"A": numbers, "B": words} if rows else {"A": numbers[0], "B": words[0]}


def identity(
    directory: Path,
    backend: str,
    batching: bool,
    *,
    copies: int = 1,
    decoupled: bool = False,
    strict: bool = False,
    loads: int = 3,
) -> ReferenceModel:
    text = f'name: "m" backend: "{backend}" max_batch_size: {8 if batching else 0} {TENSORS}'
    if decoupled:
        text += "model_transaction_policy { decoupled: true }"
    config = normalise(parse(text))
    rows = (2, 1, 3) if batching else (None, None, None)
    wrong = {**inputs(0, rows[0]), "A": np.zeros((2, 5) if batching else 5, np.float32)}
    return ReferenceModel(
        source=ModelSource("m", 1, directory, config),
        interface=ModelInterface.of(config),
        expected=same_as(PAIRS),
        requests=[inputs(100 * number, count) for number, count in enumerate(rows)],
        failing=wrong,
        copies=copies,
        strict=strict,
        loads=loads,
    )


def onnx_model(directory: Path, batching: bool) -> ReferenceModel:
    lead = ["n"] if batching else []
    a, x = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [*lead, 3]) for name in "AX")
    b, y = (helper.make_tensor_value_info(name, TensorProto.STRING, [*lead, 2]) for name in "BY")
    nodes = [helper.make_node("Identity", [source], [target]) for target, source in PAIRS.items()]
    graph = helper.make_graph(nodes, "identity", [a, b], [x, y])
    (directory / "1").mkdir()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, directory / "1" / "model.onnx")
    return identity(directory, "onnxruntime", batching, strict=True, loads=200)


def python_model(directory: Path, batching: bool) -> ReferenceModel:
    (directory / "1").mkdir()
    (directory / "1" / "model.py").write_text(MODEL_PY)
    return identity(directory, "python", batching)


def decoupled_python_model(directory: Path, batching: bool) -> ReferenceModel:
    (directory / "1").mkdir()
    (directory / "1" / "model.py").write_text(STREAMED_PY)
    return identity(directory, "python", batching, copies=3, decoupled=True)


def bound_model(directory: Path, batching: bool) -> ReferenceModel:
    return identity(directory, "bound", batching, loads=200)


def decoupled_bound_model(directory: Path, batching: bool) -> ReferenceModel:
    return identity(directory, "bound", batching, copies=3, decoupled=True)


def same(A: Array, B: Array) -> dict[str, Array]:
    if A.shape[-1] != 3:
        raise ValueError("not three columns")
    return {"X": A, "Y": B}


def same_for_each(requests: Sequence[Request]) -> list[dict[str, Array]]:
    return [same(**request.inputs) for request in requests]


def three_times(A: Array, B: Array) -> Iterator[dict[str, Array]]:
    for _ in range(3):
        yield same(A, B)


def bound(function: Callable[..., object], style: Style) -> Callable[[], Backend]:
    def make() -> Backend:
        backend = BoundBackend()
        backend.functions["m"] = BoundFunction(function, style, ("X", "Y"))
        return backend

    return make


BACKENDS: dict[str, tuple[Callable[[], Backend], Callable[[Path, bool], ReferenceModel]]] = {
    "onnxruntime": (OnnxRuntimeBackend, onnx_model),
    "python": (PythonBackend, python_model),
    "decoupled-python": (PythonBackend, decoupled_python_model),
    "bound": (bound(same, "keywords"), bound_model),
    "bound-requests": (bound(same_for_each, "requests"), bound_model),
    "bound-generator": (bound(three_times, "keywords"), decoupled_bound_model),
}
CASES = [
    pytest.param(check, word, batching, id=f"{check.__name__}-{word}-{'batching' if batching else 'plain'}")
    for check in CHECKS
    for word in BACKENDS
    for batching in (True, False)
    # each load starts a process, and all python models are loaded alike
    if check is not check_repeated_loads or "python" not in word or (word, batching) == ("python", True)
]


@pytest.mark.parametrize(("check", "word", "batching"), CASES)
async def test_a_backend_of_the_tree_keeps_the_contract(
    check: Check, word: str, batching: bool, tmp_path: Path
) -> None:
    make, model = BACKENDS[word]
    await check(make(), model(tmp_path, batching))


class Echo:
    """The smallest `BatchInstance` that keeps the contract."""

    def __init__(self) -> None:
        self.broken = False

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        if inputs["A"].shape[-1] != 3:
            raise ValueError("not three columns")
        return {name: inputs[PAIRS[name]] for name in outputs}

    def close(self) -> None: ...


class EchoBackend:
    """A backend in the words a third party would write; the faults below are subclasses of its parts."""

    name = "echo"
    datatype = "FP32"

    def __init__(self, instance: Callable[[], Echo] = Echo) -> None:
        self._instance = instance

    async def load(self, source: ModelSource) -> Self:
        return self

    async def close(self) -> None: ...

    async def signature(self) -> GraphSignature:
        return GraphSignature(
            (TensorSignature("A", self.datatype, (-1, 3)), TensorSignature("B", "BYTES", (-1, 2))),
            (TensorSignature("X", "FP32", (-1, 3)), TensorSignature("Y", "BYTES", (-1, 2))),
        )

    async def create_instance(self, spec: InstanceSpec) -> Echo:
        return self._instance()


class WrongType(EchoBackend):
    datatype = "float32"


class Reversed(Echo):
    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        return {name: array[::-1] for name, array in super().execute(inputs, outputs).items()}


class Widening(Echo):
    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        results = super().execute(inputs, outputs)
        return {name: a.astype(np.float64) if a.dtype == np.float32 else a for name, a in results.items()}


class Flattening(Echo):
    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        return {name: array[..., None] for name, array in super().execute(inputs, outputs).items()}


class Scribbling(Echo):
    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        results = {name: array.copy() for name, array in super().execute(inputs, outputs).items()}
        inputs["A"][:] = 0
        return results


class InPlace(Echo):
    """Changes nothing in the end, but writes to arrays that may be read-only."""

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        inputs["A"] += 0.0
        return super().execute(inputs, outputs)


class Inventing(Echo):
    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        return {name: inputs[PAIRS.get(name, "A")] for name in outputs}


class Forgiving(Echo):
    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        return {name: inputs[PAIRS[name]] for name in outputs}


class Breaking(Echo):
    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        if self.broken:
            raise RuntimeError("broken by an earlier batch")
        self.broken = inputs["A"].shape[-1] != 3
        return super().execute(inputs, outputs)


class ClosesOnce(Echo):
    def close(self) -> None:
        if self.broken:
            raise RuntimeError("closed already")
        self.broken = True


class Remembering(Echo):
    """Takes the address of an input for its content."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Array] = {}

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        kept = {name: self.known.setdefault(id(array), array.copy()) for name, array in inputs.items()}
        return super().execute(kept, outputs)


class Holding(Echo):
    """Works in C for a while without releasing the lock."""

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        ctypes.PyDLL(None).usleep(500_000)
        return super().execute(inputs, outputs)


class Releasing(Echo):
    """Takes as long, in Python."""

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        end = time.perf_counter() + 0.2
        while time.perf_counter() < end:
            pass
        return super().execute(inputs, outputs)


OPENED: list[int] = []


class Leaking(Echo):
    def __init__(self) -> None:
        super().__init__()
        OPENED.append(os.open(os.devnull, os.O_RDONLY))


KEPT: list[bytes] = []


class Hoarding(Echo):
    """Something of each load stays."""

    def __init__(self) -> None:
        super().__init__()
        KEPT.append(os.urandom(50_000))


class OfSomeRows(Echo):
    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        if len(inputs["A"]) > 6:
            raise ValueError("too many rows")
        return super().execute(inputs, outputs)


class Padded(OfSomeRows):
    batch_sizes = (3, 6)


class Touchy(Echo):
    """Cannot be interrupted when it does nothing."""

    def interrupt(self) -> None:
        raise RuntimeError("nothing runs")


class Started(Echo):
    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def started(self) -> None:
        self.threads.append(threading.get_ident())

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        assert self.threads == [threading.get_ident()]
        return super().execute(inputs, outputs)


@pytest.mark.parametrize("instance", [Padded, Started])
async def test_what_an_instance_may_say_is_heeded_by_the_suite(instance: type[Echo], tmp_path: Path) -> None:
    await check_backend(EchoBackend(instance), identity(tmp_path, "echo", batching=True))


async def test_memory_that_is_taken_for_its_content_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="request 2 of several in the same memory: output 'X' holds other values"):
        await check_reused_inputs(EchoBackend(Remembering), identity(tmp_path, "echo", batching=True))


async def test_python_code_does_not_hold_the_lock(tmp_path: Path) -> None:
    await check_lock(EchoBackend(Releasing), identity(tmp_path, "echo", batching=True))


async def test_a_lock_that_is_held_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting_checks, "_TRIES", 1)
    for _ in range(10):  # a busy machine may hold up what comes before and after the call as well
        try:
            await check_lock(EchoBackend(Holding), identity(tmp_path, "echo", batching=True))
        except AssertionError as error:
            assert "held the interpreter's lock for" in str(error)
            return
    pytest.fail("it was never measured")


async def test_an_interruption_that_comes_late_must_do_no_harm(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing runs"):
        await check_late_calls(EchoBackend(Touchy), identity(tmp_path, "echo", batching=True))


class Unforgiving(Echo):
    """One that was interrupted in a call refuses all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.spoilt = False

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        self.running = True
        deadline = time.monotonic() + 20
        while not self.spoilt and time.monotonic() < deadline:
            time.sleep(0)
        self.running = False
        raise Interrupted("it was interrupted") if self.spoilt else TimeoutError

    def interrupt(self) -> None:
        self.spoilt |= self.running


async def test_an_instance_has_to_go_on_after_an_interruption(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="requests after interrupted ones"):
        await check_cancellations(EchoBackend(Unforgiving), identity(tmp_path, "echo", batching=True))


class Silent:
    """Requests that are cancelled get no response."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        await self.cancelled.wait()
        return []

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        self.cancelled.set()

    async def close_instance(self) -> None: ...


async def test_a_cancelled_request_still_gets_its_response(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"0 of \d requests that were cancelled had a response"):
        await check_cancellations(EchoBackend(Silent), identity(tmp_path, "echo", batching=True))


async def test_files_that_stay_open_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting_checks, "_ENDS_WITHIN_S", 0.1)
    with pytest.raises(AssertionError, match="3 loads and unloads left 3 more open files"):
        await check_repeated_loads(EchoBackend(Leaking), identity(tmp_path, "echo", batching=True))
    while OPENED:
        os.close(OPENED.pop())


async def test_memory_that_stays_is_measured(tmp_path: Path) -> None:
    model = identity(tmp_path, "echo", batching=True, loads=200)
    with pytest.raises(AssertionError, match=r"memory grew by \d+ bytes or more with each of 200 loads and unloads"):
        await check_repeated_loads(EchoBackend(Hoarding), model)
    KEPT.clear()
    await check_repeated_loads(EchoBackend(), model)


class Hasty(Echo):
    """Says that it took less than no time."""

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Outcome:  # type: ignore[override]
        return Outcome(super().execute(inputs, outputs), Timings(1, -1, 1))


async def test_times_that_cannot_be_counted_are_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the model gave -1 as 'infer_ns' of its timings"):
        await check_backend(EchoBackend(Hasty), identity(tmp_path, "echo", batching=True))


async def test_a_strict_model_that_refuses_nothing_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="input 'A' of another rank was answered"):
        await check_refusals(EchoBackend(Forgiving), identity(tmp_path, "echo", batching=True, strict=True))


async def test_the_suite_passes_a_backend_that_keeps_the_contract(tmp_path: Path) -> None:
    await check_backend(EchoBackend(), identity(tmp_path, "echo", batching=True))


SHARED = Echo()


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        (WrongType(), "the datatype 'float32', which is none of the interface's"),
        (EchoBackend(dict), "create_instance returned a dict"),  # type: ignore[arg-type]
        (EchoBackend(Reversed), "holds other values than expected"),
        (EchoBackend(Widening), "output 'X' is FP64, FP32 was expected"),
        (EchoBackend(Flattening), r"output 'X' has shape \[2,3,1\], \[2,3\] was expected"),
        (EchoBackend(Scribbling), "changed its input 'A'"),
        (EchoBackend(InPlace), "a request with read-only arrays: request 1 failed with ValueError"),
        (EchoBackend(Inventing), "which its model does not have"),
        (EchoBackend(Forgiving), "was answered as if it had succeeded"),
        (EchoBackend(Breaking), "requests after one that failed: request 1 failed with RuntimeError"),
        (EchoBackend(OfSomeRows), "a request of 8 rows: request 1 failed with ValueError: too many rows"),
        (EchoBackend(lambda: SHARED), "returned the same instance twice"),
        (EchoBackend(ClosesOnce), "the second close of an instance raised RuntimeError: closed already"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
async def test_the_suite_names_the_promise_a_backend_breaks(backend: Backend, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=sentence):
        await check_backend(backend, identity(tmp_path, "echo", batching=True))


class Streaming:
    """The smallest `StreamingInstance` that keeps the contract, and what may go wrong in one."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        if any(tensor.shape[-1] != 3 for r in requests for tensor in r.inputs if tensor.name == "A"):
            raise ValueError("not three columns")
        for index, request in enumerate(requests):
            by_name = {tensor.name: tensor for tensor in request.inputs}
            wanted = request.outputs or tuple(PAIRS)
            outputs = [
                Tensor(name, (given := by_name[PAIRS[name]]).datatype, given.shape, given.data)
                for name in wanted
                if name in PAIRS
            ]
            for _ in range(1 if self.fault == "one too few" else 2):
                responses.send(index, ModelResponse(outputs), final=False)
                await responses.drain()
            if self.fault != "no final":
                responses.send(index, None, final=True)
            if self.fault == "after the final":
                responses.send(index, ModelResponse(outputs), final=False)

    async def close_instance(self) -> None: ...


class StreamingBackend(EchoBackend):
    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    async def create_instance(self, spec: InstanceSpec) -> Streaming:  # type: ignore[override]
        return Streaming(self.fault)


class NeverEnding(Streaming):
    """A call of it only ends by its own doing."""

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        await asyncio.Event().wait()


async def test_a_call_that_outlives_its_instance_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting_checks, "_CLOSES_WITHIN_S", 0.1)
    backend = StreamingBackend()
    monkeypatch.setattr(backend, "create_instance", lambda _spec: completed(NeverEnding("")))
    with pytest.raises(AssertionError, match="execute_stream went on after close_instance"):
        await check_close_in_a_call(backend, identity(tmp_path, "echo", True, copies=2, decoupled=True))


class Heedless(Streaming):
    """Sends all it has at once."""

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        await super().execute_stream(requests, Eager(responses))


class Eager:
    """A `ResponseStream` whose `drain` waits for nothing."""

    full = blocked = False

    def __init__(self, responses: ResponseStream) -> None:
        self.send = responses.send

    async def drain(self) -> None: ...

    def free(self) -> None: ...


class Stuck(Streaming):
    """Takes a window for the end."""

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        for index, request in enumerate(requests):
            outputs = [Tensor(name, t.datatype, t.shape, t.data) for name, t in zip("XY", request.inputs, strict=True)]
            responses.send(index, ModelResponse(outputs), final=request.window == 1)


@pytest.mark.parametrize(
    ("instance", "sentence"),
    [
        (Heedless, "a request had 2 responses while 1 were wanted; await drain after each response"),
        (Stuck, "execute_stream returned after 1 responses"),
    ],
)
async def test_a_window_that_is_not_heeded_is_found(
    instance: type[Streaming], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = StreamingBackend()
    monkeypatch.setattr(backend, "create_instance", lambda _spec: completed(instance("")))
    with pytest.raises(AssertionError, match=sentence):
        await check_window(backend, identity(tmp_path, "echo", True, copies=2, decoupled=True))


async def completed(found: Streaming) -> Streaming:
    return found


async def test_a_streaming_instance_that_keeps_the_contract_is_found_good(tmp_path: Path) -> None:
    await check_backend(StreamingBackend(), identity(tmp_path, "echo", True, copies=2, decoupled=True))


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        (StreamingBackend("one too few"), "a request had 1 responses, its model gives 2"),
        (StreamingBackend("no final"), "execute_stream returned before the final response of request 1"),
        (StreamingBackend("after the final"), "the instance sent to request 1 after its final response"),
        (EchoBackend(), "must be a StreamingInstance"),
    ],
)
async def test_a_streaming_instance_that_does_not_is_told_why(
    backend: EchoBackend, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        await check_backend(backend, identity(tmp_path, "echo", True, copies=2, decoupled=True))


class Submitting(Echo):
    """The smallest `SubmittingInstance` that keeps the contract: its device is a thread."""

    depth = 3

    def __init__(self) -> None:
        super().__init__()
        self.device = ThreadPoolExecutor(1)

    def submit(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Future[Mapping[str, Array]]:
        return self.device.submit(self.execute, inputs, outputs)

    def close(self) -> None:
        self.device.shutdown()


class Backwards(Submitting):
    """Done in the opposite order of submission, as devices with several queues may be."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Future[Any], Any, Any]] = []
        self.changed = threading.Condition()
        self.device.submit(self.work)

    def submit(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Future[Mapping[str, Array]]:
        future: Future[Mapping[str, Array]] = Future()
        with self.changed:
            self.waiting.append((future, inputs, outputs))
            self.changed.notify()
        return future

    def work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting)
                future, inputs, outputs = self.waiting.pop()
            if outputs is None:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self.execute(inputs, outputs))
            except Exception as error:
                future.set_exception(error)

    def close(self) -> None:
        with self.changed:
            self.waiting.append((Future(), None, None))
            self.changed.notify()
        super().close()


class OneResult(Submitting):
    """All batches have their results in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[tuple[str, Any], Array] = {}

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        found = {}
        for name, array in super().execute(inputs, outputs).items():
            whole = self.memory.setdefault((name, None), np.zeros((8, *array.shape[1:]), array.dtype))
            whole[: len(array)] = array
            found[name] = whole[: len(array)]
        return found


class Swapped(Submitting):
    """Gives a result to whichever batch came first."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def submit(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Future[Mapping[str, Array]]:
        self.last = inputs
        return self.device.submit(self.run, outputs)

    def run(self, outputs: Sequence[str]) -> Mapping[str, Array]:
        time.sleep(0.01)
        return self.execute(self.last, outputs)


class Contagious(Submitting):
    """A batch that fails takes those behind it along."""

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        if self.broken:
            self.broken = False
            raise RuntimeError("broken by another batch")
        self.broken = inputs["A"].shape[-1] != 3
        return super().execute(inputs, outputs)


class Uncancellable(Submitting):
    """Sets results without having said that work has begun: a cancelled future has none, and ends the device."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False

    def submit(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Future[Mapping[str, Array]]:
        future: Future[Mapping[str, Array]] = Future()
        self.device.submit(self.run, future, inputs, outputs)
        return future

    def run(self, future: Future[Mapping[str, Array]], inputs: Any, outputs: Sequence[str]) -> None:
        time.sleep(0.001)
        if self.is_broken:
            return
        try:
            found = self.execute(inputs, outputs)
        except Exception as error:
            future.set_exception(error)
            return
        try:
            future.set_result(found)
        except InvalidStateError:
            self.is_broken = True


class Shallow(Submitting):
    depth = 1


class Promising(Submitting):
    """Returns the results themselves."""

    def submit(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Any:
        return self.execute(inputs, outputs)


class Waiting(Submitting):
    """Waits for its device before it returns."""

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        time.sleep(0.1)
        return super().execute(inputs, outputs)

    def submit(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Future[Mapping[str, Array]]:
        future = super().submit(inputs, outputs)
        wait((future,))
        return future


class GivingUp(Submitting):
    """Cancels what it cannot run."""

    def submit(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Future[Mapping[str, Array]]:
        future = super().submit(inputs, outputs)
        if inputs["A"].shape[-1] != 3:
            wait((future,))
            future = Future()
            future.cancel()
        return future


@pytest.mark.parametrize("instance", [Submitting, Backwards])
async def test_batches_under_way_that_keep_the_contract_are_found_good(instance: type[Echo], tmp_path: Path) -> None:
    await check_backend(EchoBackend(instance), identity(tmp_path, "echo", batching=True))


@pytest.mark.parametrize(
    ("instance", "sentence"),
    [
        (OneResult, "round 1 of batches under way, output 'X'|round 1 of batches under way: output 'X'"),
        (Swapped, "round 1 of batches under way"),
        (Contagious, "a batch under way beside one that fails failed with RuntimeError: broken by another batch"),
        (Uncancellable, "a batch that was submitted is not done after 3 s"),
        (Shallow, "a SubmittingInstance has a depth of 1; it must be 2 or more"),
        (Promising, "submit returned a dict"),
        (Waiting, "it must return without waiting"),
        (GivingUp, "the future of a batch was cancelled by the instance"),
    ],
)
async def test_batches_under_way_that_do_not_are_told_why(
    instance: type[Echo], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if instance is Uncancellable:
        monkeypatch.setattr(flow_checks, "_ENDS_WITHIN_S", 3)
    if instance is Waiting:  # in the best of many rounds a busy machine may have held up the future alone
        monkeypatch.setattr(flow_checks, "_ROUNDS", 1)
    with pytest.raises(AssertionError, match=sentence):
        await check_submissions(EchoBackend(instance), identity(tmp_path, "echo", batching=True))
