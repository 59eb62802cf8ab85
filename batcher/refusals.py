"""Answers requests that will not run: queue full, timed out, cancelled, no longer served (S7, S21, S24, R27)."""

from __future__ import annotations

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import EventLog, Reply
from charonia.tensors import Buffer
from charonia.wire import pack_failure, record_fields

from .carriers import carrier_of
from .scheduling.decisions import RejectRequest


async def refuse(log: EventLog, model: str, refused: list[RejectRequest]) -> None:
    """Settle and answer them, and count what was won. Raises what the log raises; then all may be tried again."""
    by_endpoint: dict[str, list[Buffer]] = {}
    for decision in refused:
        record = carrier_of(decision.request).record
        # E10; a cancellation has a code and no text (G26)
        prefix = f"[request id: {record.client_id or '<id_unknown>'}] " if decision.message else ""
        error = CharoniaError.of(decision.code, prefix + decision.message)
        answers = by_endpoint.setdefault(record.endpoint, [])
        answers.append(pack_failure(record.id, model, record.meta.version, error))
    replies = [Reply(keys.replies(endpoint), record_fields(answers)) for endpoint, answers in by_endpoint.items()]
    requests = [(d.request.id, max(1, d.request.attempt, carrier_of(d.request).begun)) for d in refused]
    counts = _counts(model, refused)
    # one version's counters go with the settlement; the rare rest is added for what was really won
    joined = next(iter(counts.items())) if len(counts) == 1 else None
    won = await log.settle(model, requests, joined, replies)
    if joined is None or not all(won):
        mine = [decision for decision, is_won in zip(refused, won, strict=True) if is_won]
        for key, increments in _counts(model, mine).items():
            await log.add_statistics(key, increments)


def _counts(model: str, refused: list[RejectRequest]) -> dict[bytes, dict[str, int]]:
    """Failure counters by statistics key (X4)."""
    now_ns = wall_ns()
    counts: dict[bytes, dict[str, int]] = {}
    for decision in refused:
        record = carrier_of(decision.request).record
        of_key = counts.setdefault(keys.statistics(model, record.meta.version, record.meta.content_hash), {})
        waited_ns = max(0, now_ns - record.accepted_ns)
        for name, amount in (("fail_count", 1), ("fail_ns", waited_ns), (f"fail_{decision.reason}", 1)):
            of_key[name] = of_key.get(name, 0) + amount
    return counts
