"""Which scheduler decides for a model: the one of its sequence batcher, or the one of queues (C14)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from batcher.scheduling.observations import SequenceFound
from batcher.scheduling.sequences.sequence_scheduler import Delays, SequenceScheduler
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.errors import InvalidRecord
from charonia.facts.sequence_states import SequenceAbout
from charonia.models.interface import ModelInterface

_log = logging.getLogger(__name__)

Scheduler = ModelScheduler | SequenceScheduler

_BINDINGS_PER_OWNER = 32
"""Bits: no owner gives out so many places."""


def is_sequential(interface: ModelInterface | None) -> bool:
    """Whether a model has a sequence batcher."""
    return interface is not None and interface.sequence_batching is not None


def scheduler_for(
    interface: ModelInterface | None,
    batch_prefix: str,
    token: int,
    prefetch: int,
    lane_weights: Mapping[int, int],
    delays: Delays,
) -> Scheduler:
    """The scheduler of an owner with this token."""
    if is_sequential(interface):
        sequences = SequenceScheduler(batch_prefix, token << _BINDINGS_PER_OWNER, delays)
        sequences.on_conflict = _log.warning
        return sequences
    return ModelScheduler(batch_prefix, prefetch, lane_weights, delays.requests)


def sequences_found(records: Mapping[bytes, bytes]) -> Iterator[SequenceFound]:
    """What the log knows of live sequences; what cannot be read is logged and left out."""
    for key, about in records.items():
        try:
            yield SequenceFound(SequenceAbout.unpack(key, about))
        except InvalidRecord as error:
            _log.error("the record of sequence %r cannot be read: %s", key, error)
