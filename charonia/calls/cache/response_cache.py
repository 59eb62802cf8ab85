"""Answers requests of models that cache their responses: from the cache, from an equal running request, or by
execution.

A hit enters no queue (K3). Equal requests in flight in this process share one execution; in two processes both may be
executed. This holds for clients' requests at gateways, steps of ensembles at their owners and calls of models (K4).
Only successful answers are stored. `cache_keys` defines equality, `cache_store` stores responses.

No caller owns a shared execution: it goes on while any caller waits. Its errors go to all its callers, unless they
concern one caller's own terms (its deadline, its cancellation, its queue time-out): then only that caller gets the
error, and the next caller's request is sent instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from charonia.calls.unsent_counts import UnsentCounts, failure_reason
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import (
    DEADLINE_EXCEEDED,
    SERVER_EXITING,
    CharoniaError,
    DeadlineExceeded,
    ErrorCode,
    InternalError,
    LogUnavailable,
    Unavailable,
    shed,
)
from charonia.eventlog.port import Notes
from charonia.facts.counters import LATEST
from charonia.inference import InferenceRequest
from charonia.models.caching import CachingRules
from charonia.wire import ResponseRecord

from .cache_keys import cache_key
from .cache_store import CacheStore

_OF_ONE_CALLER = {ErrorCode.DEADLINE_EXCEEDED, ErrorCode.CANCELLED}


@dataclass(frozen=True, slots=True)
class SharedAnswer:
    """An answer, or a failure of the model; `executed` for the one caller whose request was executed."""

    record: ResponseRecord
    executed: bool


class SharingCaller:
    """One caller: how to send its own request, and the future it waits for. `sent` once its request is the one sent."""

    __slots__ = ("future", "request", "run", "sent", "tenant")

    def __init__(self, request: InferenceRequest, tenant: str, run: Callable[[], Awaitable[ResponseRecord]]) -> None:
        self.request = request
        self.tenant = tenant
        self.run = run
        self.sent = False
        self.future: asyncio.Future[SharedAnswer] = asyncio.get_running_loop().create_future()

    def fail(self, error: CharoniaError) -> None:
        if not self.future.done():
            # its own error: if several callers raised the same one, it would collect all their tracebacks
            self.future.set_exception(shed(error))

    def answer(self, record: ResponseRecord, *, executed: bool) -> None:
        if not self.future.done():
            outputs, parameters = list(record.outputs), dict(record.parameters)
            error = shed(record.error) if record.error is not None else None
            own = ResponseRecord(record.id, record.model, record.version, outputs, parameters, error)
            self.future.set_result(SharedAnswer(own, executed))

    def expire(self) -> None:
        """Called at its deadline. The gateway's `DataPlane` ends a request that was sent, and may lose that race."""
        if not self.sent:
            self.fail(DeadlineExceeded(DEADLINE_EXCEEDED))


def is_of(caller: SharingCaller, error: CharoniaError, others: list[SharingCaller]) -> bool:
    """Whether an error concerns one caller's terms only."""
    if error.code in _OF_ONE_CALLER:
        return True
    if error.code is ErrorCode.UNAVAILABLE and not isinstance(error, LogUnavailable):
        return caller.request.timeout_us > 0
    return error.code is ErrorCode.RESOURCE_EXHAUSTED and any(one.tenant != caller.tenant for one in others)


class SharedExecution:
    """One execution for the callers of equal requests.

    Calls `look` first (for an existing answer), then sends its callers' requests until one is answered.
    """

    def __init__(
        self,
        look: Callable[[], Awaitable[ResponseRecord | None]],
        answered: Callable[[ResponseRecord], None],
        ended: Callable[[SharedExecution], None],
    ) -> None:
        self._look = look
        self._answered = answered
        self._ended = ended
        self._callers: list[SharingCaller] = []
        self._task: asyncio.Task[None] | None = None

    async def take(self, caller: SharingCaller) -> SharedAnswer:
        """Wait with the others. Raises the execution's error, or `DeadlineExceeded` at the caller's own deadline."""
        self._callers.append(caller)
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._run())
        timer = None
        if caller.request.deadline_ns:
            timer = loop.call_later(max(0.0, (caller.request.deadline_ns - wall_ns()) / 1e9), caller.expire)
        try:
            return await caller.future
        except CharoniaError as error:
            raise shed(error) from None  # the future keeps the exception it raised: see `shed`
        finally:
            if timer is not None:
                timer.cancel()
            if caller in self._callers:
                self._callers.remove(caller)
            if not self._callers and not self._task.done():
                self._ended(self)  # the next caller starts a new execution
                self._task.cancel()

    def cancel(self) -> None:
        """The process ends."""
        self._fail(Unavailable(SERVER_EXITING))
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            found = await self._look()
            if found is not None:
                self._answer_all(found, None)
                return
            while waiting := [one for one in self._callers if not one.future.done()]:
                if await self._send(waiting[0], waiting[1:]):
                    return
        except CharoniaError as error:
            self._fail(error)
        except Exception as error:
            self._fail(InternalError(f"request could not be sent: {error}"))
        finally:
            self._ended(self)

    async def _send(self, first: SharingCaller, others: list[SharingCaller]) -> bool:
        """Send one caller's request; False when its failure concerned that caller alone."""
        first.sent = True
        try:
            record = await first.run()
        except CharoniaError as error:
            if is_of(first, error, others):
                first.fail(error)
                return False
            raise
        if record.error is not None and is_of(first, record.error, others):
            first.answer(record, executed=True)
            return False
        if record.error is None:
            self._answered(record)
        # if the first caller has left, the execution counts for the next one
        self._answer_all(record, first if first in self._callers else next(iter(self._callers), None))
        return True

    def _answer_all(self, record: ResponseRecord, executed_for: SharingCaller | None) -> None:
        for one in self._callers:
            one.answer(record, executed=one is executed_for)

    def _fail(self, error: CharoniaError) -> None:
        for one in self._callers:
            one.fail(error)


