"""Models that call models (P13) and load them (P14): one server, called by the public clients."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from e2e_asking import client, infer, inputs, pending, statistics, until
from e2e_models import WIDTH, put, python, scaling
from e2e_server import serving
from tritonclient.utils import InferenceServerException

from batcher.deadlocks import PATIENCE_NS

WORKER = '''
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """X -> Y = 2 X. Parameters: `fail` a text to fail with, `entered`, `gate` as files, `cancelled` made when it is."""

    def execute(self, requests):
        return [self.one(request, json.loads(request.parameters())) for request in requests]

    def one(self, request, parameters):
        if "fail" in parameters:
            error = pb_utils.TritonError(parameters["fail"], pb_utils.TritonError.NOT_FOUND)
            return pb_utils.InferenceResponse(error=error)
        if "entered" in parameters:
            open(parameters["entered"], "w").close()
        while "gate" in parameters and not os.path.exists(parameters["gate"]):
            if request.is_cancelled():
                open(parameters["cancelled"], "w").close()
                break
            time.sleep(0.002)
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", 2 * x)], parameters={"id": request.request_id()})
'''

CALLER = '''
import json, threading
import numpy as np
import triton_python_backend_utils as pb_utils


class Failed(Exception):
    pass


class TritonPythonModel:
    """X -> Y, SAID. Parameter `do` says how; `model` is called, with the parameters in `with`."""

    def initialize(self, args):
        self.name = args["model_name"]
        self.early = ""
        request = self.request("worker", np.ones(1, np.float32))
        for early in (request.exec, lambda: pb_utils.load_model(self.name)):
            try:
                early()
            except pb_utils.TritonModelException as error:
                self.early += str(error)

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            parameters = json.loads(request.parameters())
            try:
                y, said = getattr(self, parameters["do"])(x, parameters)
            except pb_utils.TritonModelException as error:
                y, said = x, ["raised", str(error)]
            except Failed as failure:
                responses.append(pb_utils.InferenceResponse(error=failure.args[0]))
                continue
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("Y", y), pb_utils.Tensor("SAID", np.array([str(s) for s in said], dtype=object)),
            ]))
        return responses

    def request(self, model, x, parameters=None, **more):
        return pb_utils.InferenceRequest(**({
            "model_name": model, "requested_output_names": ["Y"], "inputs": [pb_utils.Tensor("X", x)],
            "parameters": parameters or {},
        } | more))

    def said(self, x, response):
        if response.has_error():
            return x, ["error", response.error().code(), response.error().message()]
        return pb_utils.get_output_tensor_by_name(response, "Y").as_numpy(), [response.parameters()]

    def call(self, x, parameters):
        more, words = json.loads(parameters.get("more", "{}")), json.loads(parameters.get("with", "{}"))
        return self.said(x, self.request(parameters["model"], x, words, **more).exec())

    def threads(self, x, parameters):
        found = [None] * 8

        def one(n):
            found[n] = self.said(x, self.request("worker", x + n).exec())[0]

        running = [threading.Thread(target=one, args=(n,)) for n in range(8)]
        [thread.start() for thread in running]
        [thread.join() for thread in running]
        return np.concatenate(found), []

    def relay(self, x, parameters):
        path = [name for name in parameters["path"].split(",") if name]
        if not path:
            return x + 1, []
        rest = {"do": "relay", "path": ",".join(path[1:])}
        response = self.request(path[0], x, rest).exec()
        if response.has_error():
            raise Failed(response.error())
        return self.said(x, response)[0] + 1, []

    def onnx(self, x, parameters):
        response = pb_utils.InferenceRequest(
            model_name="scale", model_version=1, requested_output_names=["OUTPUT0"], request_id="from a model",
            inputs=[pb_utils.Tensor("INPUT0", x.reshape(1, -1))],
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
        ).exec()
        return pb_utils.get_output_tensor_by_name(response, "OUTPUT0").as_numpy().ravel(), []

    def one_by_one(self, x, parameters):
        responses = list(self.request("worker", x).exec(decoupled=True))
        return self.said(x, responses[0])[0], [len(responses)]

    def all_of(self, x, parameters):
        """Every response of `several`, or the first few of them."""
        responses = self.request("several", x, {"count": parameters["count"]}).exec(decoupled=True)
        found = []
        for response in responses:
            if response.has_error():
                return x, ["error", response.error().code(), response.error().message(), len(found)]
            if response.output_tensors():
                found.append(pb_utils.get_output_tensor_by_name(response, "Y").as_numpy())
            if len(found) == int(parameters.get("enough", "1000")):
                responses.cancel()
        return np.concatenate(found), [len(found)]

    def steps(self, x, parameters):
        """A sequence of three, and one that goes on where none was begun."""
        flags = [pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, 0, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END]
        steps = [self.request("counting", x, correlation_id=parameters["id"], flags=flag).exec() for flag in flags]
        after = self.request("counting", x, correlation_id=parameters["id"]).exec()
        return np.concatenate([self.said(x, step)[0] for step in steps]), self.said(x, after)[1]

    def early_words(self, x, parameters):
        return x, [self.early]

    def ready(self, x, parameters):
        asked = [("worker",), ("worker", "1"), ("worker", "7"), ("nobody",)]
        return x, [pb_utils.is_model_ready(*words) for words in asked]

    def load(self, x, parameters):
        pb_utils.load_model("spare", config=parameters.get("config", ""))
        before = pb_utils.is_model_ready("spare")
        y, _ = self.said(x, self.request("spare", x).exec())
        pb_utils.unload_model("spare")
        return y, [before]

    def load_unknown(self, x, parameters):
        pb_utils.load_model("nobody")
'''

ASYNC = '''
import asyncio, json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """X -> Y: what `worker` makes of X, X + 1, ... X + 7, all asked for at once."""

    async def execute(self, requests):
        return await asyncio.gather(*(self.one(request) for request in requests))

    async def one(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()

        def asked(n):
            return pb_utils.InferenceRequest(
                model_name="worker", requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", x + n)],
                trace=request.trace(),
            )

        first = asked(0).async_exec()
        responses = [await first, *await asyncio.gather(*(asked(n).async_exec() for n in range(1, 7)))]
        responses += [response async for response in await asked(7).async_exec(decoupled=True)]
        y = np.concatenate([pb_utils.get_output_tensor_by_name(r, "Y").as_numpy() for r in responses])
        said = pb_utils.Tensor("SAID", np.array([], dtype=object))
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y), said])
'''

SEVERAL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            for n in range(int(json.loads(request.parameters())["count"])):
                if request.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + n)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

COUNTING = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().ravel()[0]
            self.count = 1 if start else self.count + 1
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + np.float32(self.count))]))
        return responses
"""
COUNTING_CONFIG = """
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
}
"""

