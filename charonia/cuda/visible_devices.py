"""Has a process see one NVIDIA device alone; `executors/host/devices.py` counts those that a server may use."""

from __future__ import annotations

import os

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_seen_at_start = os.environ.get(_VARIABLE, "")


def see_one_device(number: int) -> None:
    """Let the libraries of this process, which is one device's alone, find only the device `number` of the server.

    There its number is 0. CUDA reads the variable when it is first used in a process, so call this before.
    """
    # what the server was started with, not what an earlier call left: that is one device, whatever its number was
    seen = [one.strip() for one in _seen_at_start.split(",") if one.strip()]
    os.environ[_VARIABLE] = seen[number] if number < len(seen) else str(number)
