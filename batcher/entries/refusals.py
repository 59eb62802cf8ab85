"""Settles and answers requests that will not run (again): queue full, timed out, cancelled, no longer served, past
their deadline (S7, S21, S24, R27), and poison requests, which become dead letters (P19).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import msgpack

from batcher.scheduling.decisions import CondemnRequest, RejectRequest
from batcher.scheduling.observations import RequestQueued
from charonia import keys
from charonia.calls.entry_packer import replies_of
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, ErrorCode
from charonia.eventlog.port import Jobs, Reply, SettlementLog
from charonia.facts import counters
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobState
from charonia.tasks import insist
from charonia.tensors import Buffer
from charonia.wire import FIELD_ABOUT, FIELD_RECORD, RequestRecord, pack_failure

from .carriers import RETRY_S, carried_of

Refused = RejectRequest | CondemnRequest

_STATES = {ErrorCode.CANCELLED: JobState.CANCELLED, ErrorCode.DEADLINE_EXCEEDED: JobState.EXPIRED}


class Refusals:
    """The refusals of one model. `gone` are endpoints that get no answers; `settled` is called with the refused
    requests.
    """

    def __init__(
        self, log: SettlementLog, model: str, gone: Container[str], settled: Callable[[Sequence[RequestQueued]], None]
    ) -> None:
        self._log = log
        self._model = model
        self._gone = gone
        self._settled = settled
        self._held: frozenset[int] = frozenset()
        self.unawaited: dict[tuple[int, str], int] = {}
        """Refused requests that no gateway counts, by version and reason (M1)."""

    def follow(self, held: Iterable[int]) -> None:
        """Keep the counts of the versions that were held and still are: one that is loaded again begins at 0, as in
        Triton.
        """
        before, self._held = self._held, frozenset(held)
        for key in [key for key in self.unawaited if key[0] not in before & self._held]:
            del self.unawaited[key]

    async def settle(self, refused: Sequence[Refused]) -> None:
        """Repeat until the log has them."""
        waves = [decision for decision in refused if decision.request.wave]
        plain = [decision for decision in refused if not decision.request.wave]

        async def record() -> None:
            await self._drop(waves)
            if plain:
                self._count(await refuse(self._log, self._model, plain, self._gone))

        complaint = f"{len(refused)} refusals could not be recorded"
        await insist(record, complaint, first_s=RETRY_S, last_s=RETRY_S)
        self._settled([decision.request for decision in refused])

    def _count(self, refused: Sequence[Refused]) -> None:
        for decision in refused:
            record = carried_of(decision.request).record
            if not keys.counts_its_requests(record.endpoint):
                key = (record.meta.version, _reason(decision))
                self.unawaited[key] = self.unawaited.get(key, 0) + 1

    async def _drop(self, waves: list[Refused]) -> None:
        """Settle waves whose gateway has left, so that no caller waits for an answer."""
        while waves:
            carrier = carried_of(waves[-1].request)
            await self._log.delete_entries(carrier.entry.stream, [carrier.entry.entry_id])
            for key, increments in _counts(self._model, waves[-1:]).items():
                await self._log.add_statistics(key, increments)
            waves.pop()


async def refuse(
    log: SettlementLog, model: str, refused: Sequence[Refused], gone: Container[str] = ()
) -> list[Refused]:
    """Settle and answer them; count and return those that this settlement won. Raises what the log raises; then all may
    be tried again. A job is answered after it is settled, and only by the winner; other requests in the same write.
    Endpoints in `gone` are not answered.
    """
    replies: list[tuple[str, bytes]] = []
    ends: dict[bytes, JobEnd] = {}
    job_replies: list[tuple[str, bytes]] = []
    outcomes = b""
    letters: list[Reply] = []
    for decision in refused:
        record = carried_of(decision.request).record
        error = _error(decision, record)
        state = _STATES.get(error.code, JobState.FAILED)
        answer = pack_failure(record.id, model, record.meta.version, error)
        outcomes += OUTCOME_CODES[state] if record.journalled else b"-"
        if record.is_job:
            ends[record.id] = JobEnd(state, answer, _detail(decision, error))
        if record.endpoint and record.endpoint not in gone:
            (job_replies if record.is_job else replies).append((record.endpoint, answer))
        if isinstance(decision, CondemnRequest):
            letters.append(Reply(keys.dead_letters(model), await _dead_letter(log, model, decision, error)))
    requests = [(d.request.id, _attempt(d)) for d in refused]
    counts = _counts(model, refused)
    # one version's counters go with the settlement; the rare others are added for the requests that it won
    joined = next(iter(counts.items())) if len(counts) == 1 else None
    won = await log.settle(
        model,
        requests,
        joined,
        replies_of(replies),
        letters,
        ends=ends or None,
        outcomes=outcomes if outcomes.strip(b"-") else b"",
    )
    mine = [decision for decision, is_won in zip(refused, won, strict=True) if is_won]
    if joined is None or not all(won):
        for key, increments in _counts(model, mine).items():
            await log.add_statistics(key, increments)
    if job_replies:
        ours = {ends[d.request.id].result for d in mine if d.request.id in ends}
        for reply in replies_of((endpoint, answer) for endpoint, answer in job_replies if answer in ours):
            await log.append(reply.stream, reply.fields)
    return mine


def _error(decision: Refused, record: RequestRecord) -> CharoniaError:
    """The error as the client reads it."""
    if isinstance(decision, CondemnRequest):
        return CharoniaError.of(ErrorCode.INTERNAL, decision.message)
    # E10, of the scheduler's errors; a cancellation has a code and no text (G26)
    told = decision.message and not decision.bare and decision.reason != "BACKEND"
    prefix = f"[request id: {record.client_id or '<id_unknown>'}] " if told else ""
    return CharoniaError.of(decision.code, prefix + decision.message)


def _attempt(decision: Refused) -> int:
    return max(1, decision.request.attempt, carried_of(decision.request).begun)


def _detail(decision: Refused, error: CharoniaError) -> dict[str, object]:
    detail: dict[str, object] = {"error": error.message} if error.message else {}
    if isinstance(decision, CondemnRequest):
        detail |= {"executor": decision.executor, "dead_letter": True}
    return detail


async def _dead_letter(log: Jobs, model: str, decision: CondemnRequest, error: CharoniaError) -> list[Buffer]:
    """The entry of `dlq:{m}`: the request record with its inputs, and `m`, a msgpack map of its attempts and end."""
    record = carried_of(decision.request).record
    job = await log.job(model, record.id) if record.is_job else None
    about = {
        "id": record.id.hex(),
        "model": model,
        "version": record.meta.version,
        "content_hash": record.meta.content_hash,
        "attempts": _attempt(decision),
        "error": error.message,
        "stderr": decision.stderr,
        "time_us": wall_ns() // 1000,
        "tenant": job.tenant if job is not None else "",
        "job": record.is_job,
        "executor": decision.executor,
    }
    return [FIELD_RECORD, record.record, FIELD_ABOUT, bytes(msgpack.packb(about))]


def _reason(decision: Refused) -> str:
    return decision.reason if isinstance(decision, RejectRequest) else "BACKEND"


def _counts(model: str, refused: Sequence[Refused]) -> dict[bytes, dict[str, int]]:
    """Failure counters by statistics key (X4)."""
    now_ns = wall_ns()
    counts: dict[bytes, dict[str, int]] = {}
    for decision in refused:
        record = carried_of(decision.request).record
        of_key = counts.setdefault(keys.statistics(model, record.meta.version, record.meta.content_hash), {})
        waited_ns = max(0, now_ns - record.accepted_ns)
        count, reason = decision.request.count, _reason(decision)
        counters.add(of_key, counters.of_failures(count, count * waited_ns, reason))
    return counts
