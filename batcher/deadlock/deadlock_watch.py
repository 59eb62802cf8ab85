"""Ends calls between models that wait for one another; `scheduling.deadlock.wait_cycles` finds them.

A call is judged as soon as it arrives if all its waiting callers are known to do nothing else. Any other caller may go
on without an answer, so its call must have waited for a while and be found stuck by two checks in a row; these checks
include calls in the queues of other batchers (`waiting`). As few calls as possible are ended, the youngest first, so
that the others can run. `DeadlockChecks` schedules the checks and exchanges notes between batchers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from batcher.entries.bursting import wave_of
from batcher.entries.carriers import carried_of
from batcher.owner.owned import OwnedModel
from batcher.scheduling.deadlock.wait_cycles import Lack, StuckCall, stuck_calls
from batcher.scheduling.deadlock.waits import CalledRequest, Holder, Situation, SlotGroup, Version
from batcher.scheduling.observations import CallRefused, RequestQueued
from batcher.scheduling.sequences.sequence_scheduler import SequenceScheduler
from charonia import keys
from charonia.clock import monotonic_ns
from charonia.errors import InvalidRecord
from charonia.eventlog.port import Notes
from charonia.facts.resource_waits import TurnsNote

from .waiting import TTL_S, Suspicions, Waiting

_log = logging.getLogger(__name__)

PATIENCE_NS = 1_000_000_000
_SHORTEST_PAUSE_NS = 1_000_000
_SHARE = 20
"""Immediate checks may take at most this share of the process's time, however many calls arrive."""

_MOST_TOLD = 1000
"""At most this many waiting calls are checked, the oldest: the calls of a deadlock stay."""

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
    """Watches the models of one batcher; `look` may be called at any rate."""

    def __init__(self) -> None:
        self._suspicions = Suspicions()
        self._number = 0
        self.pause_ns = _SHORTEST_PAUSE_NS
        """Seconds to wait before the next immediate check."""
        self.refused = 0
        """How many calls were ended."""

    def look_at_once(self, models: Iterable[OwnedModel]) -> None:
        """End the calls that are certain to be stuck."""
        started_ns = monotonic_ns()
        view = _View(models)
        situation = view.situation(view.requests, surely=True)
        while stuck := stuck_calls(situation):
            chosen = max(stuck, key=lambda one: view.age(one.call.id))
            situation = situation.without(chosen.call.id)
            self._refuse(view, chosen)
        self.pause_ns = max(_SHORTEST_PAUSE_NS, _SHARE * (monotonic_ns() - started_ns))

    def waiting(self, models: Iterable[OwnedModel], now_ns: int) -> Waiting:
        """The current state of waits and holders; empty while no call has waited for long."""
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
        """End the calls that two checks in a row found stuck; `others` are the notes of other batchers by incarnation,
        `turns` the notes of executors.
        """
        chosen = self._suspicions.judge(mine, others or {}, turns)
        if chosen:
            view = _View(models)
            for one in chosen:
                if one.call.id in view.requests:  # otherwise its owner ends it
                    self._refuse(view, one)

    def _refuse(self, view: _View, stuck: StuckCall) -> None:
        model, request = view.owner(stuck.call), view.requests[stuck.call.id]
        lineage = carried_of(request).record.lineage
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
            for request in one.unsettled_calls():
                self.requests[request.id] = request
                self._models[request.id] = name

    def owner(self, call: CalledRequest) -> OwnedModel:
        return self._owned[call.version[0]]

    def age(self, call_id: bytes) -> tuple[int, bytes]:
        """A sort key, larger for younger calls and the same in every batcher."""
        return carried_of(self.requests[call_id]).record.accepted_ns, call_id

    def waits_long(self, now_ns: int) -> bool:
        return any(now_ns - request.enqueued_ns > PATIENCE_NS for request in self.requests.values())

    def situation(self, call_ids: Iterable[bytes], *, surely: bool = False) -> Situation:
        """The ancestors of these calls. With `surely`, only ancestors that do nothing else until they are answered."""
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
        lineage = carried_of(request).record.lineage
        ancestors: tuple[bytes, ...] = ()
        if lineage is not None:
            ancestors = lineage.blocked_ids() if surely else tuple(one for _, one in lineage.ancestors)
        model = self._models[call_id]
        scheduler = self._owned[model].scheduler
        step = scheduler.step(call_id) if isinstance(scheduler, SequenceScheduler) else None
        return CalledRequest(call_id, (model, request.version), ancestors, step)


def _ids_of(requests: Sequence[RequestQueued]) -> frozenset[bytes]:
    """The ids of requests, and for waves also the ids of their requests: calls refer to those."""
    ids = [request.id for request in requests]
    for request in requests:
        if request.wave and (wave := wave_of(request)) is not None:
            ids += wave.ids()
    return frozenset(ids)


_Note = TypeVar("_Note")


class DeadlockChecks:
    """Checks for the batcher `incarnation`: `models` are the models it owns, `others` the other batchers, `executors`
    all executors.
    """

    def __init__(
        self,
        log: Notes,
        incarnation: str,
        models: Callable[[], Collection[OwnedModel]],
        others: Callable[[], set[str]],
        executors: Callable[[], Collection[str]],
    ) -> None:
        self._log = log
        self._incarnation = incarnation
        self._models = models
        self._others = others
        self._executors = executors
        self._watch = DeadlockWatch()
        self._soon: asyncio.TimerHandle | None = None
        self._closed = False

    def close(self) -> None:
        self._closed = True
        if self._soon is not None:
            self._soon.cancel()

    def soon(self) -> None:
        """Calls arrived whose callers do nothing else: check soon, because such a call may be stuck for certain."""
        if self._soon is None and not self._closed:
            pause_s = self._watch.pause_ns / 1e9
            self._soon = asyncio.get_running_loop().call_later(pause_s, self._at_once)

    def _at_once(self) -> None:
        self._soon = None
        self._watch.look_at_once(self._models())

    async def look(self) -> None:
        """Check the calls that have waited for long; called periodically. Raises what the log raises."""
        mine = self._watch.waiting(self._models(), monotonic_ns())
        if not mine.situation.calls:
            self._watch.look(self._models(), mine)
            return
        others = sorted(self._others() - {self._incarnation})
        if others:
            await self._log.put_note(keys.waiting(self._incarnation), mine.pack(), TTL_S)
        told = await self._told({name: keys.waiting(name) for name in others}, Waiting.unpack)
        turns = await self._told({name: keys.turns(name) for name in self._executors()}, TurnsNote.unpack)
        self._watch.look(self._models(), mine, told, turns)

    async def _told(self, names: Mapping[str, bytes], unpack: Callable[[bytes], _Note]) -> dict[str, _Note]:
        """The notes of those of these processes that wrote one."""
        found: dict[str, _Note] = {}
        notes = await self._log.notes([*names.values()]) if names else []
        for name, note in zip(names, notes, strict=True):
            with contextlib.suppress(InvalidRecord):  # written by another release
                if note is not None:
                    found[name] = unpack(note)
        return found
