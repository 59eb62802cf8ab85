"""Forms batches from ready sequences for free instances, once the facts are folded. Pure. `sequence_batching` chooses
which sequences form a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batcher.scheduling.decisions import Decision, DispatchBatch
from batcher.scheduling.observations import RequestQueued
from batcher.scheduling.queues.ledger import NEVER_NS
from charonia.wire import BatchPlaces, SequencePlace

from .sequence_batching import SequenceRules, choose
from .sequence_instances import LiveSequence, SequenceInstance
from .sequence_ledger import DispatchedBatch, SequenceLedger, mark_of


@dataclass(frozen=True, slots=True)
class Delays:
    """For tests (S43): nothing is dispatched before this many requests wait in slots and, of them, in the backlog."""

    requests: int = 0
    backlog_requests: int = 0


NO_DELAYS = Delays()
_NONE: Mapping[str, RequestQueued | None] = {}


class SequenceDispatching:
    """Dispatches the batches of one model. `is_held`: it dispatches none. `next_check_ns`: an instance waits until then
    for more of its sequences.
    """

    __slots__ = ("_batch_prefix", "_delays", "_ledger", "_next_batch", "is_held", "next_check_ns")

    def __init__(self, ledger: SequenceLedger, batch_prefix: str, delays: Delays) -> None:
        self._ledger = ledger
        self._batch_prefix = batch_prefix
        self._next_batch = 0
        self._delays = delays
        self.is_held = False
        self.next_check_ns = NEVER_NS

    def decide(self, now_ns: int, decisions: list[Decision]) -> None:
        """Give each free instance a batch, if one is due."""
        self.next_check_ns = NEVER_NS
        rules = self._ledger.rules
        if self.is_held or rules is None or self._delayed():
            return
        kept = self.kept() if self._ledger.apart else _NONE
        for version in self._ledger.versions.values():
            for instance in version.instances.all():
                if not instance.ready or instance.batch:
                    continue
                if instance.executor in kept:
                    self._dispatch_apart(instance, kept[instance.executor], rules, decisions)
                else:
                    self._dispatch_to(instance, rules, now_ns, decisions)

    def kept(self) -> Mapping[str, RequestQueued | None]:
        """The executors that get no batch but one, which runs apart, with its request; None while that runs."""
        ledger = self._ledger
        if not ledger.apart:
            return _NONE
        kept: dict[str, RequestQueued | None] = {}
        for version in ledger.versions.values():
            for instance in version.instances.all():
                for request in [sequence.queue[0] for sequence in instance.ready]:
                    first = kept.get(instance.executor)
                    if request.id in ledger.apart and (first is None or request.order < first.order):
                        kept[instance.executor] = request
        return kept | {batch.executor: None for batch in ledger.batches.values() if batch.apart}

    def _delayed(self) -> bool:
        """S43: whether to wait for more requests before the first batch."""
        if not self._delays.requests:
            return False
        ledger = self._ledger
        backlog = sum(len(sequence.queue) for version in ledger.versions.values() for sequence in version.backlog)
        if ledger.queued - backlog < self._delays.requests or backlog < self._delays.backlog_requests:
            return True
        self._delays = NO_DELAYS
        return False

    def _dispatch_to(
        self, instance: SequenceInstance, rules: SequenceRules, now_ns: int, decisions: list[Decision]
    ) -> None:
        ledger = self._ledger
        alone = ledger.alone
        suspects = [sequence for sequence in instance.ready if sequence.queue[0].id in alone] if alone else []
        if suspects:
            if any(instance is ledger.instance_of(batch) for batch in ledger.batches.values()):
                return  # if the instance fails now, this request is the cause
            chosen = [min(suspects, key=lambda sequence: sequence.queue[0].order)]
        else:
            chosen, until_ns = choose(instance, rules, now_ns)
            if not chosen:
                self.next_check_ns = min(self.next_check_ns, until_ns)
                return
        decisions.append(self._batch(instance, chosen, rules, is_suspect=bool(suspects)))

    def _dispatch_apart(
        self,
        instance: SequenceInstance,
        request: RequestQueued | None,
        rules: SequenceRules,
        decisions: list[Decision],
    ) -> None:
        """Dispatch this request once its executor has no other batch of the model: what ends it then is the request."""
        chosen = [sequence for sequence in instance.ready if sequence.queue[0] is request]
        if chosen and all(batch.executor != instance.executor for batch in self._ledger.batches.values()):
            decisions.append(self._batch(instance, chosen, rules, is_suspect=True, is_apart=True))

    def _batch(
        self,
        instance: SequenceInstance,
        chosen: list[LiveSequence],
        rules: SequenceRules,
        *,
        is_suspect: bool,
        is_apart: bool = False,
    ) -> DispatchBatch:
        """The next requests of these sequences, as one batch."""
        self._next_batch += 1
        batch_id = f"{self._batch_prefix}-{self._next_batch}"
        requests: list[RequestQueued] = []
        places: list[SequencePlace] = []
        for sequence in chosen:
            request = sequence.queue[0]
            again, sequence.again = sequence.again is request, None
            if mark_of(request).start and not again:
                sequence.begin(request.id)
            request.timeout_ns = 0
            self._ledger.dispatch(request, sequence)
            instance.refresh(sequence)
            request.attempt += 1
            requests.append(request)
            places.append(SequencePlace(sequence.slot, sequence.run, sequence.binding, again))
        instance.batch = batch_id
        executor, version = instance.executor, chosen[0].version
        batch = DispatchedBatch(executor, version, instance.index, requests, chosen, is_suspect, is_apart)
        self._ledger.batches[batch_id] = batch
        rows = instance.rows if rules.block.direct and rules.batching else 0
        return DispatchBatch(
            batch_id,
            executor,
            version,
            instance.content_hash,
            requests,
            tuple([request.attempt for request in requests]),
            False,
            "group" if is_suspect else "",
            BatchPlaces(instance.index, rows, tuple(places)),
        )
