"""Packs admitted requests into records; and records of one queue, or answers to one endpoint, into shared log entries.
Also reads the inputs of such a record, and picks the trace reports that leave without their answers.

An entry never mixes models, levels or terms. The log takes an entry as a whole or not at all, so an entry that exceeds
a bound is split.

Requests of an entry have ids of one group: 15 random bytes, then 0, 1, 2, ... (docs/adr/0007). Among the unsettled
requests of the log, ids that differ only in the last byte share one field. Only ids that never leave the server are
made like this; a job's id is all random, so that a client cannot derive another job's id from its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, LogUnavailable, ResourceExhausted, class_of_failure
from charonia.eventlog import port
from charonia.eventlog.port import Limits, Reply, Work
from charonia.inference import InferenceRequest
from charonia.tensors import Buffer, Tensor
from charonia.traces.reports import Report
from charonia.wire import (
    FLAG_TIMED,
    Lineage,
    Reference,
    RequestRecord,
    SequenceMark,
    pack_request,
    pack_response,
    record_fields,
    report_response,
    unpack_response,
)

from .admission import Admitted, sequence_mark
from .waiters import OpenRequest

_log = logging.getLogger(__name__)

MAX_IN_GROUP = 64
"""Max members of a group. The log's scripts settle a whole group of up to 64 members by one comparison (`SEQUENCE` in
`group_values.lua`), and would check the members of a larger one each by itself."""

_LAST_BYTES = [bytes((last,)) for last in range(MAX_IN_GROUP)]
_IDS_AT_ONCE = 256

Spawn = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What `Work.accept` needs to know of a caller's requests. `journalled` is about requests that are no jobs."""

    lane: int
    tenant: str
    limits: Limits
    journalled: bool
    durability: str


class Ids:
    """Unguessable 128-bit request ids, drawn from the system many at a time: one system call less per request."""

    def __init__(self) -> None:
        self._block = b""
        self._at = 0

    def next(self) -> bytes:
        if self._at >= len(self._block):
            self._block = os.urandom(16 * _IDS_AT_ONCE)
            self._at = 0
        at = self._at
        self._at = at + 16
        return self._block[at : at + 16]


class EntryIds:
    """Draws the ids of one queue's entries. `draw` returns 16 random bytes."""

    __slots__ = ("_draw", "_given", "_prefix")

    def __init__(self, draw: Callable[[], bytes]) -> None:
        self._draw = draw
        self._prefix = b""
        self._given = MAX_IN_GROUP

    def next(self, most: int) -> bytes:
        """An id for the next request of an entry of at most `most` requests."""
        given = self._given
        if given >= most or given >= MAX_IN_GROUP:
            self._prefix = self._draw()[:15]
            given = 0
        self._given = given + 1
        return self._prefix + _LAST_BYTES[given]

    def turn(self) -> None:
        """An entry has left: the next id begins a new group."""
        self._given = MAX_IN_GROUP


@dataclass(slots=True)
class AppendCounts:
    """Counts appended requests and entries: their quotient is the coalescing that the bench gates."""

    requests: int = 0
    entries: int = 0
    lanes: set[tuple[str, int, int]] = field(default_factory=set)
    """Model, level and lane of the queues that have taken a request: those are open."""


class EntryPacker:
    """Packs the requests of one queue that are accepted on the same terms, and has the log accept the entries.

    Requests that come in one tick of the loop leave together.
    """

    def __init__(
        self,
        log: Work,
        model: str,
        level: int,
        terms: Terms,
        spawn: Spawn,
        draw: Callable[[], bytes],
        *,
        max_requests: int,
        max_size_bytes: int,
        counts: AppendCounts | None = None,
    ) -> None:
        self._log = log
        self._model = model
        self._level = level
        self._terms = terms
        self.is_durable = terms.durability not in ("", "memory")
        self._spawn = spawn
        self._counts = counts or AppendCounts()
        self.open_requests = 0
        """Requests of this queue whose callers wait; submitters increment it."""
        self._ids = EntryIds(draw)
        self._waiting: list[OpenRequest] = []
        self._waiting_bytes = 0
        self._scheduled = False
        self._loop = asyncio.get_running_loop()
        self.max_requests = max_requests
        """Max requests of an entry."""
        self._max_size_bytes = max_size_bytes

    def next_id(self) -> bytes:
        """An id for a request that is submitted soon, of the same group as those that may share its entry."""
        return self._ids.next(self.max_requests)

    def submit(self, request: OpenRequest, min_interval_s: float = 0.0) -> None:
        """Add one request; it leaves with this tick. An interval is for packers that delay requests."""
        self._waiting.append(request)
        self._waiting_bytes += request.size_bytes
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def ended(self, _request: OpenRequest, /) -> None:
        """An open request has its answer, or its caller has left."""
        self.open_requests -= 1

    def _flush(self) -> None:
        self._scheduled = False
        for entry in self._take(self.max_requests):
            self._spawn(self._accept(entry))

    def _take(self, most: int) -> list[list[OpenRequest]]:
        """Takes the waiting requests that are still wanted, as entries of at most so many; marks them as sent."""
        waiting, self._waiting = self._waiting, []
        self._waiting_bytes = 0
        self._ids.turn()
        entries: list[list[OpenRequest]] = []
        entry: list[OpenRequest] = []
        size = 0
        for request in waiting:
            if request.withdrawn:
                continue
            if entry and (len(entry) >= most or size + request.size_bytes > self._max_size_bytes):
                entries.append(entry)
                entry, size = [], 0
            request.sent = True
            entry.append(request)
            size += request.size_bytes
        if entry:
            entries.append(entry)
        return entries

    async def _accept(self, entry: list[OpenRequest]) -> None:
        """Have the log accept an entry; if it does not, the requests fail with its error."""
        terms = self._terms
        while entry:
            fields = record_fields([request.record for request in entry])
            try:
                await self._log.accept(
                    self._model,
                    self._level,
                    terms.lane,
                    [(request.id, request.size_bytes) for request in entry],
                    fields,
                    terms.limits,
                    tenant=terms.tenant,
                    journalled=terms.journalled,
                    durability=terms.durability,
                )
            except Exception as error:
                entry = await self._refused(entry, error)
            else:
                self._accepted(entry)
                return

    def _accepted(self, entry: list[OpenRequest]) -> None:
        for request in entry:
            request.accepted = True
            request.record = b""
        self._counts.entries += 1
        self._counts.requests += len(entry)
        self._counts.lanes.add((self._model, self._level, self._terms.lane))

    async def _refused(self, entry: list[OpenRequest], error: Exception) -> list[OpenRequest]:
        """The log did not take an entry; returns the requests to try again."""
        if not isinstance(error, CharoniaError):
            error = class_of_failure(error)(f"request could not be written to the log: {error}")
        if isinstance(error, ResourceExhausted) and len(entry) > 1:
            half = len(entry) // 2
            await self._accept(entry[:half])
            return entry[half:]
        for request in entry:
            request.withdrawn = not isinstance(error, LogUnavailable)  # then it may be in the log
            request.failed(error)
        return []


