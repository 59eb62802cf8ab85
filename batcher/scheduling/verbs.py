"""The interface of a scheduler to its owner: the verbs, and the queries for statistics and repairs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from .observations import Observation, RequestQueued


class Scheduler(Protocol):
    """A `ModelScheduler`, a `SequenceScheduler` or an `EnsembleScheduler`, which has decisions of its own.

    How to drive one: `docs/howto/scheduler.md`.
    """

    def observe(self, event: Observation, now_ns: int) -> list[Any]: ...

    def observe_all(self, events: Iterable[Observation], now_ns: int) -> list[Any]: ...

    def advance(self, now_ns: int) -> list[Any]: ...

    def next_wakeup(self) -> int | None: ...

    def find(self, request_id: bytes) -> RequestQueued | None: ...

    def waiting(self) -> list[RequestQueued]: ...

    def unended(self) -> list[RequestQueued]: ...

    def pending_count(self) -> int: ...

    def queued_by_version(self) -> dict[int, int]: ...

    def holding(self) -> list[tuple[str, int, list[RequestQueued]]]: ...

    def outstanding_requests(self) -> int: ...