_HASH_ASIDE_BYTES = 256 * 1024
"""Larger requests are hashed in a thread: hashing for a millisecond would delay all others by that."""


class CacheCounts(Protocol):
    """Counts hits and misses for the metrics of this process; durations in ns."""

    def hit(self, duration_ns: int) -> None: ...

    def missed(self, duration_ns: int) -> None: ...


class ResponseCache:
    """The cache of one process. `log` holds the shared responses, up to `limit_bytes`; `tally` writes statistics."""

    def __init__(self, log: Notes, limit_bytes: int, catalog: Catalog, tally: UnsentCounts) -> None:
        self.store = CacheStore(log, limit_bytes)
        self._catalog = catalog
        self._tally = tally
        self._executions: dict[bytes, SharedExecution] = {}

    def start(self) -> None:
        self.store.start()

    async def close(self) -> None:
        for execution in list(self._executions.values()):
            execution.cancel()
        await self.store.close()

    async def answer(
        self,
        request: InferenceRequest,
        served: ServedVersion,
        rules: CachingRules,
        tenant: str,
        run: Callable[[], Awaitable[ResponseRecord]],
        counts: CacheCounts,
        *,
        alone: bool = False,
    ) -> ResponseRecord:
        """The answer of a cachable, admitted request, with `error` set when the model failed.

        `run` sends the request; it is called when no other answer can be used. Raises what `run` raises, also for an
        equal request of another caller, and `DeadlineExceeded`. An `alone` request shares no execution: another
        execution may be waiting for this very request, and its own may be ended for that.
        """
        started_ns = monotonic_ns()
        if sum([len(t.data) for t in request.inputs]) < _HASH_ASIDE_BYTES:
            key = cache_key(request, served, rules, tenant)
        else:
            key = await asyncio.to_thread(cache_key, request, served, rules, tenant)
        cached = self.store.here(key)
        if cached is not None:
            self._count_hit(served, counts, monotonic_ns() - started_ns)
            return cached.answer()
        execution = self._executions.get(key) if not alone else None
        if execution is None:
            execution = self._shared_execution(key, served, rules, counts)
            if not alone:
                self._executions[key] = execution
        caller = SharingCaller(request, tenant, run)
        try:
            shared = await execution.take(caller)
        except CharoniaError as error:
            if not caller.sent:
                self._tally.count(served, monotonic_ns() - started_ns, failure_reason(error, executed=False))
            raise
        except asyncio.CancelledError:
            if not caller.sent:
                self._tally.count(served, monotonic_ns() - started_ns, "CANCELED")
            raise
        failure = shared.record.error
        if failure is not None and not shared.executed:
            self._tally.count(served, monotonic_ns() - started_ns, failure_reason(failure, executed=True))
        elif not shared.executed:
            self._count_hit(served, counts, monotonic_ns() - started_ns)
        return shared.record

    def _shared_execution(
        self, key: bytes, served: ServedVersion, rules: CachingRules, counts: CacheCounts
    ) -> SharedExecution:
        lookup_ns = 0

        async def look() -> ResponseRecord | None:
            nonlocal lookup_ns
            started_ns = monotonic_ns()
            cached = await self.store.look(key)
            lookup_ns = monotonic_ns() - started_ns
            return cached.answer() if cached is not None else None

        def answered(record: ResponseRecord) -> None:
            answered_ns = monotonic_ns()
            now = self._catalog.served(served.model).get(served.version)
            # the new content answered a request that waited across a reload
            reloaded = now is None or now.content_hash != served.content_hash
            if not reloaded:
                self.store.put(key, record, rules.ttl_s)
            # before the caller has its answer: it may ask for statistics next
            self._count_miss(served, counts, lookup_ns + monotonic_ns() - answered_ns)

        def ended(execution: SharedExecution) -> None:
            if self._executions.get(key) is execution:
                del self._executions[key]

        return SharedExecution(look, answered, ended)

    def _count_hit(self, served: ServedVersion, counts: CacheCounts, took_ns: int) -> None:
        """X2: a hit counts as a success that waited in no queue, not as an inference."""
        counts.hit(took_ns)
        amounts = {
            "success_count": 1,
            "success_ns": took_ns,
            "queue_count": 1,
            "cache_hit_count": 1,
            "cache_hit_ns": took_ns,
            LATEST: wall_ns() // 1_000_000,
        }
        self._tally.add(served, amounts)

    def _count_miss(self, served: ServedVersion, counts: CacheCounts, took_ns: int) -> None:
        counts.missed(took_ns)
        self._tally.add(served, {"cache_miss_count": 1, "cache_miss_ns": took_ns})
