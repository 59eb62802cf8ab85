"""Counts this machine's NVIDIA devices without loading any accelerator library.

Using them is each backend's affair; a device that is visible here may still be unusable by a given library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_GPU_BUILD = "onnxruntime-gpu"
_DEVICE = re.compile(r"nvidia\d+")


def count_gpus(environment: Mapping[str, str], device_directory: Path = Path("/dev")) -> int:
    """Devices a model may name, numbered from 0. `CUDA_VISIBLE_DEVICES` narrows and renumbers them, as CUDA does."""
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
        # CUDA stops at the first entry that names no device
        if word.startswith(("GPU-", "MIG-")) or (word.isdigit() and int(word) < present):
            count += 1
        else:
            break
    return min(count, present)


def no_gpu(gpus: int, installed: Callable[[str], object] = distribution) -> str:
    """A sentence for whoever installed libraries for GPUs where there is none, "" where nobody did or one is."""
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
