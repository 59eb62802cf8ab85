"""A python model with the tensors of text generation that says what its prompt asks for, one byte a token.

A prompt with `say <text>.` at its end (or in its last user message) is answered by the text; others by letters that
follow from seed and index. `tokenizer_json` has a token for each byte, by its value, and two for the turns of a chat.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e_models import put, python

from charonia.generation.text_assets import TextAssets, digest_of

CONTEXT = 2048
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if tools %}tools: {% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SOURCE = '''
import hashlib, json, os, re, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def given(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)


def letters(seed, count):
    """Letters by seed and index alone."""
    found = [hashlib.sha256(f"{seed}/{at}".encode()).digest()[0] % 26 + 97 for at in range(count)]
    return bytes(found)


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            threading.Thread(target=self.answer, args=(request, sender), daemon=True).start()
        return None

    def answer(self, request, sender):
        ids = given(request, "prompt_token_ids")
        if ids is None:
            prompt = bytes(given(request, "text_input")[0])
            count = len(prompt)
        else:
            prompt, count = b"".join(bytes([i]) if i < 256 else b"|" for i in ids.tolist()), len(ids)
        sampling = json.loads(bytes(given(request, "sampling_parameters")[0]))
        stream = bool(given(request, "stream")[0])
        most = sampling.get("max_tokens", 16)
        asked = re.search(rb"say (.*?)\\.(?:\\||\\n|$)", prompt, re.DOTALL)
        gate = re.search(rb"gate=(\\S+)", prompt)
        structured = sampling.get("structured_outputs")
        reason = "stop"
        if b"fail at once" in prompt:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("the model failed")), flags=FINAL)
            return
        if structured and "json" in structured and asked is None:
            text = json.dumps(self.of(structured["json"])).encode()
        elif asked is not None:
            text = asked[1]
        else:
            text = letters(sampling["seed"] if sampling.get("temperature", 1.0) else 0, most + 1)
        for stop in sampling.get("stop", ()):
            text = text.split(stop.encode())[0]
        if len(text) > most:
            text, reason = text[:most], "length"
        if sampling.get("lora_name"):
            text = sampling["lora_name"].encode() + b":" + text
        text = text.decode("utf-8", "ignore")
        size = 1 if stream else max(1, len(text))
        for at in range(0, max(1, len(text)), size):
            if gate is not None:
                give_up_at = time.monotonic() + 60
                path = gate[1].decode()
                while not os.path.exists(f"{path}.{at}") and time.monotonic() < give_up_at:
                    if sender.is_cancelled():
                        open(f"{path}.left", "w").close()
                        sender.send(flags=FINAL)
                        return
                    time.sleep(0.002)
            if b"fail later" in prompt and at == 2:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("the model failed")), flags=FINAL)
                return
            part = text[at : at + size].encode()
            last = at + size >= len(text)
            sender.send(self.response(part, reason if last else "null", count, sampling), flags=FINAL if last else 0)

    def of(self, schema):
        """A value of a JSON schema of the kinds that tests use."""
        if "enum" in schema:
            return schema["enum"][0]
        if "anyOf" in schema:
            return self.of(schema["anyOf"][0])
        kind = schema.get("type")
        if kind == "object":
            return {name: self.of(one) for name, one in schema.get("properties", {}).items()}
        if kind == "array":
            return [self.of(schema["items"])]
        return {"integer": 7, "number": 0.5, "boolean": True}.get(kind, "Paris")

    def response(self, part, reason, count, sampling):
        tensors = [
            pb_utils.Tensor("text_output", np.array([part], np.object_)),
            pb_utils.Tensor("finish_reason", np.array([reason.encode()], np.object_)),
            pb_utils.Tensor("num_input_tokens", np.array([count], np.uint32)),
            pb_utils.Tensor("num_output_tokens", np.array([len(part)], np.uint32)),
            pb_utils.Tensor("token_ids", np.array(list(part), np.int32)),
        ]
        if sampling.get("logprobs") is not None:
            rows = []
            for byte in part:
                row = {str(byte): {"logprob": -0.25, "rank": 1, "decoded_token": chr(byte)}}
                for rank in range(2, sampling["logprobs"] + 1):
                    other = (byte + rank) % 128
                    row[str(other)] = {"logprob": -float(rank), "rank": rank, "decoded_token": chr(other)}
                rows.append(row)
            tensors.append(pb_utils.Tensor("logprobs", np.array([json.dumps(rows).encode()], np.object_)))
        return pb_utils.InferenceResponse(tensors)
'''

_INPUTS = {
    "text_input": ("STRING", 1),
    "stream": ("BOOL", 1),
    "sampling_parameters": ("STRING", 1),
    "return_logprobs": ("BOOL", 1),
    "prompt_token_ids": ("INT32", -1),
}
_OUTPUTS = {
    "text_output": "STRING",
    "finish_reason": "STRING",
    "logprobs": "STRING",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
    "token_ids": "INT32",
}

EMBEDDING = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Counts of the letters a to h, in a vector of length 1."""

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)
            rows = np.array([[bytes(text).count(97 + at) for at in range(8)] for text in texts], np.float32)
            rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("embedding", rows)]))
        return responses
'''
EMBEDDING_CONFIG = """
max_batch_size: 64
dynamic_batching { }
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "embedding" data_type: TYPE_FP32 dims: [ 8 ] }
parameters { key: "charonia.openai_task" value { string_value: "embed" } }
"""


def tokenizer_json() -> bytes:
    """A `tokenizer.json` whose ids are bytes, and <|im_start|> and <|im_end|>."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet |= {byte: chr(0x100 + at) for at, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [
        {
            "id": 256 + at,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for at, content in enumerate(("<|im_start|>", "<|im_end|>"))
    ]
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {alphabet[byte]: byte for byte in range(256)} | {one["content"]: one["id"] for one in added},
            "merges": [],
        },
    }
    return json.dumps(document).encode()


def assets() -> TextAssets:
    """The assets of the model."""
    return TextAssets(
        tokenizer_json(), CONTEXT, TEMPLATE, special_tokens={"eos_token": "<|im_end|>"}, end_tokens=(257,)
    )


def model(repository: Path, name: str, *, with_assets: bool = True, adapters: str = "") -> bytes:
    """Write the model; returns the blob that has to be in the log under `digest_of` it."""
    blob = assets().pack()
    config = "max_batch_size: 0\nmodel_transaction_policy { decoupled: true }\n"
    for one, (kind, size) in _INPUTS.items():
        config += f'input {{ name: "{one}" data_type: TYPE_{kind} dims: [ {size} ] optional: true }}\n'
    for one, kind in _OUTPUTS.items():
        config += f'output {{ name: "{one}" data_type: TYPE_{kind} dims: [ -1 ] }}\n'
    values = {"charonia.adapters": adapters}
    if with_assets:
        values["charonia.text_assets"] = digest_of(blob)
    for key, value in values.items():
        if value:
            config += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
    python(repository, name, SOURCE, config)
    return blob


def embedding(repository: Path, name: str) -> None:
    """Write the model that embeds."""
    python(repository, name, EMBEDDING, EMBEDDING_CONFIG)


__all__ = ["CONTEXT", "assets", "digest_of", "embedding", "model", "put", "tokenizer_json"]
