"""The decisions of a `ModelScheduler`, in the imperative, as plain data; the service carries them out and settles."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import Struct, structs

from charonia.errors import ErrorCode
from charonia.wire import BatchPlaces

from .observations import RequestQueued

RejectReason = Literal["REJECTED", "CANCELED", "BACKEND", "OTHER"]
"""The `reason` label of the failure counter (M1). BACKEND: the request ran; its message has no prefix."""


class DispatchBatch(Struct, frozen=True):
    """Dispatch these requests, in this order, to an executor as one execution.

    `attempts[i]` is the attempt begun with `requests[i]` (from 1). With `via_owner`
    the executor passes the replies to the owner, which sends them on `ReleaseReplies` (preserve_ordering, S6).
    """

    batch_id: str
    executor: str
    version: int
    content_hash: str
    requests: list[RequestQueued]
    attempts: tuple[int, ...]
    via_owner: bool
    suspects: Literal["", "group", "apart"] = ""
    """A group that runs by itself; if `apart`, its executor runs nothing else of the model (`poison_isolation`)."""
    sequences: BatchPlaces | None = None
    """The slots of the requests, for a model with a sequence batcher."""

    def without(self, ids: Container[bytes]) -> DispatchBatch:
        """The batch without some of its requests."""
        kept = [n for n, request in enumerate(self.requests) if request.id not in ids]
        sequences = self.sequences
        if sequences is not None:
            sequences = replace(sequences, places=tuple(sequences.places[n] for n in kept))
        return structs.replace(
            self,
            requests=[self.requests[n] for n in kept],
            attempts=tuple(self.attempts[n] for n in kept),
            sequences=sequences,
        )


@dataclass(frozen=True, slots=True)
class RejectRequest:
    """Answer a request with an error: it will not run (again).

    `message` has no request-id prefix (E10), and gets none when it is `bare`, as errors of sequences and of time-outs
    are. If the request is running, `StopExecution` follows: the first settlement wins.
    """

    request: RequestQueued
    code: ErrorCode
    message: str
    reason: RejectReason
    bare: bool = False


@dataclass(frozen=True, slots=True)
class CondemnRequest:
    """A poison request: answer it with `message` and keep it as a dead letter (`poison_isolation`). `executor` is the
    last it ran on, `stderr` the last lines of the instance if known.
    """

    request: RequestQueued
    message: str
    stderr: str
    executor: str


@dataclass(frozen=True, slots=True)
class JoinEntries:
    """Settle the queue entries of both together: `again` is the request or wave `known`, read from another entry, for
    example because an operator has moved it. The scheduler goes on with one of them.
    """

    known: RequestQueued
    again: RequestQueued


@dataclass(frozen=True, slots=True)
class BurstWave:
    """Replace a wave by its requests, which then arrive one by one; the scheduler has forgotten the wave. `suspect`: it
    was in a batch when `executor` or its instance failed, so its requests are possible poison requests.
    """

    request: RequestQueued
    suspect: bool = False
    executor: str = ""


@dataclass(frozen=True, slots=True)
class StopExecution:
    """Tell an executor that this request of a batch it has is no longer wanted. `gentle`: its responses are."""

    request: RequestQueued
    batch_id: str
    executor: str
    gentle: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseReplies:
    """Send the replies that `BatchFinished` brought for this batch: everything before it has been answered (S6)."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class ForgetSequences:
    """Delete the log's records of these sequences, which ended without a last request: key to run."""

    runs: dict[bytes, bytes]


Decision = (
    DispatchBatch
    | RejectRequest
    | CondemnRequest
    | JoinEntries
    | BurstWave
    | StopExecution
    | ReleaseReplies
    | ForgetSequences
)
