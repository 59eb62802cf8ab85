"""Jobs: requests that outlive the call that made them (ADR 0004).

Accepts jobs, answers calls that wait for theirs, cancels, and tells the log how long a model's ended jobs are kept
(`Retentions`). The log's scripts keep records and decide all races.
`job_queries` answers questions about jobs, `job_watches` waits for them; replies to this gateway come to the requester.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from charonia import failpoints
from charonia.calls.entry_packer import Terms, request_record
from charonia.calls.request_endings import BY_CALLER, Ending, answer_gateways, count_failures, end_jobs, version_of
from charonia.calls.waiters import Waiter
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import wall_ns
from charonia.errors import (
    CANCELLED,
    OUTCOME_UNKNOWN,
    Cancelled,
    CharoniaError,
    DeadlineExceeded,
    LogUnavailable,
    NotFound,
    Unsupported,
    class_of_failure,
    shed,
)
from charonia.eventlog.port import EventLog, JobLog
from charonia.facts.jobs import JobRecord, JobState, JobTicket, NewJob, public_id
from charonia.inference import InferenceRequest
from charonia.models.interface import ModelInterface
from charonia.options.settings import GatewaySettings
from charonia.tasks import Tasks
from charonia.tensors import Buffer, joined
from charonia.wire import FLAG_JOB, FLAG_JOURNALLED, ResponseRecord, pack_failure, record_fields
from gateway.access.terms import JOURNAL_ALL, JOURNAL_OFF, TermsBook
from gateway.dataplane import AdmittedRequest, DataPlane
from gateway.metrics import JobCounts
from gateway.requests.delivery import ANYONE, Caller, JobFilter, JobReceipt, JobView
from gateway.requests.idempotency import check_key, key_digest, request_digest
from gateway.tracing.trace import Trace
from gateway.tracing.tracer import Tracer
from gateway.webhooks.addresses import Allowed, check_url

from .job_queries import JobQueries
from .job_streams import JobDeliveries
from .job_views import about_of, outcome_of
from .job_watches import JobWatches, OverdueJobs

_log = logging.getLogger(__name__)

BY_DISCONNECT = Ending(JobState.CANCELLED, CANCELLED, "disconnect")

_CANCEL_AT_ONCE = 200
_AT_ONCE_BYTES = 1 << 20
"""Digesting this much takes 2 ms, packing it one."""
_ENTER_WITHIN_S = 10.0
"""Twice the time limit for reaching a durability level."""
PARAMETER_SECONDS = "charonia.job_retention_s"
PARAMETER_BYTES = "charonia.job_retention_bytes"


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A job ready to be accepted."""

    new: NewJob
    record: Buffer
    level: int
    terms: Terms


