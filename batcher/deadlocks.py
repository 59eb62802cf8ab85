"""Ends calls between models that wait for themselves; which those are `scheduling.deadlocks` finds.

Looked for among the models of one batcher, only while calls of models wait, and only among those that have waited for a
while: a caller may give up by itself. No more calls are ended than must be, the youngest first: the others go on then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from .carriers import carrier_of
from .owned import OwnedModel
from .scheduling.deadlocks import CalledRequest, Holder, stuck_calls
from .scheduling.observations import CallRefused, RequestQueued

_log = logging.getLogger(__name__)

PATIENCE_NS = 1_000_000_000


class DeadlockWatch:
    """Of one batcher; `look` may be called as often as one likes."""

    def __init__(self) -> None:
        self._suspects: set[bytes] = set()
        self.refused = 0
        """Calls that were ended."""

    def look(self, models: Iterable[OwnedModel], now_ns: int) -> None:
        """End what was found stuck twice in a row."""
        owned = {model.model: model for model in models if not model.closed}
        called = {model: list(_called(one)) for model, one in owned.items()}
        if not any(now_ns - request.enqueued_ns > PATIENCE_NS for found in called.values() for request in found):
            self._suspects = set()
            return
        instances = {
            (model, version): slots for model, one in owned.items() for version, slots in one.instances().items()
        }
        holders = [
            Holder((model, version), executor, frozenset(request.id for request in requests))
            for model, one in owned.items()
            for executor, version, requests in one.scheduler.holding()
        ]
        calls = {request.id: _call(model, request) for model, requests in called.items() for request in requests}
        requests_by_id = {request.id: request for requests in called.values() for request in requests}
        before, self._suspects = self._suspects, set()
        while stuck := stuck_calls(instances, holders, calls.values()):
            self._suspects |= {call.id for call in stuck}
            again = [call for call in stuck if call.id in before]
            if not again:
                break
            chosen = max(again, key=lambda call: requests_by_id[call.id].enqueued_ns)
            del calls[chosen.id]
            self._refuse(owned[chosen.version[0]], requests_by_id[chosen.id])

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


def _called(model: OwnedModel) -> Iterable[RequestQueued]:
    """The model's requests that models made and that have not ended; others are forgotten."""
    for request_id, request in list(model.called.items()):
        if model.scheduler.find(request_id) is not request or request.settled:
            del model.called[request_id]
        else:
            yield request


def _call(model: str, request: RequestQueued) -> CalledRequest:
    lineage = carrier_of(request).record.lineage
    ancestors = tuple(request_id for _, request_id in lineage.ancestors) if lineage is not None else ()
    return CalledRequest(request.id, (model, request.version), ancestors)
