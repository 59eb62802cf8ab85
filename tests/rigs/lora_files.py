"""Writes LoRA adapters with random weights, as PEFT does, for models with these sizes: those of SmolLM2-135M."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LAYERS = 30
SHAPES = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (576, 192),
    "self_attn.v_proj": (576, 192),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (576, 1536),
    "mlp.up_proj": (576, 1536),
    "mlp.down_proj": (1536, 576),
}
"""(inputs, outputs) of each product of a layer."""


def write_adapter(
    directory: Path,
    seed: int,
    *,
    rank: int = 8,
    deviation: float = 0.05,
    modules: Sequence[str] = tuple(SHAPES),
    layers: int = LAYERS,
    **settings: Any,
) -> Path:
    """An adapter whose weights are drawn with `seed`; `settings` are of its configuration."""
    drawn = np.random.default_rng(seed)
    weights = {
        f"base_model.model.model.layers.{layer}.{module}.{half}.weight": drawn.normal(0, deviation, shape)
        for layer in range(layers)
        for module in modules
        for half, shape in (("lora_A", (rank, SHAPES[module][0])), ("lora_B", (SHAPES[module][1], rank)))
    }
    return write_weights(directory, weights, r=rank, **settings)


def write_weights(directory: Path, weights: Mapping[str, Any], dtype: str = "F32", **settings: Any) -> Path:
    """An adapter of these matrices. `dtype` is a word of safetensors: one of those in `_bytes`, or BF16."""
    directory.mkdir(parents=True, exist_ok=True)
    usual = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "task_type": "CAUSAL_LM"}
    (directory / "adapter_config.json").write_text(json.dumps(usual | settings))
    table, body = {}, b""
    for name, matrix in weights.items():
        data = _bytes(np.asarray(matrix, np.float32), dtype)
        table[name] = {
            "dtype": dtype,
            "shape": list(np.shape(matrix)),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    header = json.dumps({"__metadata__": {"format": "pt"}} | table).encode()
    content = struct.pack("<Q", len(header)) + header + body
    (directory / "adapter_model.safetensors").write_bytes(content)
    return directory


def _bytes(matrix: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> bytes:
    if dtype == "BF16":
        return (matrix.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return matrix.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()
