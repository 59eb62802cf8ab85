"""Decides which models take waves: those whose requests may share any batch they fit, and are answered together."""

from __future__ import annotations

from charonia.batch_strategies import PARAMETER as STRATEGY
from charonia.models.ensemble import ENSEMBLE_SCHEDULING
from charonia.models.interface import ModelInterface
from charonia.models.latency_target import PARAMETER as TARGET
from executors.running.loaded_version import LoadedVersion


def takes_waves(incarnation: LoadedVersion) -> bool:
    """Whether requests for a loaded version may come as waves."""
    return not incarnation.pool.streams and are_alike_to(incarnation.interface)


def are_alike_to(interface: ModelInterface) -> bool:
    """Whether a model's scheduler treats all requests of one signature alike."""
    if interface.scheduling == ENSEMBLE_SCHEDULING:
        return False  # its owner runs it, and it may contain sequence models
    if interface.decoupled or interface.sequence_batching is not None:
        return False
    if interface.has_ragged_input or STRATEGY in interface.parameters or TARGET in interface.parameters:
        return False
    block = interface.dynamic_batching
    if block is None:
        return True
    whole = {max(1, interface.max_batch_size)}
    return not block.preserve_ordering and set(block.preferred_batch_sizes) <= whole
