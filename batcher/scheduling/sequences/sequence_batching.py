"""Chooses which sequences of one instance form a batch, and when: the strategies direct and oldest (S34-S36). Pure. A
batch has at most one request of each sequence. `sequence_instances` has the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from batcher.scheduling.queues.dynamic_batching import BatchRules, form_batch
from batcher.scheduling.queues.ledger import NEVER_NS
from charonia.models.interface import ModelInterface
from charonia.models.sequence_batcher import SequenceBatching

from .sequence_instances import LiveSequence, SequenceInstance


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """What the strategies need of a configuration; `slots` is per instance."""

    block: SequenceBatching
    slots: int
    batching: bool
    oldest: BatchRules

    @staticmethod
    def of(interface: ModelInterface) -> SequenceRules | None:
        """None for a model without a sequence batcher."""
        block = interface.sequence_batching
        if block is None:
            return None
        rows = max(1, interface.max_batch_size)
        preferred = frozenset(block.preferred_batch_sizes) or frozenset((rows,))
        delay_ns = block.max_queue_delay_us * 1000
        oldest = BatchRules(interface.batching, rows, preferred, max(preferred), delay_ns, False)
        return SequenceRules(block, block.slots(interface.max_batch_size), interface.batching, oldest)


def choose(instance: SequenceInstance, rules: SequenceRules, now_ns: int) -> tuple[list[LiveSequence], int]:
    """The sequences whose next requests form the instance's next batch; none, and when to check again, to wait."""
    ready = sorted(instance.ready, key=lambda sequence: sequence.queue[0].order)
    if not ready:
        return [], NEVER_NS
    if not rules.block.direct:
        formation = form_batch([sequence.queue[0] for sequence in ready], rules.oldest, now_ns)
        return ready[: formation.size], formation.until_ns
    delay_ns = rules.oldest.delay_ns
    if delay_ns and len(ready) < rules.block.minimum_slot_utilization * rules.slots:  # S35
        until_ns = min(sequence.queue[0].enqueued_ns for sequence in ready) + delay_ns
        if now_ns < until_ns:
            return [], until_ns
    signature = ready[0].queue[0].signature
    together = [sequence for sequence in ready if sequence.queue[0].signature == signature]
    together.sort(key=lambda sequence: sequence.slot)
    return together, 0
