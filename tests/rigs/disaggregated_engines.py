"""Small python models in place of a prefill and a decode engine, with the form of vLLM's connectors.

The prefill engine keeps what it computed of a prompt until a decode engine takes it over a socket, or its process ends.
A decode engine that finds nothing to take computes the prompt itself, and notes that; where the other engine cannot be
reached, it fails. Files let the test say how far each is: `Gates`.
"""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

from e2e_asking import until
from e2e_server import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "prefill_decode"
TENSORS = REPOSITORY / "examples" / "tensorrt_llm"

_COMMON = '''
import json, os, socket, threading, time, uuid
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def computed(prompt):
    return sum(ord(letter) * (at + 1) for at, letter in enumerate(prompt))


def text(name, value):
    return pb_utils.Tensor(name, np.array([value.encode()], np.object_))


class Base:
    def initialize(self, args):
        self.gates = json.loads(args["model_config"])["parameters"]["gates"]["string_value"]
        self.begin()

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.serve, args=(request, request.get_response_sender()), daemon=True).start()

    def serve(self, request, sender):
        said = json.loads(pb_utils.get_input_tensor_by_name(request, "sampling_parameters").as_numpy()[0])
        prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
        try:
            self.generate(prompt, said, sender)
        except Exception as error:
            error = pb_utils.TritonError(str(error), pb_utils.TritonError.UNAVAILABLE)
            sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)

    def wait(self, gate, sender):
        """Whether the gate has opened; false when the request was cancelled."""
        self.note("at." + gate)
        while not os.path.exists(os.path.join(self.gates, gate)):
            if sender.is_cancelled():
                self.note("cancelled." + gate)
                return False
            time.sleep(0.002)
        return True

    def note(self, what):
        with open(os.path.join(self.gates, what), "a") as file:
            file.write("x")
'''

_PREFILL = (
    _COMMON
    + """

class TritonPythonModel(Base):
    def begin(self):
        self.engine = uuid.uuid4().hex
        self.held = {}
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.lend, daemon=True).start()
        with open(os.path.join(self.gates, "port.new"), "w") as file:
            file.write(str(self.listener.getsockname()[1]))
        os.rename(file.name, os.path.join(self.gates, "port"))

    def lend(self):
        while True:
            with self.listener.accept()[0] as peer, peer.makefile("rw") as lines:
                asked = json.loads(lines.readline())
                blocks = self.held.pop(asked.get("take"), None)
                lines.write(json.dumps({"blocks": blocks, "held": len(self.held)}) + "\\n")

    def generate(self, prompt, said, sender):
        assert said["max_tokens"] == 1 and said["kv_transfer_params"]["do_remote_decode"], said
        if not self.wait("prefill", sender):
            sender.send(flags=FINAL)
            return
        self.note("prefilled")
        identity = uuid.uuid4().hex
        self.held[identity] = computed(prompt)
        there = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine,
            "remote_request_id": identity,
            "remote_block_ids": [[1, 2]],
            "remote_host": "127.0.0.1",
            "remote_port": self.listener.getsockname()[1],
        }
        sender.send(pb_utils.InferenceResponse([text("kv_transfer_params", json.dumps(there))]), flags=FINAL)
"""
)

_DECODE = (
    _COMMON
    + """

class TritonPythonModel(Base):
    def begin(self):
        pass

    def take(self, there):
        with socket.create_connection((there["remote_host"], there["remote_port"]), 30) as peer:
            with peer.makefile("rw") as lines:
                lines.write(json.dumps({"take": there["remote_request_id"]}) + "\\n")
                lines.flush()
                return json.loads(lines.readline())["blocks"]

    def generate(self, prompt, said, sender):
        there = said["kv_transfer_params"]
        assert there["do_remote_prefill"], there
        if said["max_tokens"] > 1 and not self.wait("decode", sender):
            sender.send(flags=FINAL)
            return
        blocks = self.take(there)
        if blocks is None:
            self.note("recomputed")
            blocks = computed(prompt)
        for index in range(said["max_tokens"]):
            if said["max_tokens"] > 1 and not self.wait(f"decode.{index}", sender):
                break
            sender.send(pb_utils.InferenceResponse([text("text_output", f" {blocks + index}")]))
        sender.send(flags=FINAL)
"""
)
_INPUTS = """
max_batch_size: 0
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: 1 }
input { name: "stream" data_type: TYPE_BOOL dims: 1 optional: true }
input { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: 1 optional: true }
input { name: "return_kv_transfer_params" data_type: TYPE_BOOL dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
output { name: "kv_transfer_params" data_type: TYPE_STRING dims: 1 }
output { name: "finish_reason" data_type: TYPE_STRING dims: -1 }
output { name: "cumulative_logprob" data_type: TYPE_FP32 dims: -1 }
output { name: "logprobs" data_type: TYPE_STRING dims: -1 }
output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: -1 }
output { name: "num_output_tokens" data_type: TYPE_UINT32 dims: -1 }
output { name: "token_ids" data_type: TYPE_INT32 dims: -1 }
parameters { key: "charonia.repeatable" value { string_value: "true" } }
"""


class Gates:
    """A directory of files that the engines wait for, and of their notes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def open(self, *names: str) -> None:
        for name in names:
            (self.directory / name).touch()

    def until(self, note: str, times: int = 1) -> None:
        """Wait until engines have made a note so often; `at.<gate>`: they have come to a gate."""
        until(f"{note} was noted {times} times", lambda: self.count(note) >= times)

    def count(self, note: str) -> int:
        file = self.directory / note
        return file.stat().st_size if file.exists() else 0

    def held(self) -> int:
        """How many prompts the prefill engine holds keys and values of."""
        port = int((self.directory / "port").read_text())
        with socket.create_connection(("127.0.0.1", port), 30) as peer, peer.makefile("rw") as lines:
            lines.write("{}\n")
            lines.flush()
            return int(json.loads(lines.readline())["held"])


def write_models(repository: Path, gates: Gates) -> None:
    """The example, with these engines in the place of vLLM's, and TensorRT-LLM's tensors over it."""
    shutil.copytree(EXAMPLE, repository)
    front = repository / "disaggregated" / "config.pbtxt"
    front.write_text(front.read_text() + _parameter("charonia.pool", "front"))
    texts = (TENSORS / "models" / "tensorrt_llm_bls" / "config.pbtxt").read_text().replace("smollm2", "disaggregated")
    (repository / "tensorrt_llm_bls" / "1").mkdir(parents=True)
    (repository / "tensorrt_llm_bls" / "config.pbtxt").write_text(texts + _parameter("charonia.pool", "front"))
    for name, source in (("prefill", _PREFILL), ("decode", _DECODE)):
        (repository / name / "1" / "model.py").write_text(source)
        config = 'backend: "python"' + _INPUTS + _parameter("charonia.pool", name)
        (repository / name / "config.pbtxt").write_text(config + _parameter("gates", str(gates.directory)))


def text_of(prompt: str, tokens: int) -> str:
    """What the engines answer."""
    first = sum(ord(letter) * (at + 1) for at, letter in enumerate(prompt))
    return "".join(f" {first + index}" for index in range(tokens))


def _parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
