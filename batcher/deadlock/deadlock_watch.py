"""Ends calls between models that wait for themselves; which those are `deadlock.wait_cycles` finds.

Calls of which all who wait for them are known to do nothing else are judged as soon as they come. Of others it is not
known: a caller may go on without an answer. They must have waited for a while and be found stuck twice in a row; among
these, calls that wait in the queues of other batchers count as well (`waiting`). No more calls are ended than must be,
the youngest first: the others go on then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from batcher.entries.bursting import wave_of
from batcher.entries.carriers import carrier_of
from batcher.owner.owned import OwnedModel
from batcher.scheduling.deadlock.wait_cycles import Lack, StuckCall, stuck_calls
from batcher.scheduling.deadlock.waits import CalledRequest, Holder, Situation, SlotGroup, Version
from batcher.scheduling.observations import CallRefused, RequestQueued
from batcher.scheduling.sequences.sequence_scheduler import SequenceScheduler
from charonia.clock import monotonic_ns
from charonia.facts.resource_waits import TurnsNote

from .waiting import Suspicions, Waiting

_log = logging.getLogger(__name__)

PATIENCE_NS = 1_000_000_000
_SHORTEST_PAUSE_NS = 1_000_000
_SHARE = 20
"""A look at once may take so small a part of this process's time, however many calls come."""

_MOST_TOLD = 1000
"""Calls that are looked at when they have waited, the oldest: those of a deadlock do not go away."""

_WHY = {
    Lack.INSTANCE: "every instance of model '{model}' is held by a request that waits for calls like this one; more "
    "instances are needed",
    Lack.STEP: "the request before it in its sequence waits for calls like this one; a request of model '{model}' "
    "must not wait for its own sequence",
    Lack.OWN_INSTANCE: "the instance of model '{model}' that has its sequence is held by a request that waits for "
    "calls like this one; more instances are needed",
    Lack.SLOT: "every sequence slot of model '{model}' is held by a sequence whose request waits for calls like this "
    "one; more slots are needed (instances, or max_candidate_sequences)",
    Lack.RESOURCE: "the resource '{resource}' that model '{model}' needs is held by requests that wait for calls like "
    "this one; a larger count of it is needed",
}


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
        situation = view.situation(view.requests, surely=True)
        while stuck := stuck_calls(situation):
            chosen = max(stuck, key=lambda one: view.age(one.call.id))
            situation = situation.without(chosen.call.id)
            self._refuse(view, chosen)
        self.pause_ns = max(_SHORTEST_PAUSE_NS, _SHARE * (monotonic_ns() - started_ns))

    def waiting(self, models: Iterable[OwnedModel], now_ns: int) -> Waiting:
        """What there is to know here; nothing while no call waits for long."""
        view = _View(models)
        self._number += 1
        if not view.waits_long(now_ns):
            return Waiting(self._number)
        oldest = sorted(view.requests, key=view.age)[:_MOST_TOLD]
        situation = view.situation(oldest)
        wanted = {call.version for call in situation.calls.values()}
        told = replace(
            situation,
            instances={version: slots for version, slots in situation.instances.items() if version in wanted},
            holders=tuple(holder for holder in situation.holders if holder.version in wanted),
        )
        return Waiting(self._number, told, {call_id: view.age(call_id)[0] for call_id in oldest})

    def look(
        self,
        models: Iterable[OwnedModel],
        mine: Waiting,
        others: Mapping[str, Waiting] | None = None,
        turns: Mapping[str, TurnsNote] | None = None,
    ) -> None:
        """End what was found stuck by two looks in a row; `others` is what other batchers wrote, by incarnation, and
        `turns` what executors did.
        """
        chosen = self._suspicions.judge(mine, others or {}, turns)
        if chosen:
            view = _View(models)
            for one in chosen:
                if one.call.id in view.requests:  # else its owner ends it
                    self._refuse(view, one)

    def _refuse(self, view: _View, stuck: StuckCall) -> None:
        model, request = view.owner(stuck.call), view.requests[stuck.call.id]
        lineage = carrier_of(request).record.lineage
        path = lineage.path(model.model) if lineage is not None else model.model
        message = f"deadlock: {path}: {_WHY[stuck.lack].format(model=model.model, resource=stuck.resource)}"
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

    def situation(self, call_ids: Iterable[bytes], *, surely: bool = False) -> Situation:
        """Of these calls. With `surely`, only ancestors count that do nothing else until they are answered."""
        calls = {call_id: self._call(call_id, surely) for call_id in call_ids}
        return Situation(
            {(name, version): slots for name, one in self._owned.items() for version, slots in one.instances().items()},
            tuple(
                [
                    Holder((name, version), executor, _ids_of(requests))
                    for name, one in self._owned.items()
                    for executor, version, requests in one.scheduler.holding()
                ]
            ),
            calls,
            self._slots({call.version for call in calls.values() if call.step is not None and not call.step.has_slot}),
        )

    def _slots(self, versions: Iterable[Version]) -> dict[Version, tuple[SlotGroup, ...]]:
        found: dict[Version, tuple[SlotGroup, ...]] = {}
        for name, number in versions:
            scheduler = self._owned[name].scheduler
            if isinstance(scheduler, SequenceScheduler):
                found[name, number] = scheduler.slot_groups(number)
        return found

    def _call(self, call_id: bytes, surely: bool) -> CalledRequest:
        request = self.requests[call_id]
        lineage = carrier_of(request).record.lineage
        ancestors: tuple[bytes, ...] = ()
        if lineage is not None:
            ancestors = lineage.blocked_ids() if surely else tuple(one for _, one in lineage.ancestors)
        model = self._models[call_id]
        scheduler = self._owned[model].scheduler
        step = scheduler.step(call_id) if isinstance(scheduler, SequenceScheduler) else None
        return CalledRequest(call_id, (model, request.version), ancestors, step)


def _ids_of(requests: Sequence[RequestQueued]) -> frozenset[bytes]:
    """Those of requests, and of waves also those of the requests in them, which is what calls name."""
    ids = [request.id for request in requests]
    for request in requests:
        if request.wave and (wave := wave_of(request)) is not None:
            ids += wave.ids()
    return frozenset(ids)


def _called(model: OwnedModel) -> Iterable[RequestQueued]:
    """The model's requests that models made and that have not ended; others are forgotten."""
    for request_id, request in list(model.called.items()):
        if model.scheduler.find(request_id) is not request or request.settled:
            del model.called[request_id]
        else:
            yield request
