"""The checks for GPUs, run on a processor: all of their code but what only a card has."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALWAYS = ("metrics", "onnxruntime")
NEEDS = {
    **dict.fromkeys(("saturation", "graphs", "batching", "compiled", "faults", "memory"), ("torch",)),
    "pipelines": ("torch", "jax", "xgboost"),
}
"""By check: the modules without which it is not run."""
NAMES = (*ALWAYS, *(name for name, modules in NEEDS.items() if all(map(importlib.util.find_spec, modules))))


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_on_a_processor(name: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    flags = ["--device", "cpu", "--limit-s", "300", "--only", name, "--json", str(found)]
    done = subprocess.run([sys.executable, ROOT / "tools" / "gpu_check.py", *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (outcome,) = json.loads(found.read_text())["checks"]
    assert (outcome["name"], outcome["verdict"] in ("pass", "not judged")) == (name, True), outcome
    assert outcome["figure"]
