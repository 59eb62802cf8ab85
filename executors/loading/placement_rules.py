"""Whether a model may be loaded on this executor: what its configuration asks for, and what the executor can do.

In the pool `default` an executor is expected to run all that its repository holds: what it cannot run is a load
failure, as Triton has it. In a pool with a name it leaves that to the other pools.
"""

from __future__ import annotations

from collections.abc import Callable

from charonia.errors import Unavailable
from charonia.models.placement import placement_of
from executors.repository.model_directory import ModelDirectory
from protos.model_config_pb2 import ModelInstanceGroup

from .capabilities import Capabilities

DEFAULT_POOL = "default"


class NotPlacedHere(Unavailable):
    """A model is not loaded here, and that is as it should be."""


class PlacementRules:
    """The rules of one executor."""

    def __init__(
        self, pool: str, capabilities: Capabilities, can_find_backend: Callable[[ModelDirectory], bool]
    ) -> None:
        self._pool = pool
        self._capabilities = capabilities
        self._can_find_backend = can_find_backend

    def select(self, directory: ModelDirectory) -> list[int]:
        """The versions that its configuration wants to be served here. Its files need not be there yet.

        Raises `NotPlacedHere` with the reason, or `InvalidArgument` for what cannot be understood or leaves none.
        """
        selected = directory.selected_versions()
        placement = placement_of(directory.required_config())
        labels = self._capabilities.labels() if placement.terms else {}
        if reason := placement.why_not(self._pool, labels):
            raise NotPlacedHere(reason)
        return selected

    def check(self, directory: ModelDirectory) -> None:
        """Whether what it needs to run is here, its files being so. Raises `NotPlacedHere` with what is missing.

        May read metadata: not for the event loop.
        """
        config = directory.required_config()
        if self._pool == DEFAULT_POOL:
            return
        if not self._can_find_backend(directory):
            raise NotPlacedHere(f"an executor of the pool '{self._pool}' has no backend '{config.backend}'")
        for number, group in enumerate(config.instance_group):
            wants_gpu = group.kind == ModelInstanceGroup.KIND_GPU or group.gpus
            if wants_gpu and self._capabilities.gpus <= max(group.gpus, default=0):
                which = f"GPU {max(group.gpus)}" if group.gpus else "GPU"
                name = group.name or f"{directory.name}_{number}"
                raise NotPlacedHere(
                    f"instance group '{name}' needs a GPU, and an executor of the pool '{self._pool}' has no {which}"
                )
