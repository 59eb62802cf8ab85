"""Who has a slot: sequences get one in turn, keep it, and are moved when an instance goes (S34, S37). Pure.

Where a new owner finds sequences bound, they stay.
"""

from __future__ import annotations

from batcher.scheduling.decisions import Decision
from batcher.scheduling.observations import SequenceFound, VersionServed
from batcher.scheduling.queues.ledger import NOT_READY
from charonia.errors import ErrorCode
from charonia.models.interface import ModelInterface

from .sequence_batching import SequenceRules
from .sequence_book import QUEUED, SequenceBook, VersionSequences
from .sequence_instances import LiveSequence, SequenceInstance


class SequenceSlots(SequenceBook):
    """The slots of all instances of one model."""

    def _bind(self, sequence: LiveSequence, instance: SequenceInstance, slot: int = -1) -> bool:
        """Give a sequence a slot; what it had elsewhere is stale from now on."""
        if not instance.take(sequence, slot):
            return False
        self._binding += 1
        sequence.binding = self._binding
        return True

    def _fill(self, version: VersionSequences) -> None:
        """Give free slots to who waits, in order (S37)."""
        if not version.backlog or version.instances.roomiest() is None:
            return
        placed: list[LiveSequence] = []
        for sequence in version.backlog:
            if sequence.waits_for() is None:
                instance = version.instances.roomiest()
                if instance is None:
                    break
                self._bind(sequence, instance)
                placed.append(sequence)
        for sequence in placed:
            del version.backlog[sequence]

    def _displace(
        self, version: VersionSequences, sequences: list[LiveSequence], now_ns: int, decisions: list[Decision]
    ) -> None:
        """These lost their slots; they come before those that have had none, the oldest first."""
        sequences.sort(key=lambda sequence: sequence.binding)
        for sequence in reversed(sequences):
            version.backlog[sequence] = None
            version.backlog.move_to_end(sequence, last=False)
        for sequence in sequences:
            self._lose_turn(sequence, now_ns, decisions)
            self._touch(sequence, now_ns)

    def _lose_turn(self, sequence: LiveSequence, now_ns: int, decisions: list[Decision]) -> None:
        """What a request that waits for another turn (S41) had done was in the instance: it begins anew."""
        request, sequence.again = sequence.again, None
        if request is not None and request.state is QUEUED:
            request.attempt += 1  # the one that goes on no more
            self._again_or_cut(sequence, request, "its instance is gone", now_ns, decisions)

    def _found(self, event: SequenceFound, now_ns: int) -> None:
        about = event.about
        version = self._version(about.version)
        key = about.key[len(b"%d:" % about.version) :]
        if key not in version.live:
            sequence = version.live[key] = LiveSequence.found(about, key)
            version.backlog[sequence] = None
            self._touch(sequence, now_ns)

    def _serve(self, event: VersionServed, now_ns: int, decisions: list[Decision]) -> None:
        version = self._version(event.version)
        slots = self._rules.slots if self._rules is not None else 0
        new, displaced = version.instances.serve(event.executor, event.content_hash, event.slots, slots)
        running = {
            (b.executor, b.instance): i for i, b in self._batches.items() if b.version == version.number and not b.freed
        }
        for instance in new:
            instance.batch = running.get((instance.executor, instance.index), "")
            for sequence in list(instance.slots.values()):  # another incarnation remembers nothing of them
                self._binding += 1
                sequence.binding = self._binding
                self._lose_turn(sequence, now_ns, decisions)
            self._reclaim(version, instance)
        self._displace(version, displaced, now_ns, decisions)

    def _reclaim(self, version: VersionSequences, instance: SequenceInstance) -> None:
        """What a predecessor had bound to this instance stays there."""
        here = (instance.executor, instance.index)
        placed: list[LiveSequence] = []
        for sequence in version.backlog:
            wanted = sequence.wanted
            if wanted is not None and wanted[:2] == here and instance.take(sequence, wanted[2]):
                placed.append(sequence)
                if wanted[3] != instance.content_hash:
                    self._binding += 1
                    sequence.binding = self._binding
        for sequence in placed:
            del version.backlog[sequence]

    def _change_policy(self, interface: ModelInterface, now_ns: int, decisions: list[Decision]) -> None:
        self._model = interface.name
        self._repeatable = interface.repeatable
        rules = SequenceRules.of(interface)
        if rules == self._rules:
            return
        first, self._rules = self._rules is None, rules
        for request, sequence in list(self._known.values()) if first else ():
            if request.state is QUEUED and not request.due_ns:
                self._time(request, sequence)
        for version in self._versions.values():
            if rules is not None:
                for executor in dict.fromkeys(instance.executor for instance in version.instances.all()):
                    mine = [i for i in version.instances.all() if i.executor == executor]
                    event = VersionServed(executor, version.number, mine[0].content_hash, len(mine))
                    self._serve(event, now_ns, decisions)
            for sequence in version.live.values():
                self._touch(sequence, now_ns)

    def _abandon(self, kept: frozenset[int], decisions: list[Decision]) -> None:
        for number in [number for number in self._versions if number not in kept]:
            version = self._versions[number]
            message = NOT_READY.format(model=self._model, version=number)
            bound = [sequence for instance in version.instances.all() for sequence in instance.slots.values()]
            for sequence in dict.fromkeys((*version.live.values(), *version.backlog, *bound)):
                for request in sequence.queue:
                    self._unqueue(request)
                    self._refuse(request, (ErrorCode.UNAVAILABLE, message, "REJECTED"), decisions)
                sequence.queue.clear()
                if sequence.running is None:
                    self._end(sequence, decisions)
                else:
                    sequence.closed = True
