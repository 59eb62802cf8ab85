"""Allocates slots: sequences get one in turn, keep it, and are moved when an instance goes (S34, S37). Pure.

Sequences that a new owner finds bound keep their slots.
"""

from __future__ import annotations

from batcher.scheduling.decisions import Decision
from batcher.scheduling.observations import SequenceFound, VersionServed

from .sequence_instances import LiveSequence, SequenceInstance
from .sequence_ledger import QUEUED, SequenceLedger, VersionSequences


class SequenceSlots:
    """The slots of all instances of one model. `first_binding` makes the numbers of bindings unique over owners."""

    __slots__ = ("_binding", "_ledger")

    def __init__(self, ledger: SequenceLedger, first_binding: int) -> None:
        self._ledger = ledger
        self._binding = first_binding

    def fill(self, version: VersionSequences) -> None:
        """Allocate free slots to the waiting sequences, in order (S37)."""
        if not version.backlog or version.instances.roomiest() is None:
            return
        placed: list[LiveSequence] = []
        for sequence in version.backlog:
            if sequence.waits_for() is None:
                instance = version.instances.roomiest()
                if instance is None:
                    break
                instance.take(sequence)
                self._renumber(sequence)
                placed.append(sequence)
        for sequence in placed:
            del version.backlog[sequence]

    def serve(self, event: VersionServed, now_ns: int, decisions: list[Decision]) -> None:
        """An executor has instances of a version; they may have changed."""
        ledger = self._ledger
        version = ledger.version(event.version)
        slots = ledger.rules.slots if ledger.rules is not None else 0
        new, displaced = version.instances.serve(event.executor, event.content_hash, event.slots, slots)
        running = {
            (b.executor, b.instance): i
            for i, b in ledger.batches.items()
            if b.version == version.number and not b.freed
        }
        for instance in new:
            instance.batch = running.get((instance.executor, instance.index), "")
            for sequence in list(instance.slots.values()):  # another incarnation has no state of them
                self._renumber(sequence)
                self._lose_turn(sequence, now_ns, decisions)
            self._reclaim(version, instance)
        self._displace(version, displaced, now_ns, decisions)

    def resize(self, now_ns: int, decisions: list[Decision]) -> None:
        """The rules changed, so instances may have another number of slots."""
        for version in self._ledger.versions.values():
            for executor in dict.fromkeys(instance.executor for instance in version.instances.all()):
                mine = [i for i in version.instances.all() if i.executor == executor]
                event = VersionServed(executor, version.number, mine[0].content_hash, len(mine))
                self.serve(event, now_ns, decisions)

    def withdraw(self, version: VersionSequences, executor: str, now_ns: int, decisions: list[Decision]) -> None:
        """An executor's instances of a version are gone."""
        self._displace(version, version.instances.withdraw(executor), now_ns, decisions)

    def found(self, event: SequenceFound, now_ns: int) -> None:
        """A predecessor's sequence waits for the slot that it had."""
        about = event.about
        version = self._ledger.version(about.version)
        key = about.key[len(b"%d:" % about.version) :]
        if key not in version.live:
            sequence = version.live[key] = LiveSequence.found(about, key)
            version.backlog[sequence] = None
            self._ledger.touch(sequence, now_ns)

    def _renumber(self, sequence: LiveSequence) -> None:
        """A sequence has a new binding; its state elsewhere is stale from now on."""
        self._binding += 1
        sequence.binding = self._binding

    def _reclaim(self, version: VersionSequences, instance: SequenceInstance) -> None:
        """Sequences that a predecessor had bound to this instance stay there."""
        here = (instance.executor, instance.index)
        placed: list[LiveSequence] = []
        for sequence in version.backlog:
            wanted = sequence.wanted
            if wanted is not None and wanted[:2] == here and instance.take(sequence, wanted[2]):
                placed.append(sequence)
                if wanted[3] != instance.content_hash:
                    self._renumber(sequence)
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
            self._ledger.touch(sequence, now_ns)

    def _lose_turn(self, sequence: LiveSequence, now_ns: int, decisions: list[Decision]) -> None:
        """The progress of a request that waits for another turn (S41) was in the instance: run it from its start."""
        request, sequence.again = sequence.again, None
        if request is not None and request.state is QUEUED:
            request.attempt += 1  # the present attempt does not continue
            self._ledger.cut_if_seen(sequence, request, "its instance is gone", now_ns, decisions)