ENSEMBLE = """
platform: "ensemble"
input { name: "X" data_type: TYPE_FP32 dims: -1 }
output { name: "Y" data_type: TYPE_FP32 dims: -1 }
ensemble_scheduling {
  step { model_name: "worker" input_map { key: "X" value: "X" } output_map { key: "Y" value: "twice" } }
  step { model_name: "caller" input_map { key: "X" value: "twice" } output_map { key: "Y" value: "Y" } }
}
"""

WORKER_IO = """
input { name: "X" data_type: TYPE_FP32 dims: -1 }
output { name: "Y" data_type: TYPE_FP32 dims: -1 }
"""
CALLER_IO = WORKER_IO + 'output { name: "SAID" data_type: TYPE_STRING dims: -1 }'
X = np.arange(WIDTH, dtype=np.float32)


def instances(count: int) -> str:
    return f"instance_group {{ count: {count} kind: KIND_CPU }}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    python(models, "worker", WORKER, WORKER_IO + instances(2))
    python(models, "spare", WORKER, WORKER_IO)
    scaling(models, "scale", 3.0)
    python(models, "several", SEVERAL, WORKER_IO + "model_transaction_policy { decoupled: true }")
    python(models, "counting", COUNTING, WORKER_IO + COUNTING_CONFIG)
    put(models / "composed" / "config.pbtxt", ENSEMBLE)
    (models / "composed" / "1").mkdir()
    for name in ("caller", "alone", "relay_a", "relay_b"):
        python(models, name, CALLER, CALLER_IO)
    python(models, "pair", CALLER, CALLER_IO + instances(2))
    python(models, "at_once", ASYNC, CALLER_IO)
    wanted = [f"--load-model={name}" for name in sorted(path.name for path in models.iterdir()) if name != "spare"]
    with serving(models, tmp_path_factory.mktemp("bls"), "--model-control-mode=explicit", *wanted) as running:
        yield running


def ask(server: Any, model: str, x: np.ndarray = X, /, **parameters: str) -> tuple[np.ndarray, list[str]]:
    answer = infer(server, model, X=x, options={"parameters": parameters})
    return answer.as_numpy("Y"), [word.decode() for word in answer.as_numpy("SAID").ravel()]


