"""The facts that a `ModelScheduler` observes, as plain data; the scheduler decides what they mean for the queue.

All times are nanoseconds of the monotonic clock that the service also passes as `now_ns`; the service converts the
wall-clock times of records.
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
    """The state of a request. It moves along these and ends once."""

    QUEUED = 1
    """Waits for a batch. The initial state: code that queues many requests need not set it."""
    DELAYED = 2
    """Queued behind its level, because its time-out passed and the action is DELAY (S22)."""
    DISPATCHED = 3
    ENDED = 4
    SUSPECT = 5
    """Waits to run in a batch of its own, because an earlier batch with it failed (`poison_isolation`)."""


WAVE_BIT = 1
"""In this bit a wave's `signature` differs from that of its requests, so that neither shares a batch with the other."""


class RequestQueued(Struct, eq=False, gc=False):
    """A request was accepted. The object itself is the queue item, so it is observed once.

    `id` is 16 bytes, `level` the priority as sent (0: none), `rows` its batch size, `signature` equal for requests that
    may share a batch (S5), `timeout_us` the caller's queue time-out (0: none), `deadline_ns` 0 for none, `attempt` the
    last attempt that was begun (0: never run), which the scheduler increments when it dispatches. The scheduler returns
    the service's `carrier` unchanged. `lane` is its tenant's share of the level (`fair_sharing`). From `state` on, the
    fields belong to the scheduler.
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
    """What its record shares with others; always set by the batcher. Custom batching strategies read it (P22)."""
    count: int = 1
    """How many requests it stands for; `rows` is their sum."""
    wave: bool = False
    """It is a wave: it runs as a whole, on its first attempt only, or is burst into its requests (`BurstWave`)."""

    state: RequestState = RequestState.QUEUED
    queue_level: int = 0
    """The level that counts it, once mapped (S8)."""
    order: int = 0
    """Its position in the order of arrival."""
    away_ns: int = 0
    """Time spent in batches that were lost or returned; it does not count as time in the queue."""
    timeout_ns: int = 0
    """When its queue time-out passes; 0: never, or passed already (DELAYED)."""
    due_ns: int = 0
    """The next instant something happens to it in the queue: the earlier of time-out and deadline; 0: none."""
    delayed: bool = False
    """Its time-out passed and the action was DELAY; kept while dispatched, for its position if it is queued again."""
    settled: bool = False
    """Settled from outside while dispatched, or ended by the scheduler then: it is not run a second time."""
    cancelled: bool = False
    """Cancelled gently while dispatched: it may answer, but is not run a second time."""
    losses_apart: int = 0
    """How many executors were lost while they ran this request and nothing else of its model (`poison_isolation`, limit
    `MAX_LOSSES_APART`). Of a sequence: while it was alone in its batch (`sequence_batches`, limit `MAX_LOSSES_ALONE`).
    """
    responding: bool = False
    """A response of it is visible, and it has not ended: it is run again only if its model is repeatable. Of a
    resumable model: this run has given a response that those before had not.
    """


@dataclass(frozen=True, slots=True)
class WaveOpened:
    """A request of a queued wave must be handled alone, for example because it was cancelled."""

    id: bytes


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """The model has a new configuration; it applies to queued requests too, and to all versions."""

    interface: ModelInterface
    strategy: BatchStrategy | None = None
    """The custom batching strategy (P22)."""


@dataclass(frozen=True, slots=True)
class VersionServed:
    """An executor runs `slots` batches of a version at once. A second one replaces the first (reload)."""

    executor: str
    version: int
    content_hash: str
    slots: int


@dataclass(frozen=True, slots=True)
class VersionWithdrawn:
    """An executor takes no more batches of a version; it finishes or returns those it has."""

    executor: str
    version: int


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """An executor was lost or its heartbeat ended: it reports no more about its batches. `drained`: it left in order,
    so none of its requests caused that.
    """

    executor: str
    drained: bool = False


@dataclass(frozen=True, slots=True)
class ExecutorReturned:
    """An executor is heard of that may have been presumed dead: it lives, and its batches went to others."""

    executor: str


class BatchFinished(Struct, frozen=True):
    """Every request of a batch is settled and its slot is free. `replies_held`: the service keeps its replies (S6).
    `tokens` is how many it had, of prompts and answers; 0 if that is not known.
    """

    batch_id: str
    executor: str
    replies_held: bool = False
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchReturned:
    """An executor gave a batch back without running it."""

    batch_id: str
    executor: str


@dataclass(frozen=True, slots=True)
class BatchTooLarge:
    """A batch cannot be sent to its executor, because it has too many bytes. `message` is the error for the caller of a
    request that cannot be sent alone.
    """

    batch_id: str
    executor: str
    message: str


@dataclass(frozen=True, slots=True)
class BatchDied:
    """A batch ended its instance, and its slot is free. `ids` are its requests without an outcome.

    `reason` is the error for clients, `stderr` the instance's last lines. `blameless`: something else ended the
    instance. If a predecessor dispatched the batch, the requests of `ids` that wait are suspected. `in_company`: the
    instance had other batches too, so any of them may hold the culprit, or something outside ended it.
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
    """A batch's instance takes the next one, while this one still produces responses."""

    batch_id: str
    executor: str


@dataclass(frozen=True, slots=True)
class ResponsesBegun:
    """First responses to these requests of a batch are visible."""

    batch_id: str
    executor: str
    ids: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class ResponsesSeen:
    """A new owner found visible responses to these requests, of a model that is not repeatable (`keys.visible`). Those
    that no executor has at that time will not be run again.
    """

    ids: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class BatchRunning:
    """A new owner found a batch of its predecessor with an executor; `attempt` of each request is the one begun there.

    The requests may be known already (they leave the queue) or not; settled ones are left out. An empty batch still
    holds its slot. `sequences` are those of a sequence batcher's batch.
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
    """A predecessor's process ended together with its executor while that had a batch; `requests` of it wait here,
    unsettled. `members` is how many it had. `suspects` is as in `DispatchBatch`; an ordinary batch had failed once
    before. `losses_apart` of the requests are known. `stalled`: the process is this one and had lost its lease, so no
    request ended it.
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
    """The model wants another turn for these requests of a batch that is about to finish (S41)."""

    batch_id: str
    executor: str
    ids: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The caller no longer wants a request. `gentle`: if it runs, its model is notified, and it goes on."""

    id: bytes
    gentle: bool = False


@dataclass(frozen=True, slots=True)
class RequestSettled:
    """A request was settled from outside (by a cancel or a deadline): it is dropped silently and not run again."""

    id: bytes


@dataclass(frozen=True, slots=True)
class QueueHeld:
    """An operator holds the queue back (`held`) or releases it: while held, nothing is dispatched, all else goes on."""

    held: bool


@dataclass(frozen=True, slots=True)
class VersionsAbandoned:
    """Only the versions in `kept` will be served again: requests for others are refused (R27). `failures` has the load
    errors of versions that no executor could load.
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
    | BatchTooLarge
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