def request_record(
    request_id: bytes,
    endpoint: bytes,
    request: InferenceRequest,
    admitted: Admitted,
    level: int,
    flags: int,
    reference: Reference | None = None,
    lineage: Lineage | None = None,
    *,
    tenant: str = "",
    sequence: SequenceMark | None = None,
    window: int = 0,
    join: Callable[[Sequence[Buffer]], Buffer] = b"".join,
) -> Buffer:
    """The record of an admitted request of a tenant, accepted now. With a `reference`, its tensor bytes are there.
    `sequence` overrides its own mark. A request of a sequence, or with a correlation id, always has a mark: models may
    ask for it (P9, S52). `join` is `pack_request`'s.
    """
    if sequence is None and (admitted.sequential or request.sequence_id):
        sequence = sequence_mark(request, request_id, tenant)
    if tenant and lineage is None and admitted.passes_on:
        lineage = Lineage(tenant=tenant)
    meta = admitted.meta
    if tenant:
        meta = meta.of_tenant(tenant)
    if meta.wants_receipt:
        flags |= FLAG_TIMED
    return pack_request(
        request_id,
        endpoint,
        request.id.encode() if request.id else b"",
        meta,
        [t.data for t in request.inputs],
        rows=admitted.rows,
        signature=admitted.signature,
        level=request.priority if admitted.keeps_priority else level,
        accepted_ns=wall_ns(),
        deadline_ns=request.deadline_ns,
        timeout_us=request.timeout_us,
        flags=flags,
        reference=reference,
        lineage=lineage,
        sequence=sequence,
        trace=request.trace.context if request.trace is not None else None,
        window=window,
        prompt=request.prompt,
        join=join,
    )


def replies_of(answers: Iterable[tuple[str, Buffer]]) -> list[Reply]:
    """(endpoint, record) pairs in their order, one entry per endpoint; pairs without an endpoint are left out."""
    by_endpoint: dict[str, list[Buffer]] = {}
    for endpoint, record in answers:
        if endpoint:
            by_endpoint.setdefault(endpoint, []).append(record)
    return [reply for endpoint, records in by_endpoint.items() for reply in replies_to(endpoint, records)]


def replies_to(endpoint: str, records: Sequence[Buffer]) -> list[Reply]:
    """The answers to one endpoint: in one entry, or in several where they exceed the size of a string."""
    stream = keys.replies(endpoint)
    if len(records) == 1 or sum(map(len, records)) <= port.MAX_RECORD_BYTES:
        return [Reply(stream, record_fields(records))]
    found: list[Reply] = []
    start = size = 0
    for at, record in enumerate(records):
        if size + len(record) > port.MAX_RECORD_BYTES and at > start:
            found.append(Reply(stream, record_fields(records[start:at])))
            start, size = at, 0
        size += len(record)
    return [*found, Reply(stream, record_fields(records[start:]))]


def reported_response(record: Buffer, report: Report) -> bytes:
    """`report_response`. A report with which the log would not take the response is added without tensors and calls."""
    found = report_response(record, report)
    if len(found) - max(0, len(record) - port.MAX_RECORD_BYTES) <= port.MAX_STRING_BYTES:
        return found
    _log.warning("the trace of a request of '%s' has no tensors and calls: they are too large", report.model)
    return report_response(record, replace(report, tensors=(), children=()))


def reports_to_gateways(answered: Iterable[tuple[RequestRecord, bytes]]) -> list[Reply]:
    """The reports in these answers (none by reference) whose requests are jobs without a waiting caller.

    A report travels with the answer if a caller waits for it; one of a job without a waiting caller goes separately to
    the gateway that traces it.
    """
    reports: list[tuple[str, Buffer]] = []
    for record, answer in answered:
        if record.trace is not None and record.trace.context.report_to and not record.endpoint:
            report = unpack_response(answer).report
            if report is not None:
                alone = report_response(pack_response(record.id, report.model, report.version, [], {}), report)
                reports.append((record.trace.context.report_to, alone))
    return replies_of(reports)


def inputs_of(record: RequestRecord) -> list[Tensor]:
    """The inputs of a request; none when its tensors lie out of band and were not fetched."""
    if record.reference is not None and len(record.data) != record.reference.size_bytes:
        return []
    return record.inputs()
