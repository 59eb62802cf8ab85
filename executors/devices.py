"""Counts this machine's NVIDIA devices without loading any accelerator library.

Using them is each backend's affair; a device that is visible here may still be unusable by a given library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

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
