"""Answers requests of models that cache their responses: from the cache, with others who ask the same, or by execution.

A hit enters no queue (K3). Equal requests in flight at this process share one execution; those at two may both be
executed once. The same for clients' requests at gateways, steps of ensembles at their owners and calls of models (K4).
Only successful answers are kept. What makes requests equal is `cache_keys`'s, who waits for whom `flights`', where
responses lie `cache_store`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from charonia.calls.refused import RefusedRequests, failure_reason
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import Notes
from charonia.inference import InferenceRequest
from charonia.models.caching import CachingRules
from charonia.wire import ResponseRecord

from .cache_keys import cache_key
from .cache_store import CacheStore
from .flights import Flight, Passenger

_HASH_ASIDE_BYTES = 256 * 1024
"""More than this is hashed in a thread: a millisecond of it is a millisecond for everybody."""


class CacheCounts(Protocol):
    """Who counts hits and misses for the metrics of this process; durations in ns."""

    def hit(self, duration_ns: int) -> None: ...

    def missed(self, duration_ns: int) -> None: ...


class ResponseCache:
    """One process's. `log` is where the responses of all are, bounded by `limit_bytes`; `tally` writes statistics."""

    def __init__(self, log: Notes, limit_bytes: int, catalog: Catalog, tally: RefusedRequests) -> None:
        self.store = CacheStore(log, limit_bytes)
        self._catalog = catalog
        self._tally = tally
        self._flights: dict[bytes, Flight] = {}

    def start(self) -> None:
        self.store.start()

    async def close(self) -> None:
        for flight in list(self._flights.values()):
            flight.cancel()
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

        `run` sends the request; it is called when no other caller's answer serves. Raises what `run` raises, also for
        the equal request of another caller, and `DeadlineExceeded`. An `alone` request does not wait in the execution
        of another, which may be waiting for this very request, and no other waits in its own: it may be ended for that.
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
        flight = self._flights.get(key) if not alone else None
        if flight is None:
            flight = self._flight(key, served, rules, counts)
            if not alone:
                self._flights[key] = flight
        passenger = Passenger(request, tenant, run)
        try:
            landed = await flight.take(passenger)
        except CharoniaError as error:
            if not passenger.sent:
                self._tally.count(served, monotonic_ns() - started_ns, failure_reason(error, executed=False))
            raise
        except asyncio.CancelledError:
            if not passenger.sent:
                self._tally.count(served, monotonic_ns() - started_ns, "CANCELED")
            raise
        failure = landed.record.error
        if failure is not None and not landed.executed:
            self._tally.count(served, monotonic_ns() - started_ns, failure_reason(failure, executed=True))
        elif not landed.executed:
            self._count_hit(served, counts, monotonic_ns() - started_ns)
        return landed.record

    def _flight(self, key: bytes, served: ServedVersion, rules: CachingRules, counts: CacheCounts) -> Flight:
        lookup_ns = 0

        async def look() -> ResponseRecord | None:
            nonlocal lookup_ns
            started_ns = monotonic_ns()
            cached = await self.store.look(key)
            lookup_ns = monotonic_ns() - started_ns
            return cached.answer() if cached is not None else None

        def landed(record: ResponseRecord) -> None:
            answered_ns = monotonic_ns()
            now = self._catalog.served(served.model).get(served.version)
            # a request that waited over a reload was answered by the new content
            reloaded = now is None or now.content_hash != served.content_hash
            if not reloaded:
                self.store.put(key, record, rules.ttl_s)
            # before the caller has its answer: it may ask for statistics next
            self._count_miss(served, counts, lookup_ns + monotonic_ns() - answered_ns)

        def ended(flight: Flight) -> None:
            if self._flights.get(key) is flight:
                del self._flights[key]

        return Flight(look, landed, ended)

    def _count_hit(self, served: ServedVersion, counts: CacheCounts, took_ns: int) -> None:
        """X2: a hit counts as a success that waited in no queue, not as an inference."""
        counts.hit(took_ns)
        amounts = {
            "success_count": 1,
            "success_ns": took_ns,
            "queue_count": 1,
            "cache_hit_count": 1,
            "cache_hit_ns": took_ns,
            "last_inference_ms": wall_ns() // 1_000_000,
        }
        self._tally.add(served, amounts)

    def _count_miss(self, served: ServedVersion, counts: CacheCounts, took_ns: int) -> None:
        counts.missed(took_ns)
        self._tally.add(served, {"cache_miss_count": 1, "cache_miss_ns": took_ns})
