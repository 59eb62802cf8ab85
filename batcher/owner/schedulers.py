"""Chooses a model's scheduler, for sequences or for queues (C14), and its batching strategy.

A custom strategy (P22) is wrapped so that its errors cannot harm the batcher.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from batcher.scheduling.sequences.sequence_dispatch import Delays
from batcher.scheduling.sequences.sequence_scheduler import SequenceScheduler
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.batch_strategies import BatchCandidate, BatchStrategy, Joins, batch_strategy
from charonia.models.interface import ModelInterface

_log = logging.getLogger(__name__)

Scheduler = ModelScheduler | SequenceScheduler

_BINDING_BITS = 32
"""Bits of a binding's number below those of the token: no owner makes so many bindings."""


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
        sequences = SequenceScheduler(batch_prefix, token << _BINDING_BITS, delays)
        sequences.on_conflict = _log.warning
        return sequences
    return ModelScheduler(batch_prefix, prefetch, lane_weights, delays.requests)


def strategy_of(interface: ModelInterface) -> BatchStrategy | None:
    """None if the configuration names none. A strategy that is missing here, or fails, allows no other request to join:
    requests then run one by one, which any limit of the strategy allows.
    """
    try:
        strategy = batch_strategy(interface.parameters)
    except Exception as error:
        _log.error("the requests of model '%s' are not batched: %s", interface.name, error)
        return _JoinsNone()
    return None if strategy is None else _Guarded(interface.name, interface.parameters, strategy)


@dataclass(frozen=True, slots=True)
class _JoinsNone:
    def begin(self) -> Joins:
        return _refuse


class _Guarded:
    """Turns an exception of a custom strategy into the end of a batch instead of the model's scheduling; logs it once.
    Strategies with the same parameters are equal: if only a model's files change, nothing is queued or chosen again.
    """

    def __init__(self, model: str, parameters: Mapping[str, str], strategy: BatchStrategy) -> None:
        self._model = model
        self._parameters = parameters
        self._strategy = strategy
        self._told = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Guarded) and (self._model, self._parameters) == (other._model, other._parameters)

    def __hash__(self) -> int:
        return hash(self._model)

    def begin(self) -> Joins:
        try:
            joins = self._strategy.begin()
        except Exception as error:
            self._failed(error)
            return _refuse

        def asked(candidate: BatchCandidate) -> bool:
            try:
                return bool(joins(candidate))
            except Exception as error:
                self._failed(error)
                return False

        return asked

    def _failed(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            _log.error("the batch strategy of model '%s' failed, batches end there", self._model, exc_info=error)


def _refuse(_candidate: BatchCandidate) -> bool:
    return False
