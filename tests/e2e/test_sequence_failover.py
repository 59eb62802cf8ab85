"""Sequences whose executor is killed: they go on where they were, or are told that they cannot."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from e2e_asking import infer, until
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
    with serving(repository, tmp_path_factory.mktemp("state"), "--executors=2") as running:
        yield running


def kill_executors(server: Any) -> None:
    """All of them, so that whatever had a sequence has it no more; and wait until others are up."""
    before = set(server.pids("executor"))
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until("other executors are up", lambda: len(set(server.pids("executor")) - before) == 2)


def test_a_voice_stream_outlives_its_executor(server: Any, examples: ModuleType, expected: ModuleType) -> None:
    """The same probabilities, to the bit, as of the windows one after another in one session."""
    import onnxruntime

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


def test_interleaved_sequences_outlive_an_executor(server: Any) -> None:
    """Sent without waiting over streams; a value lost, doubled or out of order would show."""
    before = set(server.pids("executor"))
    tally = drive(
        server.grpc, server.state_dir / "processes.json", sequences=60, steps=8, streams=4, kills=["executor"]
    )
    assert tally.clean, tally
    assert tally.answers == 480
    until("another executor is up", lambda: len(set(server.pids("executor")) - before) == 1)


def test_what_a_model_remembered_itself_is_told_to_be_lost(server: Any) -> None:
    def say(value: int, *, start: bool = False, end: bool = False) -> list[int]:
        options = {"sequence_id": 7, "sequence_start": start, "sequence_end": end}
        return list(infer(server, "remembers", "http", options, X=np.array([value], np.int32)).as_numpy("TOLD"))

    assert say(1, start=True)[0] == 1
    total, pid = say(2)
    assert total == 3
    os.kill(int(pid), signal.SIGKILL)  # the model's process; its executor makes another
    until("it is gone", lambda: not Path(f"/proc/{pid}").exists())
    for _ in range(2):
        with pytest.raises(InferenceServerException, match="sequence 7 of model 'remembers' has lost its state"):
            say(4)
    assert say(5, start=True)[0] == 5
    kill_executors(server)
    with pytest.raises(InferenceServerException, match="it must be started again, with the START flag"):
        say(6)
    assert [say(7, start=True)[0], say(8, end=True)[0]] == [7, 15]
