"""Who decides for a model: one batcher at a time, fenced by a token that only grows (design section 2)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from charonia.eventlog.port import EventLog
from charonia.models.catalog import Catalog


def preferred_owner(model: str, batchers: Iterable[str]) -> str:
    """The batcher that should own a model: highest random weight, so that a change of batchers moves few models.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998). "" without batchers.
    """
    return max(
        sorted(batchers),
        key=lambda name: hashlib.blake2b(f"{name}\0{model}".encode(), digest_size=8).digest(),
        default="",
    )


def live_batchers(catalog: Catalog) -> set[str]:
    """Incarnations that may own models: batchers, and executors that host one."""
    return {p.incarnation for p in catalog.processes.values() if p.role == "batcher"}


async def take(log: EventLog, catalog: Catalog, model: str, incarnation: str) -> int:
    """Own a model if nobody alive does: the new token, or 0 when somebody else owns it."""
    owner, _ = await log.owner(model)
    if owner and owner != incarnation and owner in live_batchers(catalog):
        return 0
    return await log.take_ownership(model, incarnation, owner)
