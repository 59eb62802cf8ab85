"""Ends calls between models that wait for themselves; which those are `scheduling.deadlocks` finds.

Calls of which all who wait for them are known to do nothing else are judged as soon as they come. Of others it is not
known: a caller may go on without an answer. They must have waited for a while and be found stuck twice in a row; among
these, calls that wait in the queues of other batchers count as well (`waiting`). No more calls are ended than must be,
the youngest first: the others go on then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from charonia.clock import monotonic_ns

from .carriers import carrier_of
from .owned import OwnedModel
from .scheduling.deadlocks import CalledRequest, Holder, Version, stuck_calls
from .scheduling.observations import CallRefused, RequestQueued
from .waiting import Suspicions, Waiting

_log = logging.getLogger(__name__)

PATIENCE_NS = 1_000_000_000
_SHORTEST_PAUSE_NS = 1_000_000
_SHARE = 20
"""A look at once may take so small a part of this process's time, however many calls come."""


_MOST_TOLD = 1000
"""Calls that are looked at when they have waited, the oldest: those of a deadlock do not go away."""


class DeadlockWatch:
    """Of one batcher; `look` may be called as often as one likes."""

    def __init__(self) -> None:
        self._suspicions = Suspicions()
        self._number = 0
        self.pause_ns = _SHORTEST_PAUSE_NS
        """How long to wait before the next look at once."""
        self.refused = 0
        """Calls that were ended."""

    def look_at_once(self, models: Iterable[OwnedModel]) -> None:
        """End the calls that are stuck for certain."""
        started_ns = monotonic_ns()
        view = _View(models)
        calls = {call_id: view.call(call_id, surely=True) for call_id in view.requests}
        while stuck := stuck_calls(view.instances(), view.holders(), calls.values()):
            chosen = max(stuck, key=lambda call: view.age(call.id))
            del calls[chosen.id]
            self._refuse(view.owner(chosen), view.requests[chosen.id])
        self.pause_ns = max(_SHORTEST_PAUSE_NS, _SHARE * (monotonic_ns() - started_ns))

    def waiting(self, models: Iterable[OwnedModel], now_ns: int) -> Waiting:
        """What there is to know here; nothing while no call waits for long."""
        view = _View(models)
        self._number += 1
        if not view.waits_long(now_ns):
            return Waiting(self._number)
        oldest = sorted(view.requests, key=view.age)[:_MOST_TOLD]
        calls = [view.call(call_id) for call_id in oldest]
        wanted = {call.version for call in calls}
        return Waiting(
            self._number,
            {version: slots for version, slots in view.instances().items() if version in wanted},
            tuple(holder for holder in view.holders() if holder.version in wanted),
            tuple(calls),
            {call.id: view.age(call.id)[0] for call in calls},
        )

    def look(self, models: Iterable[OwnedModel], mine: Waiting, others: Mapping[str, Waiting] | None = None) -> None:
        """End what was found stuck twice in a row; `others` is what other batchers wrote, by incarnation."""
        chosen = self._suspicions.judge(mine, others or {})
        if chosen:
            view = _View(models)
            for call_id in chosen:
                if call_id in view.requests:  # else its owner ends it
                    self._refuse(view.owner(view.call(call_id)), view.requests[call_id])

    def _refuse(self, model: OwnedModel, request: RequestQueued) -> None:
        lineage = carrier_of(request).record.lineage
        path = lineage.path(model.model) if lineage is not None else model.model
        message = (
            f"deadlock: {path}: every instance of model '{model.model}' is held by a request that waits for calls like "
            "this one; more instances are needed"
        )
        _log.warning("a call of model '%s' was ended, %s", model.model, message)
        self.refused += 1
        model.observe(CallRefused(request.id, message))


class _View:
    """The models of this batcher as they are now. `requests` are those that models made and that have not ended."""

    def __init__(self, models: Iterable[OwnedModel]) -> None:
        self._owned = {model.model: model for model in models if not model.closed}
        self._models: dict[bytes, str] = {}
        self.requests: dict[bytes, RequestQueued] = {}
        for name, one in self._owned.items():
            for request in _called(one):
                self.requests[request.id] = request
                self._models[request.id] = name

    def owner(self, call: CalledRequest) -> OwnedModel:
        return self._owned[call.version[0]]

    def age(self, call_id: bytes) -> tuple[int, bytes]:
        """Larger for younger ones; the same wherever it is asked."""
        return carrier_of(self.requests[call_id]).record.accepted_ns, call_id

    def waits_long(self, now_ns: int) -> bool:
        return any(now_ns - request.enqueued_ns > PATIENCE_NS for request in self.requests.values())

    def instances(self) -> dict[Version, Mapping[str, int]]:
        return {
            (name, version): slots for name, one in self._owned.items() for version, slots in one.instances().items()
        }

    def holders(self) -> list[Holder]:
        return [
            Holder((name, version), executor, frozenset(request.id for request in requests))
            for name, one in self._owned.items()
            for executor, version, requests in one.scheduler.holding()
        ]

    def call(self, call_id: bytes, *, surely: bool = False) -> CalledRequest:
        """With `surely`, only ancestors that do nothing else until it is answered."""
        request = self.requests[call_id]
        lineage = carrier_of(request).record.lineage
        ancestors: tuple[bytes, ...] = ()
        if lineage is not None:
            ancestors = lineage.blocked_ids() if surely else tuple(one for _, one in lineage.ancestors)
        return CalledRequest(call_id, (self._models[call_id], request.version), ancestors)


def _called(model: OwnedModel) -> Iterable[RequestQueued]:
    """The model's requests that models made and that have not ended; others are forgotten."""
    for request_id, request in list(model.called.items()):
        if model.scheduler.find(request_id) is not request or request.settled:
            del model.called[request_id]
        else:
            yield request
