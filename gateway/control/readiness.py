"""Whether a gateway says that it is ready (H2, R40).

It is while its work is served, and for a while after the last executor of a model has left: what is accepted then waits
in the log, so the restart of the only executor must not send every gateway out of its proxy's rotation.
"""

from __future__ import annotations

from charonia.catalog.catalog import Catalog
from charonia.clock import monotonic_ns
from charonia.facts.events import ExecutorDraining, Fact, ProcessLeft


class Readiness:
    """Of one gateway. The successor of an executor is waited for `grace_s` from the departure on; 0 for not at all."""

    def __init__(self, catalog: Catalog, *, strict: bool, grace_s: float) -> None:
        self._catalog = catalog
        self._strict = strict
        self._grace_ns = int(grace_s * 1e9)
        self._served = False
        """This gateway has seen executors that were ready, not only read of them."""
        self._departed_ns = 0

    def watch(self) -> None:
        """From now on departures are news; what the catalog has folded so far is history."""
        self._catalog.process_listeners.append(self._on_fact)

    def forget(self) -> None:
        """The log is another one: who left the old one is not waited for."""
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
