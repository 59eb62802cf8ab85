"""The facts a `ModelScheduler` is told, as plain data; what they mean for the queue is the scheduler's.

All times are nanoseconds of the one monotonic clock that the service also passes as `now_ns`; turning wall-clock times
of records into it is the service's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from msgspec import Struct

from charonia.batch_strategies import BatchStrategy
from charonia.facts.sequence_states import SequenceAbout
from charonia.models.interface import ModelInterface
from charonia.wire import BatchPlaces, RequestMeta, SequenceMark


class RequestState(IntEnum):
    """Where a request is. It moves along these and ends once."""

    QUEUED = 1
    """Waits for a batch, from the beginning: who queues many need not say so of each."""
    DELAYED = 2
    """Queued behind its level, because its time-out passed and the action is DELAY (S22)."""
    DISPATCHED = 3
    ENDED = 4
    SUSPECT = 5
    """Waits to run in a batch of its own, because a batch it was in ended badly (`poison_isolation`)."""


class RequestQueued(Struct, eq=False, gc=False):
    """A request was accepted; the object itself is the queue item, so it is observed once and never again.

    `id` is 16 bytes, `level` the priority as sent (0: none), `rows` its batch size, `signature` equal for requests that
    may share a batch (S5), `timeout_us` the caller's queue time-out (0: none), `deadline_ns` 0 for none, `attempt` the
    last attempt that was begun (0: never run), which the scheduler counts up when it dispatches. `carrier` is the
    service's own and is handed back untouched. `lane` is its tenant's share of the level (`fair_sharing`). From
    `state` on, the fields are the scheduler's.
    """

    id: bytes
    version: int
    level: int
    rows: int
    signature: int
    timeout_us: int
    deadline_ns: int
    enqueued_ns: int
    attempt: int = 0
    carrier: Any = None
    lane: int = 0
    sequence: SequenceMark | None = None
    meta: RequestMeta | None = None
    """What it shares with others of its signature; for strategies of batching (P22)."""
    count: int = 1
    """How many requests it stands for; `rows` are those of all of them."""
    wave: bool = False
    """It is a wave: it runs as a whole, first attempts only, or is burst into its requests (`BurstWave`)."""

    state: RequestState = RequestState.QUEUED
    queue_level: int = 0
    """The level it counts on, once mapped (S8)."""
    order: int = 0
    """Place in the order of arrival."""
    away_ns: int = 0
    """Time spent dispatched in batches that were lost or returned: no part of its time in the queue."""
    timeout_ns: int = 0
    """When its queue time-out passes; 0: never, or passed already (DELAYED)."""
    due_ns: int = 0
    """The next instant something happens to it in the queue: the earlier of time-out and deadline; 0: none."""
    delayed: bool = False
    """Its time-out passed and the action was DELAY; also while dispatched, for its place should it come back."""
    settled: bool = False
    """Settled from outside while dispatched, or ended by us then: it is not run a second time."""
    losses_apart: int = 0
    """Executors lost while they had this request and nothing else of its model (`poison_isolation`)."""
    responding: bool = False
    """A response of it is visible, and it has not ended: only a repeatable model is run again."""


QueuedRequest = RequestQueued
"""The name of the same object once it is in the queue."""


@dataclass(frozen=True, slots=True)
class WaveOpened:
    """A request of a queued wave has to be treated by itself: it was cancelled, say."""

    id: bytes


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """The model has a new configuration; it holds for what is queued already and for all versions."""

    interface: ModelInterface
    strategy: BatchStrategy | None = None
    """Who may join a batch besides (P22)."""


@dataclass(frozen=True, slots=True)
class VersionServed:
    """An executor runs `slots` batches of a version at once. A second one replaces the first (reload)."""

    executor: str
    version: int
    content_hash: str
    slots: int


@dataclass(frozen=True, slots=True)
class VersionWithdrawn:
    """An executor takes no more batches of a version; what it has, it finishes or returns."""

    executor: str
    version: int


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """An executor died or its heartbeat ended: nothing it was given will be reported any more.

    `drained`: it left by itself, so nothing it had can be what ended it.
    """

    executor: str
    drained: bool = False


@dataclass(frozen=True, slots=True)
class ExecutorReturned:
    """An executor is heard of that may have been taken for lost: it lives, what it had others have."""

    executor: str


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """Every request of a batch is settled and its slot is free. `replies_held`: the service keeps its replies (S6)."""

    batch_id: str
    executor: str
    replies_held: bool = False


@dataclass(frozen=True, slots=True)
class BatchReturned:
    """An executor gave a batch back without running it."""

    batch_id: str
    executor: str


@dataclass(frozen=True, slots=True)
class BatchDied:
    """A batch took its instance with it and its slot is free. `ids` are its requests without an outcome.

    `reason` is what a caller reads, `stderr` the instance's last lines. `blameless`: something else ended the instance.
    Of a batch that a predecessor gave out, those of `ids` that wait are suspected. `in_company`: the instance had other
    batches too, so that the culprit may be with them.
    """

    batch_id: str
    executor: str
    ids: frozenset[bytes]
    reason: str
    stderr: str = ""
    blameless: bool = False
    in_company: bool = False


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """A batch's instance takes the next one, while responses of this one are still to come."""

    batch_id: str
    executor: str


