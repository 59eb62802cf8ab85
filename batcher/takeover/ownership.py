"""Acquires ownership of a model: one batcher at a time, fenced by a token that only grows."""

from __future__ import annotations

from charonia.catalog.catalog import Catalog
from charonia.eventlog.membership import preferred_owner
from charonia.eventlog.port import Leases, Work

__all__ = ["is_waited_for", "live_batchers", "preferred_owner", "take"]


def live_batchers(catalog: Catalog) -> set[str]:
    """Incarnations that may own models: batchers, and executors that host one."""
    return {p.incarnation for p in catalog.processes.values() if p.role == "batcher"}


async def is_waited_for(log: Work, model: str) -> bool:
    """Whether the log has unsettled requests of a model. Waves are in its queues and in no count of the log."""
    return await log.pending(model) != (0, 0) or await log.waves.queue_entries(model) > 0


async def take(log: Leases, catalog: Catalog, model: str, incarnation: str) -> int:
    """Own a model if no live batcher does: the new token, or 0 when another one owns it."""
    while True:
        owner, _ = await log.owner(model)
        if owner and owner != incarnation and owner in live_batchers(catalog):
            return 0
        # another batcher was faster; it may have left since, and then no other would check
        if token := await log.take_ownership(model, incarnation, owner):
            return token
