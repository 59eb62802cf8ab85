"""Counts this machine's NVIDIA devices without loading an accelerator library.

A device that is visible here may still be unusable for a backend's library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_GPU_BUILD = "onnxruntime-gpu"
_DEVICE = re.compile(r"nvidia\d+")


def count_gpus(environment: Mapping[str, str], device_directory: Path = Path("/dev")) -> int:
    """Return the number of devices that models may use. `CUDA_VISIBLE_DEVICES` restricts them, as in CUDA."""
    try:
        present = sum(_DEVICE.fullmatch(entry.name) is not None for entry in device_directory.iterdir())
    except OSError:
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    count = 0
    for word in visible.split(","):
        word = word.strip()
        # CUDA ignores all entries from the first that names no device
        if word.startswith(("GPU-", "MIG-")) or (word.isdigit() and int(word) < present):
            count += 1
        else:
            break
    return min(count, present)


def missing_gpu_warning(gpus: int, installed: Callable[[str], object] = distribution) -> str:
    """Return a warning when GPU libraries are installed but no GPU is visible; else ""."""
    if gpus:
        return ""
    try:
        installed(_GPU_BUILD)
    except PackageNotFoundError:
        return ""
    return (
        f"no GPU is visible here (/dev/nvidia0, CUDA_VISIBLE_DEVICES), though {_GPU_BUILD} is installed: models run on "
        "the CPU, and those that ask for a GPU are not loaded"
    )
