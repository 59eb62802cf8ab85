"""A model with the tensors of `charonia.generation.text_tensors` whose words follow from prompt and seed alone.

What a test wants of it stands in the prompt: `gates=<path>` waits for a file `<path>.<index>` before each word,
`runs=<path>` adds a line to that file for each run, `fail=<text>` fails.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from e2e_models import python

MODEL = "told"

SOURCE = r"""
import hashlib, json, os, re, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def text(array):
    return pb_utils.Tensor(array[0], np.array([array[1].encode()], np.object_))


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender()), daemon=True).start()

    def value(self, request, name, default):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return default if tensor is None else tensor.as_numpy().ravel()[0]

    def answer(self, request, sender):
        prompt = self.value(request, "text_input", b"").decode()
        sampling = json.loads(self.value(request, "sampling_parameters", b"{}"))
        stream = bool(self.value(request, "stream", False))
        told = dict(re.findall(r"(gates|runs|fail)=(\S+)", prompt))
        if "runs" in told:
            with open(told["runs"], "a") as runs:
                runs.write(prompt.split()[1] + "\n")
        if "fail" in told:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(told["fail"])), flags=FINAL)
            return
        count = int(sampling.get("max_tokens", 4))
        words = []
        for index in range(count):
            while "gates" in told and not os.path.exists(told["gates"] + f".{index}"):
                if sender.is_cancelled():
                    sender.send(flags=FINAL)
                    return
                time.sleep(0.002)
            word = hashlib.sha256(f"{prompt}/{sampling['seed']}/{index}".encode()).hexdigest()[:6] + " "
            words.append(word)
            if stream:
                last = index == count - 1
                self.send(sender, prompt, word, [index], "length" if last else "null", last)
        if not stream:
            self.send(sender, prompt, "".join(words), list(range(count)), "length", True)

    def send(self, sender, prompt, words, ids, finish, last):
        tensors = [
            text(("text_output", words)),
            text(("finish_reason", finish)),
            pb_utils.Tensor("num_input_tokens", np.array([len(prompt.split())], np.uint32)),
            pb_utils.Tensor("num_output_tokens", np.array([len(ids)], np.uint32)),
            pb_utils.Tensor("token_ids", np.array(ids, np.int32)),
        ]
        sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if last else 0)
"""

CONFIG = """
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "token_ids" data_type: TYPE_INT32 dims: [ -1 ] }
]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


def told_model(repository: Path) -> None:
    """Put the model into a repository."""
    python(repository, MODEL, SOURCE, CONFIG)


def words(prompt: str, seed: int, count: int) -> str:
    """What the model answers."""
    return "".join(hashlib.sha256(f"{prompt}/{seed}/{at}".encode()).hexdigest()[:6] + " " for at in range(count))


class Gates:
    """Files that the model waits for, one for each word."""

    def __init__(self, path: Path) -> None:
        self.prefix = str(path)

    def open(self, *indices: int) -> None:
        for index in indices:
            Path(f"{self.prefix}.{index}").touch()
