"""Python models as a server runs them: their answers, their errors, their deaths and their replacements."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from e2e_asking import batches, client, index, infer, infer_json, inputs, statistics, until
from e2e_models import WIDTH, gated, python, scaling
from e2e_server import serving
from tritonclient.utils import InferenceServerException

KINDS = ["http", "grpc"]

WORDS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "WORDS", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "BACKWARDS", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "LENGTHS", "data_type": "TYPE_INT32", "dims": [-1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config

    def initialize(self, args):
        pb_utils.Logger.log_info(f"info from {args['model_name']} version {args['model_version']}")
        pb_utils.Logger.log_warn("a warning with a\\nline break")
        print("printed by the model", flush=True)

    def execute(self, requests):
        responses = []
        for request in requests:
            words = pb_utils.get_input_tensor_by_name(request, "WORDS").as_numpy()
            backwards = np.array([w[::-1] for w in words.ravel()], dtype=object).reshape(words.shape)
            lengths = np.array([len(w) for w in words.ravel()], np.int32).reshape(words.shape)
            wanted = request.requested_output_names()
            tensors = [pb_utils.Tensor("BACKWARDS", backwards), pb_utils.Tensor("LENGTHS", lengths)]
            responses.append(pb_utils.InferenceResponse([t for t in tensors if t.name() in wanted]))
        return responses

    def finalize(self):
        pb_utils.Logger.log_info("the words are finalized")
"""

MOODS = '''
import ctypes, json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """X -> Y = X + 1, PID; the parameter `do` asks for trouble."""

    def execute(self, requests):
        responses = []
        for request in requests:
            parameters = json.loads(request.parameters())
            do = parameters.get("do", "")
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            tensors = [pb_utils.Tensor("Y", x + 1), pb_utils.Tensor("PID", np.full(x.shape, os.getpid(), np.int32))]
            if do == "raise":
                raise ValueError("no good")
            if do == "exit":
                os.write(2, b"last words of the model\\n")
                os._exit(3)
            if do == "segv":
                ctypes.string_at(0)
            if do == "loop":
                while True:
                    pass
            if do == "none":
                return None
            if do == "fewer":
                return []
            if do == "dtype":
                tensors[0] = pb_utils.Tensor("Y", (x + 1).astype(np.float64))
            if do == "nothing":
                tensors[0] = pb_utils.Tensor("Y", np.array([]))
            if do == "rows":
                tensors[0] = pb_utils.Tensor("Y", np.concatenate([x, x]))
            if do == "error":
                error = pb_utils.TritonError("not this one", pb_utils.TritonError.NOT_FOUND)
                responses.append(pb_utils.InferenceResponse([], error))
            else:
                told = {"text": "héllo", "count": 7, "yes": True} if do == "tell" else {}
                responses.append(pb_utils.InferenceResponse(tensors, parameters=told))
        return responses
'''

MOODS_CONFIG = """
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "PID" data_type: TYPE_INT32 dims: [ 2 ] } ]
"""

UNABLE = """
class TritonPythonModel:
    def initialize(self, args):
        raise OSError("the disk is gone")

    def execute(self, requests):
        return None
"""

