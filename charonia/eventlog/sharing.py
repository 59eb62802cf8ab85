"""How equal processes share models among themselves without asking anybody."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def preferred_owner(model: str, members: Iterable[str]) -> str:
    """The member that should have a model: highest random weight, so that a change of members moves few models.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998). "" without members.
    """
    return max(
        sorted(members),
        key=lambda name: hashlib.blake2b(f"{name}\0{model}".encode(), digest_size=8).digest(),
        default="",
    )
