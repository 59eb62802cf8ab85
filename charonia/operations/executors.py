"""`charonia executors ls`: executors, their state, and their batches."""

from __future__ import annotations

from typing import Any

from charonia import keys
from charonia.catalog.catalog import READY, ExecutorView
from charonia.eventlog.control import folded_control
from charonia.eventlog.port import START, ControlLog, Streams
from charonia.wire import FIELD_HEADER

_PAGE = 500


async def list_executors(log: ControlLog, *, outstanding: bool = True) -> dict[str, Any]:
    """One row an executor, oldest first. Without `outstanding` their batches are not counted, which reads them all."""
    catalog = await folded_control(log)
    views = list(catalog.executors.values())
    beats = await log.last_beat_ms("executor", [view.joined.incarnation for view in views])
    rows = [await _row(log, view, age_ms, outstanding) for view, age_ms in zip(views, beats, strict=True)]
    return {"executors": rows}


async def _row(log: Streams, view: ExecutorView, beat_ms: int, outstanding: bool) -> dict[str, Any]:
    described = view.described
    labels = dict(described.labels) if described is not None else {}
    ready = [entry for _, _, entry in view.versions if entry.state == READY]
    held = [entry for entry in ready if not entry.on_demand]
    announced = sum(entry.on_demand for entry in ready)
    budget_bytes = described.budget_bytes if described is not None else 0
    joined = view.joined
    return {
        "executor": joined.incarnation,
        "state": _state(view, beat_ms),
        "pool": joined.pool,
        "host": joined.host,
        "pid": joined.pid,
        "devices": labels.pop("device", None),
        "labels": labels,
        "loaded": len(held),
        "announced": announced,
        "slots": sum(entry.loaded.slots for entry in held if entry.loaded is not None),
        # batches of an executor with a batcher in its process are not in the log
        "outstanding": await _outstanding(log, joined.incarnation)
        if outstanding and not joined.hosts_batcher
        else None,
        "used_bytes": described.used_bytes if described is not None and budget_bytes else None,
        "budget_bytes": budget_bytes or None,
        "most_models": (described.most_models or None) if described is not None else None,
        "excluded": dict(view.excluded),
        "heartbeat_age_s": beat_ms / 1000 if beat_ms >= 0 else None,
    }


def _state(view: ExecutorView, beat_ms: int) -> str:
    if view.lost or beat_ms < 0:
        return "lost"
    if view.draining:
        return "draining"
    return "ready" if view.scan is not None and view.scan.ready else "starting"


async def _outstanding(log: Streams, executor: str) -> int:
    """The number of batches that it has not settled."""
    count, after = 0, START
    while entries := await log.range(keys.batches(executor), after, _PAGE):
        after = entries[-1].id
        count += sum(bool(entry.fields) and bytes(entry.fields[0]) == FIELD_HEADER for entry in entries)
    return count
