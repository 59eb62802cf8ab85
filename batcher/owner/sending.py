"""Takes a decided batch to its executor: at once where nothing has to be written before, else by a task.

What is recorded and how a batch is written is `dispatching`'s, who has which batch `given`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from batcher.entries.interrupted import jobs_cut_short, without
from batcher.entries.refusals import Refusals
from batcher.scheduling.decisions import DispatchBatch
from batcher.scheduling.observations import RequestQueued
from charonia import failpoints
from charonia.errors import Cancelled, CharoniaError
from charonia.eventlog.port import EventLog

from .dispatching import Dispatcher
from .given import GivenBatches
from .notes import Notes
from .turns_apart import TurnsApart

_log = logging.getLogger(__name__)

_RETRY_S = 0.2


class Owner(Protocol):
    """What sending needs of the model's owner (`owned.OwnedModel`)."""

    model: str
    log: EventLog
    closed: bool
    streams_once: bool
    given: GivenBatches
    notes: Notes
    dispatcher: Dispatcher
    wanted: dict[bytes, int]

    def tell_wanted(self, ids: Iterable[bytes]) -> None: ...

    def requests_settled(self, requests: Sequence[RequestQueued]) -> None: ...

    def batch_finished(self, batch_id: str, executor: str) -> None: ...

    def batch_returned(self, batch_id: str, executor: str, reason: str) -> None: ...


class Sending:
    """The way of one owner's batches. `lost_ownership` as the owner has it; the rest is read from it."""

    def __init__(
        self,
        owner: Owner,
        local_executor: str,
        refusals: Refusals,
        turns: TurnsApart,
        lost_ownership: Callable[[str], None],
    ) -> None:
        self._owner = owner
        self._local_executor = local_executor
        self._refusals = refusals
        self._turns = turns
        self._lost_ownership = lost_ownership

    def hand_over(self, decision: DispatchBatch) -> bool:
        """Whether a batch went to the executor in this process, with nothing to be written before."""
        owner = self._owner
        # what has a note (`notes.concern`) is suspected, or was restored and so must begin
        if decision.suspects or decision.executor != self._local_executor or owner.dispatcher.must_begin(decision):
            return False
        failpoints.hit("batcher.formed")
        if not owner.dispatcher.hand_over(decision):
            return False
        owner.given.sent(decision.batch_id, elsewhere=False)
        if owner.wanted:
            owner.tell_wanted([request.id for request in decision.requests])
        failpoints.hit("batcher.dispatched")
        return True

    async def send(self, decision: DispatchBatch) -> None:
        """Give out a batch of which something has to be recorded first, or which is for another process."""
        owner = self._owner
        failpoints.hit("batcher.formed")
        try:
            if owner.dispatcher.must_begin(decision):
                decision, settled = await owner.dispatcher.begin_attempts(decision)
                owner.requests_settled(settled)
                if owner.closed or decision.batch_id not in owner.given:
                    return  # its executor was lost meanwhile
                if owner.streams_once and (cut := await jobs_cut_short(owner.log, owner.model, decision)):
                    decision = without(decision, cut)
                    await self._refusals.settle(cut)
                owner.given.replace(decision.batch_id, decision.requests)
                if not decision.requests:
                    owner.batch_finished(decision.batch_id, decision.executor)
                    return
            # one that is given up by now would never give its turn back
            if decision.suspects == "apart" and decision.batch_id in owner.given:
                await self._turns.take(decision.executor, decision.batch_id)
            if owner.notes.concern(decision) and decision.batch_id in owner.given:
                await owner.notes.write(decision)
            decision = self._still_wanted(decision)
            if owner.closed or decision.batch_id not in owner.given:
                return
            await owner.dispatcher.send(decision)
            owner.given.sent(decision.batch_id, elsewhere=decision.executor != self._local_executor)
            if owner.wanted:
                owner.tell_wanted([request.id for request in decision.requests])
            failpoints.hit("batcher.dispatched")
        except Cancelled:
            self._lost_ownership(owner.model)
        except CharoniaError as error:
            # not dispatched, or not known to be: a duplicate run is settled once
            _log.warning("batch %s could not be dispatched: %s", decision.batch_id, error)
            asyncio.get_running_loop().call_later(_RETRY_S, self._not_dispatched, decision)

    def _still_wanted(self, decision: DispatchBatch) -> DispatchBatch:
        """The batch without what ended while it was prepared: its executor learned of that before it has the batch.

        A step of a sequence stays: those that follow build upon it.
        """
        owner = self._owner
        ended = {request.id for request in decision.requests if request.settled}
        if not ended or decision.sequences is not None or decision.batch_id not in owner.given:
            return decision
        decision = decision.without(ended)
        owner.given.replace(decision.batch_id, decision.requests)
        if not decision.requests:
            owner.batch_finished(decision.batch_id, decision.executor)
        return decision

    def _not_dispatched(self, decision: DispatchBatch) -> None:
        if not self._owner.closed:
            self._owner.batch_returned(decision.batch_id, decision.executor, "not sent")
