"""Restricts a process to one NVIDIA device. `executors/host/devices.py` counts the devices that a server may use."""

from __future__ import annotations

import itertools
import os

from charonia.errors import Unsupported

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_seen_at_start = os.environ.get(_VARIABLE)


def see_one_device(number: int) -> None:
    """Let the libraries of this process, which is one device's alone, find only the device `number` of the server.

    There its number is 0. CUDA reads the variable when it is first used in a process, so call this before. Raises
    `Unsupported` for a number that the server's own variable does not have: the operator excluded that device.
    """
    # what the server was started with, not what an earlier call left: that is one device, whatever its number was
    if _seen_at_start is None:
        os.environ[_VARIABLE] = str(number)
        return
    seen = _listed(_seen_at_start)
    if number >= len(seen):
        raise Unsupported(
            f"GPU {number} was asked for, but {_VARIABLE} of the server is '{_seen_at_start}', which lists "
            f"{len(seen)}: name one of these by its place in the list, from 0, or start the server with more"
        )
    os.environ[_VARIABLE] = seen[number]


def _listed(value: str) -> list[str]:
    """The devices of a variable, up to the first word that names none: CUDA ignores what comes after it."""
    words = [word.strip() for word in value.split(",")]
    return list(itertools.takewhile(lambda word: word.startswith(("GPU-", "MIG-")) or word.isdigit(), words))