@dataclass(frozen=True, slots=True)
class ResponsesBegun:
    """First responses of these requests of a batch are visible."""

    batch_id: str
    executor: str
    ids: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class ResponsesSeen:
    """A new owner found that responses of these are visible, of a model that is not repeatable (`keys.visible`).

    Whatever of them is with no executor by then will not be run again.
    """

    ids: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class BatchRunning:
    """A new owner found a batch of its predecessor with an executor; `attempt` of each request is the one begun there.

    The requests may be known already (they are taken out of the queue) or not; settled ones are left out. An empty
    batch still holds its slot. `sequences` are those of a sequence batcher's batch.
    """

    batch_id: str
    executor: str
    version: int
    requests: Sequence[RequestQueued]
    via_owner: bool = False
    sequences: BatchPlaces | None = None
    content_hash: str = ""


@dataclass(frozen=True, slots=True)
class BatchLost:
    """A predecessor's process ended with its executor while that had a batch; `requests` of it wait here, unsettled.

    `members` is how many it had. `suspects` is what the batch was (`DispatchBatch`); an ordinary one had been aboard
    once before. `losses_apart` of the requests are known. `stalled`: the process is this one and had lost its lease,
    so that nothing ended it.
    """

    executor: str
    requests: Sequence[RequestQueued]
    members: int
    suspects: str
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class SequenceFound:
    """A new owner found a live sequence of its predecessor; `about` is the log's record of it."""

    about: SequenceAbout


@dataclass(frozen=True, slots=True)
class RequestsRescheduled:
    """The model wants another turn of these requests of a batch that is about to finish (S41)."""

    batch_id: str
    executor: str
    ids: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The caller no longer wants a request."""

    id: bytes


@dataclass(frozen=True, slots=True)
class RequestSettled:
    """A request was settled from outside (a cancel, a deadline): it is dropped silently and not run again."""

    id: bytes


@dataclass(frozen=True, slots=True)
class QueueHeld:
    """An operator holds the queue back (`held`) or lets it go: nothing is dispatched meanwhile, all else goes on."""

    held: bool


@dataclass(frozen=True, slots=True)
class VersionsAbandoned:
    """Only the versions in `kept` will be served again: what waits for others is refused (R27).

    `failures` says of a version why no executor could load it, where that is so.
    """

    kept: frozenset[int]
    failures: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallRefused:
    """A request that a model made can never run (`wait_cycles`): it is answered with UNAVAILABLE and `message`."""

    id: bytes
    message: str


Observation = (
    RequestQueued
    | WaveOpened
    | PolicyChanged
    | VersionServed
    | VersionWithdrawn
    | ExecutorLost
    | ExecutorReturned
    | BatchFinished
    | BatchReturned
    | BatchDied
    | BatchRunning
    | BatchLost
    | SequenceFound
    | RequestsRescheduled
    | RequestCancelled
    | RequestSettled
    | QueueHeld
    | VersionsAbandoned
    | SlotFreed
    | ResponsesBegun
    | ResponsesSeen
    | CallRefused
)
