"""`charonia queue`: shows queues, pauses and resumes them, cancels requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia import keys
from charonia.calls.request_endings import Ending, cancel_requests
from charonia.eventlog.port import EventLog, Jobs, Notes, QueueLog, RequestLog
from charonia.facts.events import FIELD_FACT, QueueCommanded, pack_fact
from charonia.facts.jobs import JobState, public_id

from .queued import FIRST_PAGE, Queued, known_models, must_be_known, queued, queued_of_model

SCAN_REQUESTS = 100_000
"""Max requests of a lane that a listing reads; of longer lanes it shows a lower bound."""

_MOST_TENANTS = 1000
_CANCELLED = Ending(JobState.CANCELLED, "the request was cancelled by an operator", "operator")


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects requests to cancel: by id, or all, optionally only those above an age."""

    ids: frozenset[bytes] = frozenset()
    older_than_s: float = 0.0
    level: int | None = None

    def holds(self, request: Queued, now_ns: int) -> bool:
        if self.ids and request.record.id not in self.ids:
            return False
        if self.level is not None and request.level != self.level:
            return False
        return now_ns - request.record.accepted_ns >= self.older_than_s * 1e9


async def list_queues(
    log: EventLog, models: Sequence[str], now_ns: int, scan_requests: int = SCAN_REQUESTS, *, tenants: bool = True
) -> dict[str, Any]:
    """Models with their totals, and each lane with requests. Empty lanes are left out.

    A total is the log's exact count of single requests, and the requests of the waves that were read: a lower bound
    for a model with a lane that is longer than `scan_requests`, whose row says that it is not exact.
    Tenants are those of the requests that were read and of the first jobs, each with its total of the same kind;
    without `tenants` they are left out.
    """
    for model in models:
        await must_be_known(log, model)
    totals: list[dict[str, Any]] = []
    lanes: list[dict[str, Any]] = []
    for model in models or await known_models(log):
        requests, size_bytes = await log.pending(model)
        owner, _ = await log.owner(model)
        paused = await log.paused(model)
        about = {"paused": paused, "owner": owner}
        total: dict[str, Any] = {"model": model, "requests": requests, "bytes": size_bytes, **about}
        totals.append(total)
        waved = _Waved()
        for level, lane in sorted(await log.lanes(model)):
            row = await _lane(log, model, level, lane, now_ns, scan_requests, waved)
            if row["requests"]:
                lanes.append({"model": model, "level": level, "lane": lane, **row, **about})
        total["requests"] += waved.requests
        total["bytes"] += waved.size_bytes
        total["tenants"] = await _tenants(log, model, waved.of_tenants) if tenants else {}
    return {"models": totals, "queues": lanes}


@dataclass(slots=True)
class _Waved:
    """The requests in waves, which are in no count of the log; those of each tenant as [requests, bytes]. A tenant
    without any has zeros: it has single requests.
    """

    requests: int = 0
    size_bytes: int = 0
    of_tenants: dict[str, list[int]] = field(default_factory=dict)

    def add(self, request: Queued) -> None:
        tenant = request.record.meta.tenant
        counts = self.of_tenants.setdefault(tenant, [0, 0]) if tenant else [0, 0]
        if request.in_wave:
            size_bytes = len(request.record.record)
            self.requests += 1
            self.size_bytes += size_bytes
            counts[0] += 1
            counts[1] += size_bytes


async def _lane(
    log: QueueLog, model: str, level: int, lane: int, now_ns: int, most: int, waved: _Waved
) -> dict[str, Any]:
    """A lane; the requests in its waves are added to `waved`."""
    requests = size_bytes = begun = 0
    oldest_ns = now_ns
    exact = True
    async for page in queued(log, model, level, lane, first_page=min(most, FIRST_PAGE)):
        for request in page:
            requests += 1
            size_bytes += len(request.record.record)
            begun += request.attempt > 0
            waved.add(request)
            oldest_ns = min(oldest_ns, request.record.accepted_ns)
        if requests >= most:
            exact = False
            break
    age_s = (now_ns - oldest_ns) / 1e9
    return {"requests": requests, "bytes": size_bytes, "begun": begun, "oldest_age_s": age_s, "exact": exact}


