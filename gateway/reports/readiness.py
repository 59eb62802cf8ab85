"""Whether a gateway reports that it is ready (H2, R40).

It stays ready for a while after the last executor of a model has left: requests then wait in the log. Otherwise the
restart of a single executor would remove every gateway from its proxy.
"""

from __future__ import annotations

from charonia.catalog.catalog import Catalog
from charonia.clock import monotonic_ns
from charonia.facts.events import ExecutorDraining, Fact, ProcessLeft


class Readiness:
    """The readiness of one gateway. It stays ready for `grace_s` after an executor has left; 0 for not at all."""

    def __init__(self, catalog: Catalog, *, strict: bool, grace_s: float) -> None:
        self._catalog = catalog
        self._strict = strict
        self._grace_ns = int(grace_s * 1e9)
        self._served = False
        """Executors were ready while this gateway ran, not only according to older facts."""
        self._departed_ns = 0

    def watch(self) -> None:
        """From now on departures count; those that the catalog has folded so far are old."""
        self._catalog.process_listeners.append(self._on_fact)

    def forget(self) -> None:
        """The log was replaced: executors that left the old one are not waited for."""
        self._served = False

    def ready(self) -> bool:
        self._served = self._served or self._catalog.started()
        awaited = self._served and monotonic_ns() - self._departed_ns < self._grace_ns
        if not self._catalog.started(awaited=awaited):
            return False
        return not self._strict or self._catalog.all_ready(awaited=awaited)

    def _on_fact(self, fact: Fact) -> None:
        self._served = self._served or self._catalog.started()
        if isinstance(fact, ExecutorDraining) or (isinstance(fact, ProcessLeft) and fact.role == "executor"):
            self._departed_ns = monotonic_ns()