def test_a_model_calls_a_model_and_waits(server: Any) -> None:
    y, said = ask(server, "caller", do="call", model="worker", more=json.dumps({"request_id": "inner"}))
    assert (y.tolist(), said) == ((2 * X).tolist(), ['{"id":"inner"}'])
    before = statistics(server, "worker")["inference_count"]
    large = np.arange(100_000, dtype=np.float32)
    y, _ = ask(server, "caller", large, do="call", model="worker")
    assert np.array_equal(y, 2 * large)
    assert statistics(server, "worker")["inference_count"] == before + 1


def test_calls_at_once_from_a_coroutine_and_from_threads(server: Any) -> None:
    expected = np.concatenate([2 * (X + n) for n in range(8)])
    assert np.array_equal(infer(server, "at_once", X=X).as_numpy("Y"), expected)
    assert np.array_equal(ask(server, "caller", do="threads")[0], expected)


def test_the_model_that_is_called_may_be_of_another_backend(server: Any) -> None:
    assert np.array_equal(ask(server, "caller", do="onnx")[0], 3 * X)


def test_a_model_that_answers_once_may_be_read_like_one_that_answers_more_often(server: Any) -> None:
    y, said = ask(server, "caller", do="one_by_one")
    assert (y.tolist(), said) == ((2 * X).tolist(), ["1"])


def test_a_model_that_answers_more_often_is_read_as_it_answers(server: Any) -> None:
    y, said = ask(server, "caller", do="all_of", count="5")
    assert (y.reshape(5, -1).tolist(), said) == ([(X + n).tolist() for n in range(5)], ["5"])
    assert ask(server, "caller", do="call", model="several")[1] == [
        "error",
        "5",
        "Model several is using the decoupled. The current BLS request call doesn't support models using the decoupled "
        "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled "
        "models.",
    ]
    # what nobody wants any more is not made: the callee is told
    said = ask(server, "caller", do="all_of", count="1000000", enough="3")[1]
    assert said[:3] == ["error", "7", ""]


def test_a_sequence_of_calls(server: Any) -> None:
    y, after = ask(server, "caller", do="steps", id="from a model")
    assert y.reshape(3, -1).tolist() == [(X + n).tolist() for n in (1, 2, 3)]
    assert after[:2] == ["error", "3"]
    assert "must specify the START flag" in after[2]


def test_the_model_that_is_called_may_be_an_ensemble(server: Any) -> None:
    parameters = json.dumps({"do": "relay", "path": "relay_a"})
    y, _ = ask(server, "pair", do="call", model="composed", **{"with": parameters})
    assert y.tolist() == (2 * X + 2).tolist()


@pytest.mark.parametrize(
    ("parameters", "code", "text"),
    [
        ({"model": "worker", "with": '{"fail": "not today"}'}, 2, "not today"),
        ({"model": "nobody"}, 4, "Failed for execute the inference request. Model 'nobody' is not ready."),
        ({"model": "spare"}, 4, "Failed for execute the inference request. Model 'spare' is not ready."),
        (
            {"model": "worker", "more": '{"model_version": 7}'},
            4,
            "Failed for execute the inference request. Model 'worker' is not ready.",
        ),
        (
            {"model": "worker", "more": '{"requested_output_names": ["NOPE"]}'},
            3,
            "unexpected inference output 'NOPE' for model 'worker'",
        ),
        (
            {"model": "worker", "more": '{"inputs": []}'},
            3,
            "[request id: <id_unknown>] expected 1 inputs but got 0 inputs for model 'worker'. Got input(s) [], but "
            "missing required input(s) ['X']. Please provide all required input(s).",
        ),
    ],
)
def test_what_goes_wrong_is_in_the_response(server: Any, parameters: dict[str, str], code: int, text: str) -> None:
    assert ask(server, "caller", do="call", **parameters)[1] == ["error", str(code), text]


def test_nothing_is_called_outside_of_execute(server: Any) -> None:
    assert ask(server, "caller", do="early_words")[1] == [
        "BLS is only supported during the 'execute' function."
        "model 'caller' cannot load or unload itself while it is being loaded"
    ]


def test_a_chain_of_three(server: Any) -> None:
    y, _ = ask(server, "caller", do="relay", path="relay_a,relay_b,pair")
    assert y.tolist() == (X + 4).tolist()


def test_models_load_models(server: Any) -> None:
    assert ask(server, "caller", do="ready")[1] == ["True", "True", "False", "False"]
    y, said = ask(server, "caller", do="load")
    assert (y.tolist(), said) == ((2 * X).tolist(), ["True"])
    with client("http", server) as asking:
        until("it is unloaded", lambda: not asking.is_model_ready("spare"))
    assert ask(server, "caller", do="load_unknown")[1] == [
        "raised",
        "failed to load 'nobody', failed to poll from model repository",
    ]


