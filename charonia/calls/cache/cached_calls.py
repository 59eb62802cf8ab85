"""The response cache for requests that models and ensembles make: steps of ensembles, calls of models (K4).

A hit counts as a request of the called model, as in Triton (K5), and this process exports it, because no gateway and no
executor sees such a request. Nothing is started before the first such request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from charonia.calls.unsent_counts import UnsentCounts
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.eventlog.port import EventLog, Notes
from charonia.inference import InferenceRequest
from charonia.models.caching import CachingRules
from charonia.wire import ResponseRecord

from .cache_keys import rules_of
from .response_cache import ResponseCache

Observe = Callable[[ServedVersion, str, int], None]
"""Receives single durations: the version, `queue`, `cache_hit` or `cache_miss`, and ns."""


class CallerCounts:
    """Hits and misses of one model version in this process; durations in ns."""

    __slots__ = ("hit_ns", "hits", "miss_ns", "misses", "observe")

    def __init__(self, observe: Callable[[str, int], None]) -> None:
        self.hits = self.hit_ns = 0
        self.misses = self.miss_ns = 0
        self.observe = observe

    def hit(self, duration_ns: int) -> None:
        self.hits += 1
        self.hit_ns += duration_ns
        self.observe("queue", 0)
        self.observe("cache_hit", duration_ns)

    def missed(self, duration_ns: int) -> None:
        self.misses += 1
        self.miss_ns += duration_ns
        self.observe("cache_miss", duration_ns)


class CachedCalls:
    """The cached calls of one process. Statistics go into `log`, responses into `cache_log`, which may be the same."""

    def __init__(
        self, log: EventLog, cache_log: Notes | None, limit_bytes: int, catalog: Catalog, observe: Observe
    ) -> None:
        self._tally = UnsentCounts(log)
        self._cache = ResponseCache(cache_log or log, limit_bytes, catalog, self._tally)
        self._catalog = catalog
        self._observe = observe
        self._rules: dict[tuple[str, int], tuple[str, CachingRules | None]] = {}
        self._counts: dict[tuple[str, int], CallerCounts] = {}
        self._started = False
        catalog.listeners.append(self._changed)

    def rules(self, served: ServedVersion) -> CachingRules | None:
        """The rules of a version with cached answers; None for others, and for decoupled ones."""
        key = (served.model, served.version)
        known = self._rules.get(key)
        if known is None or known[0] != served.content_hash:
            rules = None if served.interface.decoupled else rules_of(served)
            known = self._rules[key] = (served.content_hash, rules)
        return known[1]

    async def answer(
        self,
        request: InferenceRequest,
        served: ServedVersion,
        rules: CachingRules,
        tenant: str,
        run: Callable[[], Awaitable[ResponseRecord]],
        *,
        alone: bool = False,
    ) -> ResponseRecord:
        """See `ResponseCache.answer`."""
        if not self._started:
            self._started = True
            self._cache.start()
        counts = self._counts_of(served)
        return await self._cache.answer(request, served, rules, tenant, run, counts, alone=alone)

    def counts(self) -> Mapping[tuple[str, int], CallerCounts]:
        """The counts of versions that executors hold, by model and version."""
        self._forget(self._counts)  # a new log has others
        return self._counts

    def _changed(self, model: str) -> None:
        """Forget the counts of a model's unloaded versions: loaded again, they begin at 0, as in gateways."""
        self._forget(key for key in self._counts if key[0] == model)

    def _forget(self, keys: Iterable[tuple[str, int]]) -> None:
        for model, version in list(keys):
            if version not in self._catalog.held(model):
                del self._counts[(model, version)]

    def begin_anew(self) -> None:
        """The log has a new epoch."""
        self._cache.store.forget()

    async def close(self) -> None:
        """Raises what the log raises."""
        await self._cache.close()
        await self._tally.flush()

    def _counts_of(self, served: ServedVersion) -> CallerCounts:
        key = (served.model, served.version)
        found = self._counts.get(key)
        if found is None:
            found = self._counts[key] = CallerCounts(lambda what, ns: self._observe(served, what, ns))
        return found
