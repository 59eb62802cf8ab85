"""The levels of durability a receipt can state, as words. Reaching one is an adapter's affair. Pure.

memory          survives the death of processes, not of the log server's machine
fsync           is on the log server's disk
replicated:<n>  is with n replicas of the log server
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from charonia.errors import InvalidArgument

_REPLICATED = re.compile(r"replicated:([1-9][0-9]?)")


@dataclass(frozen=True, slots=True)
class Level:
    """One level; `text` is its spelling in options, requests and receipts. `replicas` is 0 but for replicated:<n>."""

    text: str
    replicas: int = 0


MEMORY = Level("memory")
FSYNC = Level("fsync")


def parse_level(text: str) -> Level:
    """The level a text names. Raises `InvalidArgument`."""
    if text == MEMORY.text:
        return MEMORY
    if text == FSYNC.text:
        return FSYNC
    replicated = _REPLICATED.fullmatch(text)
    if replicated is None:
        raise InvalidArgument(f"durability must be memory, fsync or replicated:<1..99>, got '{text}'")
    return Level(text, int(replicated[1]))
