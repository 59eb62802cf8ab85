"""Reads jobs for callers that may see them: views, expected ends, results, events and lists.

Changes nothing, but for the note that a caller was given an outcome (`JobDeliveries`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from charonia import failpoints, keys
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError, InvalidArgument, NotFound, Unsupported
from charonia.eventlog.port import EventLog, Statistics
from charonia.facts.jobs import (
    Ahead,
    JobEvent,
    JobPlace,
    JobRecord,
    JobState,
    ahead_of,
    parse_public_id,
    public_id,
)
from charonia.inference import InferenceResponse, wanted_outputs
from charonia.models.names import name_of
from charonia.wire import ResponseRecord
from gateway.requests.delivery import ANYONE, JOB_NOT_FOUND, Caller, JobFilter, JobPage, JobView
from gateway.requests.idempotency import key_digest
from gateway.webhooks.deliveries import Delivery, called, delivery_of

from .job_streams import JobDeliveries, JobStreams
from .job_views import Cursor, Outlook, job_view, matches, outcome_of, running_reason, visible, wait_reason
from .job_watches import JobWatches, OverdueJobs, overdue_in_s

MAX_LIMIT = 1000
_MAX_ID = 2048
_READ_AT_ONCE = 500
_ENDS = frozenset(state.value for state in JobState if state.terminal)
_FAILED_ENDS = _ENDS - {JobState.SUCCEEDED.value}
_MAX_EXAMINED = 5000
"""Max records that one page examines: a filter that matches few records gives short pages, never a long wait."""


class JobQueries:
    """Answers questions about jobs, for one gateway."""

    def __init__(
        self,
        log: EventLog,
        catalog: Catalog,
        watches: JobWatches,
        overdue: OverdueJobs,
        deliveries: JobDeliveries,
    ) -> None:
        self._log = log
        self._deliveries = deliveries
        self._catalog = catalog
        self._watches = watches
        self._overdue = overdue
        self._paces = Paces(log)
        self._streams = JobStreams(log, watches, deliveries)
        self._not_found = JOB_NOT_FOUND
        self._waits: set[asyncio.Timeout] = set()
        self._hurried = False

    def hurry(self) -> None:
        """From now on no caller waits here for a job to end; those that wait are answered now."""
        self._hurried = True
        for patience in self._waits:
            if not patience.expired():
                patience.reschedule(asyncio.get_running_loop().time())

    def begin_anew(self) -> None:
        """The log was replaced: older jobs are unknown, and the error for them names the reason."""
        self._not_found = f"{JOB_NOT_FOUND}: the log epoch changed"

    async def record(self, job_id: str, caller: Caller) -> JobRecord:
        """The record of a job. Raises the same `NotFound` if it is unknown or not visible to the caller."""
        model, key = _parsed(job_id)
        record = await self._log.job(model, key)
        if record is not None and visible(record, caller):
            record = await self._overdue.seen(record)
        if record is None or not visible(record, caller):
            raise NotFound(self._not_found)
        return record

    async def of_keys(self, model: str, keys: Sequence[str], caller: Caller) -> list[str]:
        """The ids of the jobs that these idempotency keys of the caller's stand for; keys of no job are left out."""
        digests = [key_digest(caller.tenant, model, key) for key in keys]
        found = await self._log.jobs_of_keys(model, digests)
        return [public_id(model, job_id) for job_id in found if job_id is not None]

    async def models(self) -> list[str]:
        """The models that have had jobs."""
        return await self._log.job_models()

    # -- one job ------------------------------------------------------------------------------------------------------

    async def view(self, job_id: str, caller: Caller = ANYONE) -> JobView:
        return await self.view_of(await self.record(job_id, caller))

    async def timeline(self, job_id: str, caller: Caller = ANYONE) -> tuple[JobView, tuple[JobEvent, ...]]:
        record = await self.record(job_id, caller)
        return await self.view_of(record), record.events

    async def view_of(self, record: JobRecord) -> JobView:
        now_us = wall_ns() // 1000
        if record.state.terminal:
            view = job_view(record, Outlook(), now_us)
            if not called(record):
                return view
            delivery = await delivery_of(self._log, record.model, record.id)
            return replace(view, webhook=(delivery or Delivery()).view())
        return job_view(record, await self._outlook(record, now_us), now_us)

    async def outlook_of(self, model: str, job_id: bytes, served: ServedVersion) -> Outlook:
        """The outlook of a job that was just accepted. Never fails, because the job is accepted."""
        try:
            place = await self._log.job_position(model, job_id)
        except CharoniaError:
            place = None
        if place is None:
            return Outlook()
        ahead = ahead_of(place, self._catalog.lane_weights)
        return Outlook(ahead.jobs + 1, place.active, await self._queued_eta_s(served, place, ahead))

    async def _queued_eta_s(self, served: ServedVersion | None, place: JobPlace, ahead: Ahead) -> float | None:
        if served is None or not served.slots or place.paused or not self._is_decided(place):
            return None
        pace = await self._paces.of(served)
        if pace is None:
            return None
        slots, before = sum(served.slots.values()), ahead.jobs + ahead.calls
        return queued_eta_s(pace, before, slots, served.interface.max_batch_size)

    async def _outlook(self, record: JobRecord, now_us: int) -> Outlook:
        model = record.model
        served = self._catalog.held(model).get(record.about.get("version", 0))
        place = await self._log.job_position(model, record.id)
        total = place.active if place is not None else 0
        if record.state is JobState.RUNNING:
            pace = await self._paces.of(served) if served is not None and served.slots else None
            batched_us = next((e.time_us for e in reversed(record.events) if e.kind == "batched"), now_us)
            eta_s = running_eta_s(pace, (now_us - batched_us) / 1e6) if pace is not None else None
            return Outlook(0, total, eta_s, running_reason(record))
        if place is None:
            return Outlook()  # it has ended since its record was read
        ahead = ahead_of(place, self._catalog.lane_weights)
        reason = wait_reason(served, record, ahead, paused=place.paused, decided=self._is_decided(place))
        return Outlook(ahead.jobs + 1, total, await self._queued_eta_s(served, place, ahead), reason)

    def _is_decided(self, place: JobPlace) -> bool:
        """Whether a running batcher owns the model."""
        return place.owner in self._catalog.processes

    async def result(
        self, job_id: str, caller: Caller = ANYONE, wait_s: float = 0.0
    ) -> tuple[JobView, list[InferenceResponse] | None]:
        record, view, responses = await self._result(job_id, caller, wait_s)
        if responses is not None:
            self._deliveries.given(record.model, record.id, record.retention_s)
        return view, responses

    async def single(
        self, job_id: str, caller: Caller = ANYONE, wait_s: float = 0.0
    ) -> tuple[JobView, InferenceResponse | None]:
        record, view, responses = await self._result(job_id, caller, wait_s)
        if responses is None:
            return view, None
        if len(responses) != 1:  # the caller gets no outcome: it is not noted as delivered
            raise Unsupported(f"the job has {len(responses)} responses: follow its events, or ask for it in a stream")
        self._deliveries.given(record.model, record.id, record.retention_s)
        if responses[0].error is not None:
            raise responses[0].error
        return view, responses[0]

    async def wait(self, job_id: str, caller: Caller, wait_s: float) -> None:
        await self._waited(job_id, caller, wait_s)

    async def _waited(self, job_id: str, caller: Caller, wait_s: float) -> JobRecord:
        """The record of a job once it has ended, or after `wait_s`."""
        record = await self.record(job_id, caller)
        if record.state.terminal or wait_s <= 0 or self._hurried:
            return record
        patience = asyncio.timeout(wait_s)
        try:
            async with patience:
                self._waits.add(patience)
                return await self._ended(record.model, record.id, caller)
        except TimeoutError:
            return await self.record(job_id, caller)
        finally:
            self._waits.discard(patience)

    async def _result(
        self, job_id: str, caller: Caller, wait_s: float
    ) -> tuple[JobRecord, JobView, list[InferenceResponse] | None]:
        """The record, view and responses of a job. Notes the delivery of the job's error, if it raises that."""
        record = await self._waited(job_id, caller, wait_s)
        outcome = await outcome_of(self._log, record)
        failpoints.hit("gateway.read")
        if outcome is None:
            return record, await self.view_of(record), None
        view = job_view(record, Outlook(), wall_ns() // 1000)
        if outcome.error is not None:
            self._deliveries.given(record.model, record.id, record.retention_s)
            raise outcome.error
        if not record.about.get("decoupled"):
            return record, view, [_response(record, outcome)]
        async with contextlib.aclosing(self._streams.responses(record, caller, -1, noted=False)) as responses:
            found = [_response(record, response) async for response in responses]
        return record, view, [response for response in found if not response.is_flag]

    async def responses(
        self, job_id: str, caller: Caller = ANYONE, after_index: int = -1
    ) -> AsyncGenerator[InferenceResponse]:
        """A job's responses above an index, as they come. Raises the job's error at the end, if it failed."""
        record = await self.record(job_id, caller)
        async with contextlib.aclosing(self._streams.responses(record, caller, after_index)) as responses:
            async for response in responses:
                yield _response(record, response)

    async def answers(self, model: str, job_id: bytes) -> AsyncGenerator[ResponseRecord]:
        """As `responses` from the first one, for a job of a call at this gateway."""
        record = await self._log.job(model, job_id)
        if record is None:
            raise NotFound(self._not_found)
        async with contextlib.aclosing(self._streams.responses(record, ANYONE, -1)) as responses:
            async for response in responses:
                yield response

    async def outcome(self, model: str, job_id: bytes) -> ResponseRecord:
        """The answer of a job, however long it takes. Raises as `job_views.outcome_of`."""
        while True:
            outcome = await outcome_of(self._log, await self._ended(model, job_id, ANYONE))
            if outcome is not None:
                return outcome

    async def _ended(self, model: str, job_id: bytes, caller: Caller) -> JobRecord:
        async with self._watches.watching(model, job_id, caller) as watch:
            seen = 0
            while True:
                seen = await watch.wait(seen)
                if watch.record is None:
                    raise NotFound(self._not_found)
                if watch.record.state.terminal:
                    return watch.record

    async def events(
        self, job_id: str, caller: Caller = ANYONE, after_number: int = 0, after_index: int = -1
    ) -> AsyncGenerator[JobEvent | InferenceResponse]:
        record = await self.record(job_id, caller)
        if not record.state.terminal:
            self._watches.check_capacity(caller)  # before the response begins
        return self._follow(record, caller, after_number, after_index)

    async def _follow(
        self, record: JobRecord, caller: Caller, after_number: int, after_index: int
    ) -> AsyncGenerator[JobEvent | InferenceResponse]:
        updates = self._streams.updates(record, caller, after_number, after_index)
        # of models with one response the events have none, but the error of a job that failed
        complete = _ENDS if record.about.get("decoupled") else _FAILED_ENDS
        async with contextlib.aclosing(updates):
            async for update in updates:
                if isinstance(update, JobEvent) and update.kind in complete:
                    self._deliveries.given(record.model, record.id, record.retention_s)
                yield update if isinstance(update, JobEvent) else _response(record, update)

    async def close(self) -> None:
        await self._streams.close()

    # -- many jobs ----------------------------------------------------------------------------------------------------

    async def active(self, model: str, which: JobFilter, caller: Caller) -> AsyncIterator[list[JobRecord]]:
        """The active jobs of a model that match, in pages, the oldest first."""
        after: tuple[int, bytes] | None = None
        while found := await self._log.jobs(model, ended=False, after=after, count=_READ_AT_ONCE):
            after = (found[-1].accepted_us, found[-1].id)
            yield [record for record in found if matches(record, which, caller)]

    async def _end_overdue(self, model: str, records: list[JobRecord]) -> set[bytes]:
        """End jobs past their deadline; returns their ids."""
        now_us = wall_ns() // 1000
        left_s = {record.id: overdue_in_s(record, now_us) for record in records}
        overdue = [record for record in records if (left := left_s[record.id]) is not None and left <= 0]
        if overdue:
            await self._overdue.end(model, overdue)
        return {record.id for record in overdue}

    async def page(self, which: JobFilter, caller: Caller = ANYONE, *, cursor: str = "", limit: int = 100) -> JobPage:
        """One page: the active jobs of all models by name, then the ended ones."""
        if not 1 <= limit <= MAX_LIMIT:
            raise InvalidArgument(f"limit must be between 1 and {MAX_LIMIT}")
        at: Cursor | None = Cursor.parse(cursor) if cursor else Cursor()
        models = [which.model] if which.model else sorted(await self._log.job_models())
        phases = [ended for ended in (False, True) if which.state is None or which.state.terminal == ended]
        now_us = wall_ns() // 1000
        views: list[JobView] = []
        examined = 0
        while (at := _existing(at, models, phases)) is not None:
            if len(views) >= limit or examined >= _MAX_EXAMINED:
                return JobPage(tuple(views), at.text())
            count = _READ_AT_ONCE if which.state is not None or which.tenant or caller.scoped else limit - len(views)
            found = await self._log.jobs(at.model, ended=at.ended, after=at.after, count=count)
            examined += len(found) + 1
            ended = set() if at.ended else await self._end_overdue(at.model, found)
            for record in found:
                at = Cursor(at.ended, at.model, record.ended_us if at.ended else record.accepted_us, record.id)
                if record.id not in ended and matches(record, which, caller):
                    views.append(job_view(record, Outlook(), now_us))
                    if len(views) >= limit:
                        break
            else:
                if not found:
                    at = _next(at, models, phases)
        return JobPage(tuple(views), "")


def _response(record: JobRecord, response: ResponseRecord) -> InferenceResponse:
    """The response as the job's own call would have got it."""
    return InferenceResponse(
        name_of(record.model),
        response.version,
        wanted_outputs(response.outputs, tuple(record.about.get("outputs", ()))),
        record.about.get("client_id", ""),
        response.parameters,
        response.error,
        response.final,
        response.place,
        response.bare,
    )


def _existing(at: Cursor | None, models: list[str], phases: list[bool]) -> Cursor | None:
    """The cursor, or the beginning of the next part that exists; None past the end."""
    if at is None:
        return None
    if at.ended in phases and at.model in models:
        return at
    return _next(at, models, phases)


def _next(at: Cursor, models: list[str], phases: list[bool]) -> Cursor | None:
    """The beginning of the part after a model's jobs; None past the end."""
    places = [(ended, model) for ended in phases for model in models]
    later = [place for place in places if place > (at.ended, at.model)]
    return Cursor(*later[0]) if later else None


def _parsed(job_id: str) -> tuple[str, bytes]:
    parsed = parse_public_id(job_id) if len(job_id) <= _MAX_ID else None
    if parsed is None:
        raise NotFound(JOB_NOT_FOUND)
    return parsed


_FRESH_NS = 1_000_000_000
_STALE_NS = 60_000_000_000
_BACKLOG_BATCHES = 2
_DURATION = re.compile(r"b(\d+)_(?:input|infer|output)_ns")
_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a model version: `batch_s` is the mean time of an execution, `row_s` that of a row in it.

    `rows_per_s` is the recent throughput over all instances; 0 if nothing was completed.
    """

    batch_s: float
    row_s: float
    rows_per_s: float = 0.0


def mean_pace(fields: Mapping[str, int], rows_per_s: float = 0.0) -> Pace | None:
    """The pace by a version's statistics (X3); None if nothing was executed."""
    spent_ns = sum(value for name, value in fields.items() if _DURATION.fullmatch(name))
    executions, rows = fields.get("execution_count", 0), fields.get("inference_count", 0)
    if executions <= 0 or rows <= 0:
        return None
    return Pace(spent_ns / executions / 1e9, spent_ns / rows / 1e9, rows_per_s)


def queued_eta_s(pace: Pace, before: int, slots: int, max_batch_size: int) -> float:
    """Expected seconds until a job with `before` requests ahead has ended; each is counted as one row."""
    slots = max(1, slots)
    of_capacity_s = pace.row_s * before / slots
    if pace.rows_per_s > 0 and before > _BACKLOG_BATCHES * max(1, max_batch_size) * slots:
        # under a backlog the measured throughput counts: it includes hand-over, other clients and stalls
        of_capacity_s = max(of_capacity_s, before / pace.rows_per_s)
    return of_capacity_s + pace.batch_s


def running_eta_s(pace: Pace, ran_s: float) -> float:
    """Expected seconds until a running job has ended."""
    return max(0.0, pace.batch_s - ran_s)


class Paces:
    """The pace of every version, by statistics at most a second old."""

    def __init__(self, log: Statistics) -> None:
        self._log = log
        self._known: dict[bytes, tuple[int, int, Pace | None]] = {}

    async def of(self, served: ServedVersion) -> Pace | None:
        """The pace of a version; None if it is unknown, or the log cannot be reached."""
        key = keys.statistics(served.model, served.version, served.content_hash)
        now_ns = monotonic_ns()
        known = self._known.get(key)
        if known is not None and now_ns - known[0] < _FRESH_NS:
            return known[2]
        try:
            fields = await self._log.statistics(key)
        except CharoniaError:
            return None
        rows = fields.get("inference_count", 0)
        rows_per_s = 0.0
        if known is not None and now_ns - known[0] < _STALE_NS:
            rows_per_s = max(0, rows - known[1]) * 1e9 / (now_ns - known[0])
        pace = mean_pace(fields, rows_per_s)
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[key] = (now_ns, rows, pace)
        return pace
