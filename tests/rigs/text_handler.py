"""An in-memory handler with models that generate text and embed it, over which the OpenAI API is tested.

The models speak as those of `scripted_texts`: a prompt with `say <text>.` is answered by the text, a character a
response.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from typing import Any

import echo_handler
import numpy as np
import orjson
import scripted_texts

from charonia.catalog.served import ServedVersion
from charonia.datatypes import DataType
from charonia.errors import NotFound, UnknownError
from charonia.generation.text_tensors import ENGINE_INPUTS, ENGINE_OUTPUTS
from charonia.inference import InferenceRequest, InferenceResponse
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.tensors import Tensor, split_bytes_elements
from gateway.handler import ModelIndexEntry
from gateway.requests.delivery import DeliveryOptions
from protos.model_config_pb2 import ModelConfig

BLOB = scripted_texts.assets().pack()
DIGEST = scripted_texts.digest_of(BLOB)

_SAY = re.compile(r"say (.*?)\.(?:<\||\n|$)", re.DOTALL)


def _generating(name: str, parameters: dict[str, str]) -> ModelInterface:
    inputs = {t.name: TensorSpec(t.name, DataType(t.datatype), t.dims, optional=t.optional) for t in ENGINE_INPUTS}
    outputs = {t.name: TensorSpec(t.name, DataType(t.datatype), t.dims) for t in ENGINE_OUTPUTS}
    return ModelInterface(name, "llm", "", 0, inputs, outputs, decoupled=True, parameters=parameters)


def _plain(name: str) -> ModelInterface:
    """A model with a text in and a text out, and nothing more."""
    one = {n: TensorSpec(n, DataType.BYTES, (1,)) for n in ("text_input", "text_output")}
    return ModelInterface(name, "python", "", 4, {"text_input": one["text_input"]}, {"text_output": one["text_output"]})


_EMBEDS = ModelInterface(
    "embeds",
    "python",
    "",
    8,
    {"text": TensorSpec("text", DataType.BYTES, (1,))},
    {"embedding": TensorSpec("embedding", DataType.FP32, (4,))},
    parameters={"charonia.openai_task": "embed"},
    required_inputs=frozenset(("text",)),
)
_VECTORS = ModelInterface(
    "vectors",
    "vllm",
    "",
    0,
    {
        "embedding_request": TensorSpec("embedding_request", DataType.BYTES, (1,)),
        "return_num_input_tokens": TensorSpec("return_num_input_tokens", DataType.BOOL, (1,), optional=True),
    },
    {
        "text_output": TensorSpec("text_output", DataType.BYTES, (-1,)),
        "num_input_tokens": TensorSpec("num_input_tokens", DataType.UINT32, (-1,)),
    },
    decoupled=True,
)
_NUMBERS = ModelInterface(
    *("numbers", "onnxruntime", "", 8),
    {"x": TensorSpec("x", DataType.FP32, (4,))},
    {"y": TensorSpec("y", DataType.FP32, (4,))},
)


CANARY = (b"x-canary", b"yes")


class TextHandler(echo_handler.EchoHandler):  # type: ignore[misc,name-defined]
    """Models: `says` with a tokenizer and adapters red and blue, `plain`, `embeds`, `vectors`, which embeds with the
    tensors of Triton's vLLM backend, and `numbers`, which does neither.

    A prompt with `wait` is answered up to its first character, then when `gate` is set. One with `fail` fails at that
    character of its text, `fail0` at once.
    """

    def __init__(self) -> None:
        super().__init__()
        says = _generating(
            "says", {"charonia.text_assets": DIGEST, "charonia.adapters": "red, blue", "charonia.tool_format": "hermes"}
        )
        self.models = {one.name: one for one in (says, _plain("plain"), _EMBEDS, _VECTORS, _NUMBERS)}
        self.blobs = {DIGEST: BLOB}
        self.blobs_read = 0
        self.stopped = asyncio.Event()
        self.ends_bare = False
        """Whether `says` and `vectors` end with a response without outputs."""

    def served_model(self, name: str, version: str) -> ServedVersion:
        if name not in self.models:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return ServedVersion(name, 1, "", ModelConfig(), self.models[name], {}, {})

    def version_for(self, name: str, headers: Iterable[tuple[bytes, bytes]], tenant: str) -> ServedVersion:
        """Version 2 for calls with CANARY, and for its tenant."""
        served = self.served_model(name, "")
        return replace(served, version=2) if CANARY in headers or tenant == "canary" else served

    def repository_index(self, *, ready: bool) -> list[ModelIndexEntry]:
        return [ModelIndexEntry(name, "1", "READY") for name in self.models]

    async def text_assets(self, digest: str) -> bytes | None:
        self.blobs_read += 1
        return self.blobs.get(digest)

    async def infer(self, request: InferenceRequest, **_: Any) -> InferenceResponse:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        (data,) = split_bytes_elements(request.inputs[0].data)
        counts = np.array([[data.count(97 + at) for at in range(4)]], np.float32)
        return InferenceResponse(request.model, 1, [Tensor.of("embedding", counts)], request.id)

    async def stream(
        self, request: InferenceRequest, *, flush_interval_s: float = 0.0, options: DeliveryOptions | None = None
    ) -> AsyncGenerator[InferenceResponse]:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.options.append(options)
        given = {tensor.name: tensor.array().ravel() for tensor in request.inputs}
        if request.model == "plain":
            data = bytes(given["text_input"][0])
            yield InferenceResponse("plain", 1, [_text("text_output", _answer(data.decode(), {}, 99)[0])])
            return
        if request.model == "vectors":
            yield _embedded(orjson.loads(given["embedding_request"][0]))
            yield InferenceResponse("vectors", 1, [], final=True, bare=self.ends_bare)
            return
        ids = given["prompt_token_ids"].tolist()
        prompt = b"".join(bytes([token]) if token < 256 else b"<|" for token in ids).decode("utf-8", "replace")
        sampling = orjson.loads(given["sampling_parameters"][0])
        text, reason = _answer(prompt, sampling, sampling.get("max_tokens", 16))
        size = 1 if given["stream"][0] else max(1, len(text))
        ended = False
        try:
            for at in range(0, max(1, len(text)), size):
                if "wait" in prompt and at:
                    await self.gate.wait()
                if "fail" in prompt and (at or "fail0" in prompt):
                    ended = True
                    place = (1, at) if at else None
                    yield InferenceResponse("says", 1, [], error=UnknownError("the model failed"), place=place)
                    return
                ended = at + size >= len(text)
                part = text[at : at + size]
                outputs = _outputs(part, reason if ended else "null", len(ids), sampling)
                if "return_prompt_logprobs" in given:
                    rows = None if at else [None, *(_row(token, sampling["prompt_logprobs"]) for token in ids[1:])]
                    outputs.append(_text("prompt_logprobs", orjson.dumps(rows).decode()))
                yield InferenceResponse("says", 1, outputs, final=ended and not self.ends_bare, place=(1, at))
            if self.ends_bare:
                yield InferenceResponse("says", 1, [], place=(1, len(text)), bare=True)
        finally:
            if not ended:
                self.stopped.set()


def _embedded(asked: dict[str, Any]) -> InferenceResponse:
    """Counts of letters, or of their codes, and how many there are."""
    letters = asked["input"] if isinstance(asked["input"], str) else "".join(map(chr, asked["input"]))
    (size,) = asked["pooling_params"].get("dimensions", [4])
    counts = [letters.count(chr(97 + at)) for at in range(size)]
    text = "no list" if "?" in letters else orjson.dumps(counts).decode()
    tokens = Tensor.of("num_input_tokens", np.array([len(letters)], np.uint32))
    return InferenceResponse("vectors", 1, [_text("text_output", text), tokens])


def _answer(prompt: str, sampling: dict[str, Any], most: int) -> tuple[str, str]:
    """The text, and why it ends."""
    asked = _SAY.search(prompt)
    structure = sampling.get("structured_outputs")
    if asked is not None:
        text = asked[1]
    elif structure is not None:
        text = orjson.dumps(_of(structure["json"])).decode() if "json" in structure else "{}"
    else:
        seed = sampling.get("seed", 0)
        letters = (hashlib.sha256(f"{seed}/{at}".encode()).digest()[0] % 26 + 97 for at in range(most + 1))
        text = "".join(map(chr, letters))
    if sampling.get("lora_name"):
        text = f"{sampling['lora_name']}:{text}"
    for stop in sampling.get("stop", ()):
        text = text.split(stop)[0]
    return (text, "stop") if len(text) <= most else (text[:most], "length")


def _of(schema: dict[str, Any]) -> Any:
    """A value of a schema of the kinds that tests use."""
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _of(schema["anyOf"][0])
    if schema.get("type") == "object":
        return {name: _of(one) for name, one in schema.get("properties", {}).items()}
    if schema.get("type") == "array":
        return [_of(schema["items"])]
    return {"integer": 7}.get(schema.get("type", ""), "Paris")


def _text(name: str, value: str) -> Tensor:
    return Tensor.of(name, np.array([value], np.object_))


def _outputs(part: str, reason: str, prompt_tokens: int, sampling: dict[str, Any]) -> list[Tensor]:
    tokens = part.encode()
    found = [
        _text("text_output", part),
        _text("finish_reason", reason),
        Tensor.of("num_input_tokens", np.array([prompt_tokens], np.uint32)),
        Tensor.of("num_output_tokens", np.array([len(tokens)], np.uint32)),
        Tensor.of("token_ids", np.array(list(tokens), np.int32)),
    ]
    most = sampling.get("logprobs")
    if most is not None:
        rows = [_row(token, most) for token in tokens]
        found.append(_text("logprobs", orjson.dumps(rows).decode()))
    return found


def _row(token: int, most: int) -> dict[str, dict[str, Any]]:
    row = {str(token): {"logprob": -0.25, "rank": 1, "decoded_token": "?"}}
    for rank in range(2, most + 1):
        row[str((token + rank) % 128)] = {"logprob": -float(rank), "rank": rank, "decoded_token": "?"}
    return row
