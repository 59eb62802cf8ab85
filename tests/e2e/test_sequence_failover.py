"""Sequences whose executor is killed: they go on where they were, or are told that they cannot."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from e2e_asking import client, infer, until
from e2e_models import python
from e2e_server import serving
from tritonclient.utils import InferenceServerException

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from loadtest.sequences import build, drive

pytestmark = pytest.mark.e2e

REMEMBERS = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().ravel()[0]
            key = request.correlation_id()
            if request.flags() & 1:
                self.sums[key] = 0
            self.sums[key] += value
            told = np.array([self.sums[key], os.getpid()], np.int32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", told)]))
        return responses
"""


@pytest.fixture(scope="module")
def server(example_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    repository = tmp_path_factory.mktemp("failover")
    build(repository, batch=16, candidates=64)
    os.symlink(example_models / "silero_vad", repository / "silero_vad")
    python(
        repository,
        "remembers",
        REMEMBERS,
        'input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ] '
        'output [ { name: "TOLD" data_type: TYPE_INT32 dims: [ 2 ] } ] '
        "instance_group [ { count: 1 kind: KIND_CPU } ] "
        "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 8 } }",
    )
    flags = ("--executors=2", "--model-control-mode=explicit", "--load-model=*")
    with serving(repository, tmp_path_factory.mktemp("state"), *flags) as running:
        yield running


def kill_executors(server: Any) -> None:
    """All of them, so that whatever had a sequence has it no more; and wait until others are up."""
    before = set(server.pids("executor"))
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until("other executors are up", lambda: len(set(server.pids("executor")) - before) == 2)


def remember(server: Any, value: int, *, start: bool = False, end: bool = False) -> list[int]:
    """The sum of the sequence so far, and the process that says so."""
    options = {"sequence_id": 7, "sequence_start": start, "sequence_end": end}
    return list(infer(server, "remembers", "http", options, X=np.array([value], np.int32)).as_numpy("TOLD"))


def test_a_voice_stream_outlives_its_executor(server: Any, examples: ModuleType, expected: ModuleType) -> None:
    """The same probabilities, to the bit, as of the windows one after another in one session.

    What a python model remembered itself cannot follow, and that is said.
    """
    import onnxruntime

    assert remember(server, 1, start=True)[0] == 1
    windows = examples.silero_vad()["input"]
    path = Path(examples.__file__).parent / "models/silero_vad/1/model.onnx"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    states = {"h": np.zeros((1, 1, 128), np.float32), "c": np.zeros((1, 1, 128), np.float32)}
    wanted, heard = [], []
    for at in range(len(windows)):
        window = windows[at : at + 1]
        probability, states["h"], states["c"] = session.run(["speech_probs", "hn", "cn"], {"input": window, **states})
        wanted.append(probability)
        if at == len(windows) // 2:
            kill_executors(server)
        options = {"sequence_id": "voice", "sequence_start": at == 0, "sequence_end": at + 1 == len(windows)}
        heard.append(infer(server, "silero_vad", "grpc", options, input=window).as_numpy("speech_probs"))
    assert np.concatenate(heard).tobytes() == np.concatenate(wanted).tobytes()
    whole = expected.onnxruntime_outputs(path.parents[2], "silero_vad", {"input": windows})["speech_probs"]
    options = examples.sequence("silero_vad")
    together = infer(server, "silero_vad", "http", options, input=windows).as_numpy("speech_probs")
    assert together.tobytes() == whole.tobytes()
    np.testing.assert_allclose(np.concatenate(heard), whole, atol=1e-5)
    with pytest.raises(InferenceServerException, match="it must be started again, with the START flag"):
        remember(server, 6)
    assert [remember(server, 7, start=True)[0], remember(server, 8, end=True)[0]] == [7, 15]


@pytest.mark.long
def test_interleaved_sequences_outlive_an_executor(server: Any) -> None:
    """Sent without waiting over streams; a value lost, doubled or out of order would show."""
    before = set(server.pids("executor"))
    tally = drive(
        server.grpc, server.state_dir / "processes.json", sequences=60, steps=8, streams=4, kills=["executor"]
    )
    assert tally.clean, tally
    assert tally.answers == 480
    until("another executor is up", lambda: len(set(server.pids("executor")) - before) == 1)


def test_a_sequence_goes_on_when_its_model_is_loaded_anew(server: Any) -> None:
    """Its state is one of the new incarnation too. With another scheduler in between it is another model."""

    def say(value: float, *, start: bool = False, end: bool = False) -> float:
        options = {"sequence_id": "reload", "sequence_start": start, "sequence_end": end}
        answer = infer(server, "digest", "http", options, VALUE=np.array([[value]], np.float32))
        return float(answer.as_numpy("STATE")[0, 0])

    assert [say(1, start=True), say(2)] == [1, 33]
    with client("http", server) as asking:
        config = asking.get_model_config("digest")
        config["sequence_batching"]["oldest"]["max_candidate_sequences"] = 40
        asking.load_model("digest", config=json.dumps(config))
        assert say(3) == 33 * 31 + 3
        del config["sequence_batching"]
        config["input"].append({"name": "BEFORE", "data_type": "TYPE_FP32", "dims": [1]})
        asking.load_model("digest", config=json.dumps(config))
        both = {name: np.array([[5]], np.float32) for name in ("VALUE", "BEFORE")}
        plain = until_not_refused(lambda: infer(server, "digest", "http", {}, **both))
        assert plain.as_numpy("STATE")[0, 0] == 5 * 31 + 5
        asking.unload_model("digest")
        asking.load_model("digest")
    assert say(4, start=True, end=True) == 4


def until_not_refused(call: Callable[[], Any]) -> Any:
    """Gateways hear of a load one after the other."""

    def tried() -> Any:
        try:
            return call()
        except InferenceServerException:
            return None

    return until("the new configuration is known", tried)


def test_what_a_models_process_remembered_goes_with_it(server: Any) -> None:
    assert remember(server, 1, start=True)[0] == 1
    total, pid = remember(server, 2)
    assert total == 3
    os.kill(int(pid), signal.SIGKILL)  # its executor makes another
    until("it is gone", lambda: not Path(f"/proc/{pid}").exists())
    for _ in range(2):
        with pytest.raises(InferenceServerException, match="sequence 7 of model 'remembers' has lost its state"):
            remember(server, 4)
    assert remember(server, 5, start=True)[0] == 5
    assert remember(server, 6, end=True)[0] == 11
