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
from calling_models import (
    ASYNC,
    CALLER,
    CALLER_IO,
    COUNTING,
    COUNTING_CONFIG,
    ENSEMBLE,
    SEVERAL,
    WORKER,
    WORKER_IO,
    instances,
)
from e2e_asking import client, infer, inputs, pending, settle, statistics, until
from e2e_models import WIDTH, put, python, scaling
from e2e_server import serving
from plugin_backends import install
from tritonclient.utils import InferenceServerException

from batcher.deadlock.deadlock_watch import PATIENCE_NS

X = np.arange(WIDTH, dtype=np.float32)
SCORED = """
backend: "shapes"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters [ { key: "shape" value { string_value: "requests" } }, { key: "score" value { string_value: "0.25" } } ]
"""


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
    put(models / "scored" / "config.pbtxt", SCORED)
    (models / "scored" / "1").mkdir()
    for name in ("caller", "alone", "relay_a", "relay_b"):
        python(models, name, CALLER, CALLER_IO)
    python(models, "pair", CALLER, CALLER_IO + instances(2))
    python(models, "at_once", ASYNC, CALLER_IO)
    python(models, "sequential", CALLER, CALLER_IO + instances(2) + COUNTING_CONFIG)
    wanted = [f"--load-model={name}" for name in sorted(path.name for path in models.iterdir()) if name != "spare"]
    path = os.pathsep.join([str(install(tmp_path_factory.mktemp("plugin"))), os.environ.get("PYTHONPATH", "")])
    state, mode = tmp_path_factory.mktemp("bls"), "--model-control-mode=explicit"
    with serving(models, state, mode, *wanted, environment={"PYTHONPATH": path}) as running:
        yield running


def ask(server: Any, model: str, x: np.ndarray = X, /, **parameters: str) -> tuple[np.ndarray, list[str]]:
    answer = infer(server, model, X=x, options={"parameters": parameters})
    return answer.as_numpy("Y"), [word.decode() for word in answer.as_numpy("SAID").ravel()]


def test_a_model_calls_a_model_and_waits(server: Any) -> None:
    y, said = ask(server, "caller", do="call", model="worker", more=json.dumps({"request_id": "inner"}))
    assert (y.tolist(), said) == ((2 * X).tolist(), ['{"id": "inner"}'])
    settle(server, "worker")
    before = statistics(server, "worker")["inference_count"]
    large = np.arange(100_000, dtype=np.float32)
    y, _ = ask(server, "caller", large, do="call", model="worker")
    assert np.array_equal(y, 2 * large)
    settle(server, "worker")
    assert statistics(server, "worker")["inference_count"] == before + 1


def test_calls_at_once_from_a_coroutine_and_from_threads(server: Any) -> None:
    expected = [2 * (X + n) for n in range(9)]
    assert np.array_equal(infer(server, "at_once", X=X).as_numpy("Y"), np.concatenate(expected))
    assert np.array_equal(ask(server, "caller", do="threads")[0], np.concatenate(expected[:8]))


def test_the_model_that_is_called_may_be_of_another_backend(server: Any) -> None:
    assert np.array_equal(ask(server, "caller", do="onnx")[0], 3 * X)


def test_a_response_parameter_may_be_a_float(server: Any) -> None:
    """One of a backend: python models may set int, bool and str alone, as in Triton."""
    assert infer(server, "scored", x=X).get_response()["parameters"]["score"] == 0.25
    assert infer(server, "scored", "grpc", x=X).get_response().parameters["score"].double_param == 0.25
    assert ask(server, "caller", do="scored")[1] == ["0.25", "0.25"]


def test_a_model_that_answers_once_may_be_read_like_one_that_answers_more_often(server: Any) -> None:
    y, said = ask(server, "caller", do="one_by_one")
    assert (y.tolist(), said) == ((2 * X).tolist(), ["1"])


def test_a_model_that_answers_more_often_is_read_as_it_answers(server: Any) -> None:
    y, said = ask(server, "caller", do="all_of", count="5")
    assert (y.reshape(5, -1).tolist(), said) == ([(X + n).tolist() for n in range(5)], ["5"])
    assert ask(server, "caller", do="call", model="several")[1] == [
        "error",
        "1",
        "Model several - Error when running inference: "
        "Model several is using the decoupled. The current BLS request call doesn't support models using the decoupled "
        "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled "
        "models.'",
    ]


def test_a_called_model_decides_when_a_cancelled_call_ends(server: Any, tmp_path: Path) -> None:
    """P13: it sees `is_cancelled()`, its caller reads on."""
    for after in (0, 5):
        y, (count,) = ask(server, "caller", do="all_of", count="1000000", enough="3", after=str(after))
        rows = y.reshape(int(count), -1)
        made = [(X + n if n < len(rows) - after else -(X + n)).tolist() for n in range(len(rows))]
        assert rows.tolist() == made
        assert 3 <= len(rows) < 1_000_000
    held = {name: str(tmp_path / name) for name in ("entered", "gate", "cancelled")}
    y, said = ask(server, "caller", do="cancel_one", **held)
    assert (y.tolist(), said) == ((2 * X).tolist(), ['{"id": ""}'])
    assert Path(held["cancelled"]).exists()