X = np.array([[1, 2]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("python")
    models = directory / "models"
    python(models, "words", WORDS, "")
    python(models, "moods", MOODS, MOODS_CONFIG)
    python(models, "pair", MOODS, MOODS_CONFIG + "instance_group [ { count: 2 } ]")
    together = "dynamic_batching { max_queue_delay_microseconds: 600000000 preferred_batch_size: [ 2 ] }"
    python(models, "together", MOODS, MOODS_CONFIG.replace("max_batch_size: 4", "max_batch_size: 2") + together)
    ceiling = 'parameters { key: "charonia.max_execution_s" value { string_value: "3" } }'
    python(models, "hasty", MOODS, MOODS_CONFIG + ceiling)
    python(models, "unable", UNABLE, MOODS_CONFIG)
    python(models, "unreadable", "class TritonPythonModel(:\n", MOODS_CONFIG)
    warm = """
        model_warmup [ { name: "zeros" batch_size: 3 count: 2
          inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } } } ]
    """
    scaling(models, "warm", 2, config=warm)
    gated(models, "bystander", "max_batch_size: 4")
    with serving(models, directory / "state", "--exit-on-error=false", "--strict-readiness=false") as running:
        yield running


def ask(server: Any, model: str, do: str = "", kind: str = "http") -> Any:
    return infer(server, model, kind, {"parameters": {"do": do}} if do else None, X=X)


def pid(server: Any, model: str) -> int:
    return int(ask(server, model).as_numpy("PID")[0, 0])


def fails(server: Any, model: str, do: str, kind: str = "http") -> InferenceServerException:
    with pytest.raises(InferenceServerException) as caught:
        ask(server, model, do, kind)
    return caught.value


class Bystander:
    """Another model's client, asking all the while; its answers must all come and be right."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.answered = 0

    def __enter__(self) -> Bystander:
        self._task: Future[None] = self._pool.submit(self._ask)
        return self

    def _ask(self) -> None:
        with client("http", self._server) as asking:
            while not self._stop.is_set():
                value = np.full((1, 3), self.answered, np.int32)
                answer = asking.infer("bystander", inputs("http", VALUE=value))
                assert (answer.as_numpy("ECHO") == value).all()
                self.answered += 1

    def __exit__(self, *failure: Any) -> None:
        answered = self.answered
        until("the bystander is served on", lambda: self.answered > answered + 2 or self._task.done())
        self._stop.set()
        self._task.result()
        self._pool.shutdown()


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_strings_and_requested_outputs(kind: str, server: Any) -> None:
    words = np.array([[b"abc", b"", bytes(range(256))], ["größer".encode(), b"x" * 100_000, b"\0"]], dtype=object)
    answer = infer(server, "words", kind, WORDS=words)
    assert answer.as_numpy("BACKWARDS").tolist() == [[w[::-1] for w in row] for row in words]
    assert answer.as_numpy("LENGTHS").tolist() == [[len(w) for w in row] for row in words]
    from tritonclient import grpc, http

    only = (http if kind == "http" else grpc).InferRequestedOutput("LENGTHS")
    answer = infer(server, "words", kind, {"outputs": [only]}, WORDS=words)
    assert answer.as_numpy("BACKWARDS") is None
    assert answer.as_numpy("LENGTHS").shape == (2, 3)


def test_strings_in_json(server: Any) -> None:
    body = {
        "id": "7",
        "inputs": [{"name": "WORDS", "shape": [1, 2], "datatype": "BYTES", "data": ["größer", "ab"]}],
        "outputs": [{"name": "LENGTHS"}],
    }
    assert infer_json(server, "words", body) == (
        200,
        {
            "id": "7",
            "model_name": "words",
            "model_version": "1",
            "outputs": [{"name": "LENGTHS", "datatype": "INT32", "shape": [1, 2], "data": [8, 2]}],
        },
    )


def test_auto_complete_config_makes_the_configuration(server: Any) -> None:
    config = json.loads(server.get("/v2/models/words/config")[1])
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"]["preferred_batch_size"] == [4]
    assert [tensor["name"] for tensor in config["output"]] == ["BACKWARDS", "LENGTHS"]
    metadata = json.loads(server.get("/v2/models/words")[1])
    assert metadata["platform"] == "python"
    assert metadata["inputs"] == [{"name": "WORDS", "datatype": "BYTES", "shape": [-1, -1]}]


def test_response_parameters(server: Any) -> None:
    body = {
        "inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}],
        "parameters": {"do": "tell"},
    }
    status, answer = infer_json(server, "moods", body)
    assert status == 200
    assert answer["parameters"] == {"text": "héllo", "count": 7, "yes": True}
    told = ask(server, "moods", "tell", "grpc").get_response().parameters
    assert told["text"].string_param == "héllo"
    assert told["count"].int64_param == 7
    assert told["yes"].bool_param is True


def test_what_the_model_logs_and_prints_is_in_the_servers_log(server: Any) -> None:
    # what is printed comes another way than the word that the model is loaded
    for text in ("info from words version 1", r"W.*a warning with a", "printed by the model"):
        until(text, lambda text=text: re.search(text, server.log()))


def test_warm_up_is_counted(server: Any) -> None:
    # on each of the instances: 2 executions of 3 requests
    instances = sum(g["count"] for g in json.loads(server.get("/v2/models/warm/config")[1])["instance_group"])
    until("all are counted", lambda: statistics(server, "warm")["execution_count"] >= 2 * instances)
    stats = statistics(server, "warm")
    assert (stats["execution_count"], stats["inference_count"]) == (2 * instances, 6 * instances)
    assert stats["inference_stats"]["success"]["count"] == 6 * instances
    assert batches(server, "warm") == {3: 2 * instances}
    assert (infer(server, "warm", INPUT0=np.ones((1, WIDTH), np.float32)).as_numpy("OUTPUT0") == 2).all()
    assert statistics(server, "warm")["execution_count"] == 2 * instances + 1


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_one_request_leaves_its_batch_alone(kind: str, server: Any) -> None:
    before = statistics(server, "together")
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(ask, server, "together", "error", kind)
        good = pool.submit(ask, server, "together", "tell", kind)
        assert (good.result().as_numpy("Y") == X + 1).all()
        with pytest.raises(InferenceServerException) as caught:
            bad.result()
    assert caught.value.message() == "not this one"
    assert ("NOT_FOUND" if kind == "grpc" else "404") in caught.value.status()
    after = statistics(server, "together")
    assert after["inference_stats"]["fail"]["count"] == before["inference_stats"]["fail"]["count"] + 1
    assert after["inference_stats"]["success"]["count"] == before["inference_stats"]["success"]["count"] + 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_fails_the_whole_batch_with_its_text(kind: str, server: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(ask, server, "together", do, kind) for do in ("raise", "tell")]
        errors = [future.exception() for future in futures]
    line = MOODS.splitlines().index('                raise ValueError("no good")') + 1
    for error in errors:
        assert isinstance(error, InferenceServerException)
        assert re.fullmatch(
            r"Failed to process the request\(s\) for model 'together(_\d+)+', message: ValueError: no good\n\nAt:\n"
            rf"  /\S+/together/1/model\.py\({line}\): execute\n",
            error.message(),
        ), error.message()
        assert ("INTERNAL" if kind == "grpc" else "500") in error.status()


@pytest.mark.parametrize(
    ("do", "text"),
    [
        ("none", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        (
            "fewer",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n",
        ),
    ],
)
def test_wrong_answers_of_a_model_fail_the_request(do: str, text: str, server: Any) -> None:
    before = pid(server, "moods")
    error = fails(server, "moods", do)
    assert text in error.message()
    assert "500" in error.status()
    assert pid(server, "moods") == before, "nobody died of it"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("do", "expected"),
    [
        ("dtype", (X + 1).astype(np.float64)),
        ("rows", np.concatenate([X, X])),
        ("nothing", np.array([])),
    ],
)
def test_types_and_shapes_of_outputs_are_the_models_affair(
    do: str, expected: np.ndarray, kind: str, server: Any
) -> None:
    """I5: models send an empty FP64 array for a TYPE_STRING output when there is nothing to say."""
    for _ in range(3):  # the later ones by whatever way was learned from the first
        found = ask(server, "moods", do, kind).as_numpy("Y")
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert (found == expected).all()


def test_models_that_cannot_load_say_why(server: Any) -> None:
    rows = index(server)
    assert rows["unable", "1"]["state"] == "UNAVAILABLE"
    assert "OSError: the disk is gone" in rows["unable", "1"]["reason"]
    assert "initialize" in rows["unable", "1"]["reason"]
    assert rows["unreadable", "1"]["state"] == "UNAVAILABLE"
    assert "SyntaxError" in rows["unreadable", "1"]["reason"]
    assert "the disk is gone" in server.log()


# -- deaths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("do", ["exit", "segv"])
def test_a_crash_fails_its_request_and_nothing_else(do: str, kind: str, server: Any) -> None:
    before = pid(server, "moods")
    with Bystander(server):
        error = fails(server, "moods", do, kind)
        assert re.fullmatch(r"Stub process 'moods(_\d+)+' is not healthy\.", error.message())
        # a new process takes over; a request that comes before it is up waits for it
        after = pid(server, "moods")
    assert after != before
    assert server.get("/v2/models/moods/ready")[0] == 200
    said = "last words of the model" if do == "exit" else "Segmentation fault"
    until(f"the log says: {said}", lambda: said in server.log())


def test_other_instances_go_on_when_one_dies(server: Any) -> None:
    pids = {pid(server, "pair")}
    with ThreadPoolExecutor(2) as pool:

        def both() -> bool:
            for future in [pool.submit(pid, server, "pair") for _ in range(2)]:
                pids.add(future.result())
            return len(pids) == 2

        until("both instances have answered", both)
        victim = pids.pop()
        survivor = pids.pop()
        os.kill(victim, signal.SIGKILL)
        seen: set[int] = set()

        def replaced() -> bool:
            # a request may still meet the dead one: it fails with P19's text, and at most that one
            for future in [pool.submit(pid, server, "pair") for _ in range(2)]:
                seen.add(future.result())
            return len(seen - {victim}) == 2

        try:
            until("a new instance has answered", replaced)
        except InferenceServerException as error:
            assert "is not healthy." in str(error)
            until("a new instance has answered", replaced)
    assert victim not in seen
    assert survivor in seen


def test_an_endless_loop_is_ended(server: Any) -> None:
    before = pid(server, "hasty")
    with Bystander(server) as other:
        answered = other.answered
        error = fails(server, "hasty", "loop")
        assert re.fullmatch(r"Stub process 'hasty(_\d+)+' is not healthy\.", error.message())
        assert other.answered > answered
        assert pid(server, "hasty") != before
    log = server.log()
    assert "ran longer than 3 s (charonia.max_execution_s)" in log
    assert re.search(r'model\.py", line \d+ in execute', log), "the log says where it hung"


def test_failures_are_counted_as_the_backends(server: Any) -> None:
    failed = statistics(server, "moods")["inference_stats"]["fail"]["count"]
    fails(server, "moods", "raise")
    stats = statistics(server, "moods")
    assert stats["inference_stats"]["fail"]["count"] == failed + 1
    pattern = r'^nv_inference_request_failure{model="moods",reason="BACKEND",version="1"} [1-9]'
    until("it is on the page", lambda: re.search(pattern, server.scrape(), re.M))