class Jobs:
    """The jobs of one gateway."""

    def __init__(
        self,
        log: EventLog,
        catalog: Catalog,
        dataplane: DataPlane,
        settings: GatewaySettings,
        terms: TermsBook,
        tracer: Tracer | None = None,
    ) -> None:
        self._log = log
        self._catalog = catalog
        self._dataplane = dataplane
        self._requester = dataplane.requester
        self._requester.answer_job = self._answer_from_record
        self._endpoint = settings.incarnation.encode()
        self._terms = terms
        self._tracer = tracer
        self._webhooks = settings.allow_webhooks
        self._reachable = Allowed.parse(settings.webhook_allow)
        self._journalled = settings.journal != JOURNAL_OFF
        self._journals_all = settings.journal == JOURNAL_ALL
        self._flags = FLAG_JOB | (FLAG_JOURNALLED if self._journalled else 0)
        self._retentions = Retentions(log, settings)
        self._overdue = OverdueJobs(log, catalog)
        self._watches = JobWatches(log, self._overdue, journal=self._journalled)
        self._deliveries = JobDeliveries(log, settings.incarnation)
        self.queries = JobQueries(log, catalog, self._watches, self._overdue, self._deliveries)
        self._tasks = Tasks()
        self.counts = JobCounts()

    def start(self) -> None:
        """Start to end overdue jobs; if all requests are journalled, set the journal's retention for all models."""
        self._tasks.spawn(self._overdue.keep_checking(), "overdue jobs")
        if self._journals_all:
            self._catalog.listeners.append(self._served_changed)
            for model in self._catalog.served_models():
                self._served_changed(model)

    async def close(self) -> None:
        await self._tasks.close()
        await self.queries.close()
        await self._watches.close()
        await self._deliveries.close()

    def begin_drain(self) -> None:
        """Callers that wait for a job to end get its state, and can ask another gateway."""
        self.queries.hurry()

    def begin_anew(self) -> None:
        """The log was replaced by another one."""
        self._retentions.forget()
        self.queries.begin_anew()

    def _served_changed(self, model: str) -> None:
        served = self._catalog.served(model)
        if served:
            self._dataplane.spawn(self._set_retention(served[max(served)]))

    async def _set_retention(self, served: ServedVersion) -> None:
        with contextlib.suppress(CharoniaError):  # retried at the next change, or with the first job
            await self._retentions.set(served.model, served.interface)

    # -- accepting ----------------------------------------------------------------------------------------------------

    async def submit(self, one: AdmittedRequest) -> JobReceipt:
        """Record a job that no caller waits for; a known key returns the earlier job."""
        served = one.served
        job = await self._prepare(one, b"")
        ticket = await self._unawaited(one.request, job, self._accept(served.model, job))
        accepted_us = job.new.accepted_us
        if not ticket.created:
            known = await self._log.job(served.model, ticket.id)
            accepted_us = known.accepted_us if known is not None else 0
        outlook = await self.queries.outlook_of(served.model, ticket.id, served)
        return JobReceipt(
            public_id(served.model, ticket.id),
            served.model,
            ticket.created,
            accepted_us,
            ticket.durability,
            outlook.position,
            outlook.total,
            outlook.eta_s,
        )

    async def infer(self, one: AdmittedRequest) -> ResponseRecord:
        """Record a job and wait for its answer, or for that of the job that its key stands for.

        The job stays when its client leaves, unless `on_disconnect` is cancel.
        """
        request, served = one.request, one.served
        job = await self._prepare(one, self._endpoint)
        waiter = Waiter(served.model, job.new.id, is_job=True)
        self._requester.add(waiter, len(job.record))
        waiter.sent = True
        # the caller waits for one future only, so that its deadline holds even while the log is slow
        entering = asyncio.get_running_loop().create_task(self._enter(waiter, job))
        if request.deadline_ns:
            waiter.timer = self._dataplane.deadlines.arm(waiter, request.deadline_ns, served)
        leaving = False
        try:
            answer = await waiter.future
            if not waiter.follows:
                self._deliveries.given(served.model, job.new.id, job.new.retention_s)
            return answer
        except asyncio.CancelledError:
            leaving = not waiter.follows and one.options.on_disconnect == "cancel"
            if leaving:
                self._dataplane.spawn(self._abandon(served.model, job.new.id, entering))
            raise
        except CharoniaError as error:
            self._failed(waiter, job, error)
            raise shed(error) from None
        finally:
            if not leaving:
                entering.cancel()
            self._requester.end(waiter)

    async def stream(self, one: AdmittedRequest) -> AsyncGenerator[ResponseRecord]:
        """Record a job and yield its responses as they come, or those of the job that its key stands for.

        They are read from the job's record, so that a client that reconnects, to any gateway, reads the same.
        """
        request, served = one.request, one.served
        job = await self._prepare(one, b"")
        model, complete = served.model, False
        # settles the job at its deadline: the follower then reads that it has expired
        waiter = Waiter(model, job.new.id, is_job=True)
        waiter.sent = True
        if request.deadline_ns:
            waiter.timer = self._dataplane.deadlines.arm(waiter, request.deadline_ns, served)
        recording = self._unawaited(request, job, self._accept(model, job))
        accepting = asyncio.get_running_loop().create_task(recording)
        try:
            await asyncio.wait((accepting, waiter.future), return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                waiter.future.result()  # its deadline passed while the log was slow
            ticket = accepting.result()
            waiter.accepted = ticket.created
            waiter.follows = not ticket.created
            following = self.queries.answers(model, ticket.id)
            if waiter.timer is not None:
                following = _until(waiter.future, following)
            async with contextlib.aclosing(following) as answers:
                async for answer in answers:
                    complete = answer.final
                    yield answer
        except CharoniaError as error:
            complete = True
            self._failed(waiter, job, error)
            raise
        finally:
            self._requester.end(waiter)
            waiter.close()
            if not waiter.follows and not complete and one.options.on_disconnect == "cancel":
                self._dataplane.spawn(self._abandon(model, job.new.id, accepting))
            else:
                accepting.cancel()

    def _failed(self, waiter: Waiter, job: _Prepared, error: CharoniaError) -> None:
        """Note the delivery of an error that is the outcome of the caller's own job: its end at its deadline, or by a
        cancellation. The others are not in its record: the log is away, it refused the job, the gateway stops.
        """
        if isinstance(error, (Cancelled, DeadlineExceeded)) and not waiter.follows:
            self._deliveries.given(waiter.model, waiter.id, job.new.retention_s)

    async def _enter(self, waiter: Waiter, job: _Prepared) -> None:
        """Record a waiter's job; if its key stands for another job, answer with that one's outcome."""
        try:
            ticket = await self._accept(waiter.model, job)
            failpoints.hit("gateway.waiting")
            if ticket.created:
                waiter.accepted = True
            else:
                waiter.follows = True
                if waiter.answered(await self.queries.outcome(waiter.model, ticket.id)):
                    self._deliveries.given(waiter.model, ticket.id, job.new.retention_s)
        except CharoniaError as error:
            waiter.failed(error)
        except Exception as error:
            waiter.failed(class_of_failure(error)(f"job could not be written to the log: {error}"))

    async def _answer_from_record(self, waiter: Waiter) -> None:
        """Answer the waiter of a job that has ended, for which no reply will come."""
        try:
            record = await self._log.job(waiter.model, waiter.id)
            if record is None:
                raise NotFound(OUTCOME_UNKNOWN)
            outcome = await outcome_of(self._log, record)
        except NotFound:
            waiter.failed(LogUnavailable(OUTCOME_UNKNOWN))
        except LogUnavailable:
            raise
        except CharoniaError as error:
            waiter.failed(error)  # one unreadable record must not keep the other waiters
        else:
            if outcome is not None and waiter.answered(outcome):
                self.counts.rechecks += 1

    async def _prepare(self, one: AdmittedRequest, endpoint: bytes) -> _Prepared:
        if not one.request.sequence_id:
            return await self._prepare_now(one, endpoint)
        async with self._dataplane.turns.of(one.request):
            return await self._prepare_now(one, endpoint)

    async def _prepare_now(self, one: AdmittedRequest, endpoint: bytes) -> _Prepared:
        request, served, options = one.request, one.served, one.options
        terms = self._terms.of(options)
        if options.webhook is not None:
            if not self._webhooks:
                raise Unsupported("webhooks are not available on this server")
            check_url(options.webhook.url, self._reachable)
        key = digest = b""
        if options.idempotency_key:
            check_key(options.idempotency_key)
            key = key_digest(options.caller.tenant, served.model, options.idempotency_key)
            digest = options.digest or await _digest(request)
        retention = await self._retentions.set(served.model, served.interface)
        retention_s = min(options.retention_s, retention.seconds) if options.retention_s > 0 else retention.seconds
        job_id = self._requester.ids.next()
        if request.trace is not None and not endpoint:
            request.trace.context = replace(request.trace.context, report_to=self._endpoint.decode())
        record = await self._packed(job_id, endpoint, one)
        new = NewJob(
            job_id,
            len(record),
            wall_ns() // 1000,
            retention_s,
            options.caller.tenant,
            key,
            digest,
            about_of(request, served, options, endpoint) | ({} if self._journalled else {"unjournalled": True}),
        )
        return _Prepared(new, record, one.level, terms)

    async def _packed(self, job_id: bytes, endpoint: bytes, one: AdmittedRequest) -> Buffer:
        """The record of a job; that of a large one is put together in a thread."""
        tenant = one.options.caller.tenant
        pack = partial(request_record, job_id, endpoint, one.request, one.admitted, one.level, self._flags)
        if _size_bytes(one.request) <= _AT_ONCE_BYTES:
            return pack(tenant=tenant)
        return await asyncio.to_thread(pack, tenant=tenant, join=joined)

    async def _accept(self, model: str, job: _Prepared) -> JobTicket:
        failpoints.hit("gateway.parsed")
        ticket = await self._log.accept_job(
            model,
            job.level,
            job.terms.lane,
            job.new,
            record_fields([job.record]),
            job.terms.limits,
            journalled=self._journalled,
            durability=job.terms.durability,
        )
        failpoints.hit("gateway.stored")
        counted = self.counts.accepted if ticket.created else self.counts.replays
        counted[model] += 1
        return ticket

    def _unawaited(
        self, request: InferenceRequest, job: _Prepared, accepting: Coroutine[Any, Any, JobTicket]
    ) -> Coroutine[Any, Any, JobTicket]:
        """`accepting`, for a job that no caller here waits for; a traced one also waits for its trace report."""
        if self._tracer is None or not isinstance(request.trace, Trace):
            return accepting
        return self._tracer.accepted(job.new.id, request.trace, accepting)

    # -- cancelling ---------------------------------------------------------------------------------------------------

    async def cancel(self, job_id: str, caller: Caller = ANYONE) -> JobView:
        """Cancel a job, unless it has ended; returns its view afterwards."""
        record = await self.queries.record(job_id, caller)
        if not record.state.terminal:
            await self._end(record.model, [record], BY_CALLER)
            record = await self.queries.record(job_id, caller)
        return await self.queries.view_of(record)

    async def cancel_all(self, which: JobFilter, caller: Caller = ANYONE) -> int:
        """Cancel every active job that matches; returns how many this call cancelled."""
        cancelled = 0
        if which.state is not None and which.state.terminal:
            return 0
        for model in [which.model] if which.model else await self._log.job_models():
            async for page in self.queries.active(model, which, caller):
                for at in range(0, len(page), _CANCEL_AT_ONCE):
                    cancelled += await self._end(model, page[at : at + _CANCEL_AT_ONCE], BY_CALLER)
        return cancelled

    async def _end(self, model: str, records: Sequence[JobRecord], ending: Ending) -> int:
        """Cancel active jobs; returns how many of them this call cancelled."""
        ended = await end_jobs(self._log, model, records, ending)
        if ended:
            self.counts.cancelled[model] += len(ended)
        if self._tracer is not None:
            for record in ended:
                self._tracer.await_no_report(record.id, ending.error)
        with contextlib.suppress(CharoniaError):  # they are cancelled even if this fails
            await self._answer_callers(ended, Cancelled(ending.error))
            await count_failures(self._log, model, self._catalog.content_hashes(model), ended, "CANCELED")
        return len(ended)

    async def _answer_callers(self, records: Sequence[JobRecord], error: Cancelled) -> None:
        """Answer the callers that wait for the jobs, at any gateway. One that is not reached checks the record."""
        elsewhere: list[tuple[str, bytes]] = []
        for record in records:
            waiter = self._requester.requests.get(record.id)
            if waiter is not None:
                waiter.failed(error)
            else:
                answer = pack_failure(record.id, record.model, version_of(record), error)
                elsewhere.append((record.about.get("endpoint", ""), answer))
        await answer_gateways(self._log, elsewhere)

    async def _abandon(self, model: str, job_id: bytes, entering: asyncio.Task[Any]) -> None:
        """Cancel a job whose client has left, perhaps before it was in the log."""
        # a write that is cut off may still reach the log after this check: durable writes have their own connection
        await asyncio.wait([entering], timeout=_ENTER_WITHIN_S)
        if not entering.cancel() and not entering.cancelled():
            entering.exception()  # retrieved, so that asyncio does not log it
        with contextlib.suppress(CharoniaError):
            record = await self._log.job(model, job_id)
            if record is not None and not record.state.terminal:
                await self._end(model, [record], BY_DISCONNECT)


@dataclass(frozen=True, slots=True)
class Retention:
    """Of one model: max seconds that an ended job is kept, max bytes of all its ended jobs (0 = no bound)."""

    seconds: int
    size_bytes: int


class Retentions:
    """The retention of every model's ended jobs and journal: the options, or the model's parameters if set.

    It is written to the log when a model is first used, and when it changes.
    """

    def __init__(self, log: JobLog, settings: GatewaySettings) -> None:
        self._log = log
        self._settings = settings
        self._written: dict[str, Retention] = {}

    def of(self, interface: ModelInterface) -> Retention:
        """The retention of a model. A parameter that is no number is ignored, with a warning at its first use."""
        settings = self._settings
        return Retention(
            _parameter(interface, PARAMETER_SECONDS, 1, settings.job_retention_s),
            _parameter(interface, PARAMETER_BYTES, 0, settings.job_retention_size_bytes),
        )

    async def set(self, model: str, interface: ModelInterface) -> Retention:
        """Returns the retention of a model (`model` is its key) once it is in the log. Raises `LogUnavailable`."""
        retention = self.of(interface)
        if self._written.get(model) != retention:
            await self._log.set_retention(
                model,
                size_bytes=retention.size_bytes,
                journal_s=self._settings.journal_retention_s,
                journal_size_bytes=self._settings.journal_retention_size_bytes,
            )
            self._written[model] = retention
            for name in (PARAMETER_SECONDS, PARAMETER_BYTES):
                text = interface.parameters.get(name)
                if text is not None and not _is_number(text):
                    _log.warning("model '%s': parameter '%s' is no whole number and is ignored", interface.name, name)
        return retention

    def forget(self) -> None:
        """The log may have lost the retentions."""
        self._written.clear()


async def _digest(request: InferenceRequest) -> bytes:
    """The digest of a request; of a large one it is computed in a thread."""
    if _size_bytes(request) <= _AT_ONCE_BYTES:
        return request_digest(request)
    return await asyncio.to_thread(request_digest, request)


def _size_bytes(request: InferenceRequest) -> int:
    return sum([len(tensor.data) for tensor in request.inputs])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 15


def _parameter(interface: ModelInterface, name: str, least: int, otherwise: int) -> int:
    text = interface.parameters.get(name)
    if text is None or not _is_number(text):
        return otherwise
    return max(least, int(text))


async def _until(
    end: asyncio.Future[ResponseRecord], answers: AsyncGenerator[ResponseRecord]
) -> AsyncGenerator[ResponseRecord]:
    """The answers, until there are no more or `end` fails."""
    async with contextlib.aclosing(answers):
        while True:
            pending = asyncio.ensure_future(anext(answers))
            try:
                await asyncio.wait({pending, end}, return_when=asyncio.FIRST_COMPLETED)
                if not pending.done():
                    await end
            finally:
                pending.cancel()
                await asyncio.wait({pending})
            try:
                answer = pending.result()
            except StopAsyncIteration:
                return
            yield answer