NOT_READY = (
    "Model {0} - Error when running inference: Failed for execute the inference request. Model '{0}' is not ready."
)


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
        ({"model": "nobody"}, 1, NOT_READY.format("nobody")),
        ({"model": "spare"}, 1, NOT_READY.format("spare")),
        (
            {"model": "worker", "more": '{"model_version": 7}'},
            1,
            NOT_READY.format("worker"),
        ),
        (
            {"model": "worker", "more": '{"requested_output_names": ["NOPE"]}'},
            1,
            "Model worker - Error when running inference: unexpected inference output 'NOPE' for model 'worker'",
        ),
        (
            {"model": "worker", "more": '{"inputs": []}'},
            1,
            "Model worker - Error when running inference: "
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
    assert ask(server, "caller", do="load_wrongly")[1] == [
        "config must be of type str, found type '<class 'dict'>'.",
        "model_name must be of type str, found type '<class 'NoneType'>'.",
        "model_name must be of type str, found type '<class 'int'>'.",
        "model_version must be of type str, found type '<class 'int'>'.",
    ]
    assert ask(server, "caller", do="load_unknown")[1] == [
        "raised",
        "Failed to load model: Failed to process the request for model 'caller_0', message: failed to load 'nobody', "
        "failed to poll from model repository",
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
    assert time.monotonic() - started < 50, "the calls have 60 s"
    why = "every instance of model '{0}' is held by a request that waits for calls like this one"
    assert alone.startswith("503 [request id: <id_unknown>] deadlock: alone -> alone: " + why.format("alone"))
    assert "deadlock: pair -> pair -> pair: " + why.format("pair") in pair
    # ending one lets the other one go on
    assert sorted("deadlock: relay_" in answer for answer in crossed) in ([False, True], [False, False])
    assert str((X + 2).tolist()) in crossed
    # of a caller that does nothing else it is known at once, not only when it has waited
    took_s = PATIENCE_NS / 1e9
    for _ in range(20):  # a busy machine may hold up some
        started = time.monotonic()
        assert "deadlock: alone -> alone" in told("alone", "alone")
        took_s = time.monotonic() - started
        if took_s < PATIENCE_NS / 1e9:
            break
    assert took_s < PATIENCE_NS / 1e9
    # and nothing is held any more
    for model in models:
        assert ask(server, model, do="relay", path="")[0].tolist() == (X + 1).tolist()


def step(number: int, model: str = "", callee: int = 0, **flags: bool) -> dict[str, Any]:
    """A step of a sequence of `sequential`, which calls a model, as the start of a sequence where `callee` is not 0."""
    more = {"correlation_id": callee, "flags": 1 if callee != number else 0} if callee else {}
    words = {"do": "relay", "path": ""}
    wanted = {"do": "call", "model": model, "more": json.dumps(more), "with": json.dumps(words)} if model else words
    return {"parameters": wanted, "sequence_id": number, **flags}


def test_calls_that_wait_for_their_own_sequences_are_ended(server: Any, tmp_path: Path) -> None:
    """`sequential` has two instances with one slot each."""

    def told(options: dict[str, Any]) -> list[str]:
        answer = infer(server, "sequential", X=X, options=options)
        return [word.decode() for word in answer.as_numpy("SAID").ravel()]

    started = time.monotonic()
    error, code, message = told(step(1, "sequential", 1, sequence_start=True, sequence_end=False))
    assert (error, code) == ("error", "4")
    assert message == (
        "[request id: <id_unknown>] deadlock: sequential -> sequential: the request before it in its sequence waits "
        "for calls like this one; a request of model 'sequential' must not wait for its own sequence"
    )
    # the sequence goes on
    assert told(step(1, sequence_end=True)) == []
    # in the other slot there is room for another one
    assert told(step(2, "sequential", 3, sequence_start=True, sequence_end=True)) == ["{}"]
    # but not when both are held by callers
    with ThreadPoolExecutor(2) as pool:
        both = [step(n, "meeting", sequence_start=True, sequence_end=True) for n in (4, 5)]
        for number, one in zip((6, 7), both, strict=True):
            one["parameters"] |= {"do": "meet", "dir": str(tmp_path), "callee": str(number)}
        answers = list(pool.map(told, both))
    ended = [answer for answer in answers if answer[0] == "error"]
    assert len(ended) == 1, answers
    assert ended[0][2] == (
        "[request id: <id_unknown>] deadlock: sequential -> sequential: every sequence slot of model 'sequential' is "
        "held by a sequence whose request waits for calls like this one; more slots are needed (instances, or "
        "max_candidate_sequences)"
    )
    assert time.monotonic() - started < 40


class Held:
    """A request whose model waits for `worker`, which waits for a file."""

    def __init__(self, directory: Path) -> None:
        self.gate, self.entered = directory / "gate", directory / "entered"
        self.cancelled = directory / "cancelled"
        words = {"gate": str(self.gate), "entered": str(self.entered), "cancelled": str(self.cancelled)}
        self.parameters = {"do": "call", "model": "worker", "with": json.dumps(words)}


# -- ends ------------------------------------------------------------------------------------------------------------


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
    for timeout_s in (1.0, 5.0, 30.0):  # more where a busy machine does not let the callee begin by then
        with client("grpc", server) as asking, pytest.raises(InferenceServerException):
            asking.infer("caller", inputs("grpc", X=X), client_timeout=timeout_s, parameters=held.parameters)
        if held.entered.exists():
            break
    until("the callee has been told", held.cancelled.exists)


@pytest.mark.long
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
    until("nothing waits", lambda: pending(server, "worker") == 0)
