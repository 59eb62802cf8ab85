"""What a `ModelScheduler` wants done, in the imperative, as plain data; the service carries it out and settles."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

from charonia.errors import ErrorCode
from charonia.wire import BatchPlaces

from .observations import QueuedRequest

RejectReason = Literal["REJECTED", "CANCELED", "BACKEND", "OTHER"]
"""The `reason` label of the failure counter (M1). BACKEND: it ran, and its message has no prefix."""


@dataclass(slots=True)
class DispatchBatch:
    """Give these requests, in this order, to an executor as one execution. Never changed (see `BatchHeader`).

    `attempts[i]` is the attempt begun with `requests[i]` (from 1). With `via_owner` the executor hands the replies to
    the owner, which sends them on `ReleaseReplies` (preserve_ordering, S6).
    """

    batch_id: str
    executor: str
    version: int
    content_hash: str
    requests: list[QueuedRequest]
    attempts: tuple[int, ...]
    via_owner: bool
    suspects: Literal["", "group", "apart"] = ""
    """A group that runs by itself, `apart` with nothing else of the model at its executor (`poison_isolation`)."""
    sequences: BatchPlaces | None = None
    """Where the requests belong, of a model with a sequence batcher."""

    def without(self, ids: Container[bytes]) -> DispatchBatch:
        """The batch without some of its requests."""
        kept = [n for n, request in enumerate(self.requests) if request.id not in ids]
        sequences = self.sequences
        if sequences is not None:
            sequences = replace(sequences, places=tuple(sequences.places[n] for n in kept))
        return replace(
            self,
            requests=[self.requests[n] for n in kept],
            attempts=tuple(self.attempts[n] for n in kept),
            sequences=sequences,
        )


@dataclass(frozen=True, slots=True)
class RejectRequest:
    """Answer a request with an error: it will not run (again). `message` has no request-id prefix (E10), and gets none
    when it is `bare`, as errors of sequences and of time-outs are.

    It may be running, then `StopExecution` follows: the first settlement wins.
    """

    request: QueuedRequest
    code: ErrorCode
    message: str
    reason: RejectReason
    bare: bool = False


@dataclass(frozen=True, slots=True)
class CondemnRequest:
    """A request ended whatever ran it: answer it with `message` and keep it as a dead letter (`poison_isolation`).

    `executor` is the last it ran on, `stderr` the last lines of the instance where it is known.
    """

    request: QueuedRequest
    message: str
    stderr: str
    executor: str


@dataclass(frozen=True, slots=True)
class BurstWave:
    """Replace a wave by its requests, which then arrive one by one; the scheduler has forgotten it.

    `suspect`: it was aboard when `executor` or an instance of it ended, so its requests are possible poison requests.
    """

    request: QueuedRequest
    suspect: bool = False
    executor: str = ""


@dataclass(frozen=True, slots=True)
class StopExecution:
    """Tell an executor that this request of a batch it has is no longer wanted."""

    request: QueuedRequest
    batch_id: str
    executor: str


@dataclass(frozen=True, slots=True)
class ReleaseReplies:
    """Send the replies that `BatchFinished` brought for this batch: everything before it is answered (S6)."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class ForgetSequences:
    """Forget what the log knows of these sequences, which ended without a last request: key to run."""

    runs: dict[bytes, bytes]


Decision = DispatchBatch | RejectRequest | CondemnRequest | BurstWave | StopExecution | ReleaseReplies | ForgetSequences
