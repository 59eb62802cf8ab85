"""How `tests/vllm` has its engines: small, in float32, on CPUs."""

from __future__ import annotations

ENGINE = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
}
LORAS = {"one": "lora_one", "two": "lora_two"}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""GiB."""
START_S = 400.0
