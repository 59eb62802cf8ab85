"""A llama's forward pass in NumPy over the weights of a GGUF file: what a decoder is compared with.

Types Q4_1, Q8_0 and float32 are read. Rows of queries and keys are put back in the order that models are trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from executors.backends.llm.gguf_metadata import GgufTensor, read_metadata, read_tensors

_NAMES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}


class Llama:
    """All weights as float32, by name; those of products as [outputs, inputs]."""

    def __init__(self, path: Path) -> None:
        said = read_metadata(path)
        self.heads, self.kv_heads = said["llama.attention.head_count"], said["llama.attention.head_count_kv"]
        self.layers, self.epsilon = said["llama.block_count"], said["llama.attention.layer_norm_rms_epsilon"]
        self.size = said["llama.rope.dimension_count"]
        self.base = said["llama.rope.freq_base"]
        self.weights: dict[str, Any] = {}
        for tensor in read_tensors(path):
            self.weights[tensor.name.removesuffix(".weight")] = _values(path, tensor)
        for layer in range(self.layers):
            for name in ("attn_q", "attn_k"):
                key = f"blk.{layer}.{name}"
                rows = self.weights[key]
                heads = len(rows) // self.size
                halves = rows.reshape(heads, self.size // 2, 2, -1).swapaxes(1, 2)
                self.weights[key] = halves.reshape(rows.shape)

    def logits(self, ids: Sequence[int], deltas: Mapping[tuple[int, str], Any] | None = None) -> Any:
        """Logits [tokens, vocabulary] of all tokens; `deltas` are added to the weights of (layer, name)."""
        added = deltas or {}
        x = self.weights["token_embd"][list(ids)]
        angles = np.arange(len(ids))[:, None] / self.base ** (np.arange(0, self.size, 2) / self.size)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        mask = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)

        def product(layer: int, name: str, value: Any) -> Any:
            weights = self.weights[f"blk.{layer}.{name}"]
            return value @ (weights + added.get((layer, _NAMES[name]), 0)).T

        def turned(value: Any) -> Any:
            left, right = np.split(value, 2, axis=-1)
            return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

        for layer in range(self.layers):
            h = self._norm(x, f"blk.{layer}.attn_norm")
            q = turned(product(layer, "attn_q", h).reshape(len(ids), self.heads, self.size))
            k = turned(product(layer, "attn_k", h).reshape(len(ids), self.kv_heads, self.size))
            v = product(layer, "attn_v", h).reshape(len(ids), self.kv_heads, self.size)
            k, v = (np.repeat(one, self.heads // self.kv_heads, axis=1) for one in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self.size) + mask
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            x = x + product(layer, "attn_output", np.einsum("hqk,khd->qhd", shares, v).reshape(len(ids), -1))
            h = self._norm(x, f"blk.{layer}.ffn_norm")
            gate = product(layer, "ffn_gate", h)
            x = x + product(layer, "ffn_down", gate / (1 + np.exp(-gate)) * product(layer, "ffn_up", h))
        return self._norm(x, "output_norm") @ self.weights.get("output", self.weights["token_embd"]).T

    def _norm(self, x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * self.weights[name]


def adapter_deltas(directory: Path) -> dict[tuple[int, str], Any]:
    """What an adapter of float32 adds to the weights of (layer, name)."""
    data = (directory / "adapter_model.safetensors").read_bytes()
    config = json.loads((directory / "adapter_config.json").read_text())
    size = int.from_bytes(data[:8], "little")
    halves: dict[tuple[int, str], dict[str, Any]] = {}
    for name, told in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            first, last = told["data_offsets"]
            matrix = np.frombuffer(data[8 + size + first : 8 + size + last], np.float32).reshape(told["shape"])
            parts = name.split(".")
            halves.setdefault((int(parts[4]), parts[6]), {})[parts[7]] = matrix
    scale = config["lora_alpha"] / config["r"]
    return {place: scale * (found["lora_B"] @ found["lora_A"]) for place, found in halves.items()}


def _values(path: Path, tensor: GgufTensor) -> Any:
    count = int(np.prod(tensor.shape))
    if tensor.kind == 0:
        return np.fromfile(path, np.float32, count, offset=tensor.offset).reshape(tensor.shape)
    if tensor.kind == 8:
        blocks = np.fromfile(path, np.uint8, count // 32 * 34, offset=tensor.offset).reshape(-1, 34)
        scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        return (scale * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)).reshape(tensor.shape)
    assert tensor.kind == 3, tensor
    blocks = np.fromfile(path, np.uint8, count // 32 * 20, offset=tensor.offset).reshape(-1, 20)
    halves = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
    quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (halves[:, :1] * quants + halves[:, 1:]).reshape(tensor.shape)
