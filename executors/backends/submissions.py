"""Batches under way in an instance that takes several at a time: each is run by a thread that waits for its result.

`executors.running.deep_workers` has the threads, in the process of an isolated model `executors.isolation.child` does.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Protocol, runtime_checkable

from charonia.backend import Array, BatchInstance, Interrupted, Outcome, SubmittingInstance
from charonia.errors import InternalError


@runtime_checkable
class ParallelInstance(Protocol):
    """An instance that itself has what runs its batches at the same time: one of another process."""

    parallel_parts: Sequence[BatchInstance]


@runtime_checkable
class CancellablePart(BatchInstance, Protocol):
    """What runs one batch at a time of an instance that has several, and can cancel it."""

    def cancel(self) -> None:
        """Cancel the batch unless it has begun; in another thread. One that has just ended may be meant."""


def depth_of(instance: object) -> int:
    """How many batches an instance may have under way."""
    if isinstance(instance, ParallelInstance):
        return max(1, len(instance.parallel_parts))
    return max(1, int(instance.depth)) if isinstance(instance, SubmittingInstance) else 1


def parts_of(instance: BatchInstance) -> Sequence[BatchInstance]:
    """Returns what runs one batch at a time each, all of them at the same time: as many as `depth_of` says."""
    if isinstance(instance, ParallelInstance):
        return instance.parallel_parts
    if not isinstance(instance, SubmittingInstance):
        return [instance]
    submitting = threading.Lock()
    return [Submission(instance, submitting) for _ in range(depth_of(instance))]


class Submission:
    """A `BatchInstance` that submits one batch at a time to a `SubmittingInstance`, and waits for it.

    Attributes that are read for each batch are those of the instance.
    """

    def __init__(self, instance: SubmittingInstance, submitting: threading.Lock) -> None:
        """`submitting` is held while a batch is submitted; it is that of all submissions of the instance."""
        self._instance = instance
        self._submitting = submitting
        self._future: Future[Mapping[str, Array] | Outcome] | None = None
        self._is_cancelled = False

    @property
    def batch_sizes(self) -> Collection[int]:
        """See `BatchInstance`."""
        return getattr(self._instance, "batch_sizes", ())

    @property
    def rows_fail_alone(self) -> bool:
        """See `BatchInstance`."""
        return bool(getattr(self._instance, "rows_fail_alone", False))

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array] | Outcome:
        """Submit a batch and wait for it. Raises what the instance raises, `Interrupted` after `cancel`."""
        self._is_cancelled = False
        with self._submitting:
            future = self._instance.submit(inputs, outputs)
        if not isinstance(future, Future):
            raise InternalError(f"submit returned a {type(future).__name__}; it must be a concurrent.futures.Future")
        self._future = future
        try:
            return future.result()
        except CancelledError:
            if not self._is_cancelled:
                raise InternalError("the backend cancelled a batch that was submitted to it") from None
            raise Interrupted("a batch was cancelled", blameless=True) from None
        finally:
            self._future = None

    def cancel(self) -> None:
        """See `CancellablePart`."""
        future = self._future
        if future is not None:
            self._is_cancelled = True
            future.cancel()

    def close(self) -> None:
        """Does nothing: the instance is closed itself."""
