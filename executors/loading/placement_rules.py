"""Decides whether a model may be loaded on this executor, from its configuration and the executor's capabilities.

In the pool `default` an executor must run all models of its repository: one that it cannot run is a failed load, as in
Triton. In a named pool it leaves such models to other pools.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

from charonia.errors import Unavailable
from charonia.models.placement import placement_of
from executors.backends.registry import BackendRegistry
from executors.host.memory import usable_bytes
from executors.repository.model_directory import ModelDirectory
from protos.model_config_pb2 import ModelInstanceGroup

DEFAULT_POOL = "default"
_GIB = 1024**3


class NotPlacedHere(Unavailable):
    """A model is placed elsewhere, which is no failure."""


class Capabilities:
    """One executor's capabilities as labels: devices, memory, processors, host, backends.

    `configured` labels override detected ones. Finding the backends reads the metadata of every installed distribution,
    so labels are detected only when they are first needed.
    """

    def __init__(self, registry: BackendRegistry, *, gpus: int, configured: Mapping[str, str]) -> None:
        self.gpus = gpus
        self._registry = registry
        self._configured = dict(configured)
        self._labels: dict[str, str] = {}

    def labels(self) -> dict[str, str]:
        """Return all labels; several values of one are joined by commas. The first call blocks: call it in a thread."""
        if not self._labels:
            self._labels = {
                "host": socket.gethostname(),
                "device": "cpu,gpu" if self.gpus else "cpu",
                "gpus": str(self.gpus),
                "cpus": str(len(os.sched_getaffinity(0))),
                "memory_gib": f"{usable_bytes() / _GIB:.2f}",
                "backend": ",".join(self._registry.available()),
                **self._configured,
            }
        return dict(self._labels)


class PlacementRules:
    """The placement rules of one executor."""

    def __init__(
        self, pool: str, capabilities: Capabilities, can_find_backend: Callable[[ModelDirectory], bool]
    ) -> None:
        self._pool = pool
        self._capabilities = capabilities
        self._can_find_backend = can_find_backend

    def select(self, directory: ModelDirectory) -> list[int]:
        """Return the versions to serve here according to the configuration. The model's files are not needed yet.

        Raises `NotPlacedHere` with the reason, or `InvalidArgument` for a malformed configuration or no version.
        """
        selected = directory.selected_versions()
        placement = placement_of(directory.required_config())
        labels = self._capabilities.labels() if placement.terms else {}
        if reason := placement.why_not(self._pool, labels):
            raise NotPlacedHere(reason)
        return selected

    def check(self, directory: ModelDirectory) -> None:
        """Check that a fetched model's backend and devices are available. Raises `NotPlacedHere` with what is missing.

        May read metadata: call it in a thread.
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