async def _tenants(log: RequestLog, model: str, waved: Mapping[str, Sequence[int]]) -> dict[str, dict[str, int]]:
    """The log's exact counts of the tenants in `waved` and of the first jobs, and what they have in waves."""
    jobs = await log.jobs(model, ended=False, count=_MOST_TENANTS)
    names = sorted({*waved, *(job.tenant for job in jobs if job.tenant)})[:_MOST_TENANTS]
    counts = await log.pending_of_tenants(model, names) if names else []
    found: dict[str, dict[str, int]] = {}
    for name, (requests, size_bytes) in zip(names, counts, strict=True):
        in_waves = waved.get(name, (0, 0))
        found[name] = {"requests": requests + in_waves[0], "bytes": size_bytes + in_waves[1]}
    return found


async def inspect_queue(log: EventLog, model: str, now_ns: int, limit: int) -> dict[str, Any]:
    """The first `limit` unsettled requests, most urgent level first; running ones stay in the queue until settled."""
    await must_be_known(log, model)
    rows: list[dict[str, Any]] = []
    async for page in queued_of_model(log, model):
        for request in page[: limit - len(rows)]:
            rows.append(await _row(log, model, request, now_ns))
        if len(rows) >= limit:
            break
    requests, size_bytes = await log.pending(model)
    paused = await log.paused(model)
    return {
        "model": model,
        "requests": requests,
        "bytes": size_bytes,
        "paused": paused,
        "adaptive": await _adaptive(log, model),
        "queue": rows,
    }


async def _adaptive(log: Notes, model: str) -> dict[str, Any]:
    """The latest choices of adaptive batching, by version; empty if a model has no target or no owner."""
    (note,) = await log.notes([keys.adaptive_choices(model)])
    return dict(json.loads(note)) if note else {}


async def _row(log: Jobs, model: str, request: Queued, now_ns: int) -> dict[str, Any]:
    record = request.record
    job = await log.job(model, record.id) if record.is_job else None
    return {
        "id": record.id.hex(),
        "job": public_id(model, record.id) if record.is_job else None,
        "client_id": record.client_id,
        "tenant": job.tenant if job is not None else record.meta.tenant,
        "level": request.level,
        "lane": request.lane,
        "age_s": (now_ns - record.accepted_ns) / 1e9,
        "version": record.meta.version,
        "rows": record.rows,
        "bytes": len(record.record),
        "deadline_s": (record.deadline_ns - now_ns) / 1e9 if record.deadline_ns else None,
        "attempt": request.attempt,
        "entry": request.entry_id.decode(),
        "in_wave": request.in_wave,
    }


async def pause(log: EventLog, model: str, paused: bool) -> dict[str, Any]:
    """Pause or resume a queue: recorded in the log, and reported to the owner. Running requests are not stopped."""
    await must_be_known(log, model)
    before = await log.paused(model)
    await log.set_paused(model, paused)
    fact = QueueCommanded("pause" if paused else "resume")
    await log.append(keys.facts(model), [FIELD_FACT, pack_fact(fact)])
    owner, _ = await log.owner(model)
    return {"model": model, "paused": paused, "was_paused": before, "owner": owner}


async def cancel_queued(log: RequestLog, model: str, selection: Selection, now_ns: int) -> dict[str, Any]:
    """Cancel the selected unsettled requests, running ones included."""
    await must_be_known(log, model)
    cancelled: list[bytes] = []
    found: set[bytes] = set()
    async for page in queued_of_model(log, model):
        records = [request.record for request in page if selection.holds(request, now_ns)]
        found.update(record.id for record in records)
        cancelled += await cancel_requests(log, model, records, _CANCELLED)
    missing = sorted(request_id.hex() for request_id in selection.ids - found)
    return {
        "model": model,
        "cancelled": [request_id.hex() for request_id in cancelled],
        "ended_meanwhile": len(found) - len(cancelled),
        "missing": missing,
    }