# -- callers that hold what their callees need ---------------------------------------------------------------------


def test_a_model_with_two_instances_calls_itself(server: Any) -> None:
    assert ask(server, "pair", do="relay", path="pair")[0].tolist() == (X + 2).tolist()


def test_calls_that_wait_for_their_own_callers_are_ended(server: Any) -> None:
    """A model of one instance, one with all of them held, and two callers that need what the other one holds."""

    def told(model: str, path: str) -> str:
        try:
            return str(ask(server, model, do="relay", path=path)[0].tolist())
        except InferenceServerException as error:
            return f"{error.status()} {error.message()}"

    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        models, paths = ["alone", "pair", "relay_a", "relay_b"], ["alone", "pair,pair", "relay_b", "relay_a"]
        alone, pair, *crossed = pool.map(told, models, paths)
    assert time.monotonic() - started < 30
    why = "every instance of model '{0}' is held by a request that waits for calls like this one"
    assert alone.startswith("503 [request id: <id_unknown>] deadlock: alone -> alone: " + why.format("alone"))
    assert "deadlock: pair -> pair -> pair: " + why.format("pair") in pair
    # ending one lets the other one go on
    assert sorted("deadlock: relay_" in answer for answer in crossed) in ([False, True], [False, False])
    assert str((X + 2).tolist()) in crossed
    # of a caller that does nothing else it is known at once, not only when it has waited
    took_s = []
    for _ in range(3):
        started = time.monotonic()
        assert "deadlock: alone -> alone" in told("alone", "alone")
        took_s.append(time.monotonic() - started)
    assert min(took_s) < PATIENCE_NS / 1e9
    # and nothing is held any more
    for model in models:
        assert ask(server, model, do="relay", path="")[0].tolist() == (X + 1).tolist()


# -- ends ------------------------------------------------------------------------------------------------------------


class Held:
    """A request whose model waits for `worker`, which waits for a file."""

    def __init__(self, directory: Path) -> None:
        self.gate, self.entered = directory / "gate", directory / "entered"
        self.cancelled = directory / "cancelled"
        words = {"gate": str(self.gate), "entered": str(self.entered), "cancelled": str(self.cancelled)}
        self.parameters = {"do": "call", "model": "worker", "with": json.dumps(words)}


def test_who_gives_up_ends_the_calls_made_for_it(server: Any, tmp_path: Path) -> None:
    held = Held(tmp_path)
    ended = threading.Event()
    with grpcclient.InferenceServerClient(server.grpc) as asking:
        running = asking.async_infer(
            "caller", inputs("grpc", X=X), lambda result, error: ended.set(), parameters=held.parameters
        )
        until("the callee runs", held.entered.exists)
        running.cancel()
        assert ended.wait(60)
        until("the callee has been told", held.cancelled.exists)
    # the caller has come back from its call, too
    assert ask(server, "caller", do="call", model="worker")[0].tolist() == (2 * X).tolist()


def test_a_deadline_is_that_of_the_calls_as_well(server: Any, tmp_path: Path) -> None:
    held = Held(tmp_path)
    with client("grpc", server) as asking, pytest.raises(InferenceServerException):
        asking.infer("caller", inputs("grpc", X=X), client_timeout=1.0, parameters=held.parameters)
    until("the callee has been told", held.cancelled.exists)


def test_the_death_of_an_executor_leaves_nothing_behind(server: Any, tmp_path: Path) -> None:
    held = Held(tmp_path)
    (executor,) = server.pids("executor+batcher")
    with ThreadPoolExecutor(1) as pool:
        asked: Future[Any] = pool.submit(infer, server, "caller", X=X, options={"parameters": held.parameters})
        until("the callee runs", held.entered.exists)
        held.entered.unlink()
        os.kill(executor, signal.SIGKILL)
        # its successor runs the request again, and that calls again
        until("the callee runs again", held.entered.exists, 120)
        held.gate.touch()
        assert asked.result(60).as_numpy("Y").tolist() == (2 * X).tolist()
    with server.log_client() as log:

        def left() -> list[Any]:
            streams = [*log.scan_iter("r:executor-*"), *log.scan_iter("q:{worker}:*"), *log.scan_iter("q:{caller}:*")]
            entries = [stream for stream in streams if log.xlen(stream)]
            return entries + [model for model in ("worker", "caller") if log.hlen(f"u:{{{model}}}")]

        until(f"nothing is left: {left()}", lambda: not left())
    assert pending(server, "worker") == 0
