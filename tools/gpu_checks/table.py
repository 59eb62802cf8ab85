"""The nine checks: what each must reach, and how long it may take. Together they have less than ten minutes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from .outcome import Outcome


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its function is loaded in the process that runs it."""

    name: str
    limit_s: int
    goal: str
    function: str

    def load(self) -> Callable[[str], Outcome]:
        """The function, which gets the device: `cuda` or `cpu`."""
        module, _, name = self.function.partition(":")
        found: Callable[[str], Outcome] = getattr(importlib.import_module(f"gpu_checks.{module}"), name)
        return found


CHECKS = {
    check.name: check
    for check in (
        Check("metrics", 40, "nv_gpu_* = nvidia-smi ±5 %, CUDA regions", "machine:metrics"),
        Check("saturation", 120, "served ≥ 0.95 of the bare module", "torch_speed:saturation"),
        Check("graphs", 60, "p50 of batch 1 ≤ bare + 0.3 ms", "torch_speed:graphs"),
        Check("batching", 60, "8 in flight ≥ 3.7x, 2 instances ≥ 1.5x", "torch_speed:batching"),
        Check("compiled", 75, "AOTI equals eager ≤ 1e-3, bad input refused", "torch_speed:compiled"),
        Check("faults", 60, "0 lost, back ≤ 5 s, other model unharmed", "faults:faults"),
        Check("memory", 40, "after unload within 100 MiB of before", "machine:memory"),
        Check("onnxruntime", 100, "served ≥ 0.95 of the bare session", "onnx_speed:onnxruntime"),
        Check("pipelines", 40, "JAX and torch → trees: equal answers", "pipelines:pipelines"),
    )
}
