"""One loaded version of a model: its source, interface and instances. `executors.loading.loader` makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from charonia.backend import ModelSource
from charonia.models.interface import ModelInterface
from charonia.wire import RequestRecord
from executors.batches.accounting import Executed

from .health import DEFAULT_INTERVAL_S
from .instance_pool import InstancePool


@dataclass(slots=True, eq=False)
class LoadedVersion:
    """A loaded version, its instances, and the results of its warm-up, which are counted (I12)."""

    model: str
    """The model's key."""
    source: ModelSource
    interface: ModelInterface
    content_hash: str
    pool: InstancePool
    labels: dict[str, list[str]]
    warmed: list[tuple[Sequence[RequestRecord], Executed]]
    load_ns: int
    health_interval_s: float = DEFAULT_INTERVAL_S
    health: asyncio.Task[None] | None = None
    """The task of its health checks while it is served (P6)."""

    @property
    def version(self) -> int:
        return self.source.version
