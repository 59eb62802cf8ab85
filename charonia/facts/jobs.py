"""Jobs: requests that outlive the call that made them. Their states, events, ids and record. Pure.

A job is an ordinary request whose record carries `charonia.wire.FLAG_JOB` and which has a hash `job:{m}:<id>` in the
log. The hash is written only by scripts that decide about the request in the same step (accept, begin, settle), so it
never disagrees with what happened. What a caller sees of it is `gateway.jobs.jobs`'.

The log counts jobs by line: one priority level and one lane of tenants. What is served before a job follows from how
batchers serve the lines: all of a smaller level first (S8), the lanes of one level in turns by weight.

A `DeliveryNote` is kept beside a job's record: when a caller was first given its outcome.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import quote, unquote

import msgpack

from charonia.errors import InvalidRecord

_HEX = re.compile(r"[0-9a-f]{32}")

MOVED = "moved"
"""The event of a job that waits at another level from now on."""

MAX_IDEMPOTENCY_KEY_BYTES = 255
"""Longer keys are refused."""


class JobState(StrEnum):
    """Where a job is. It leaves `queued` and `running` once, for one of the others, and stays there."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


OUTCOME_CODES: Mapping[JobState, bytes] = {
    JobState.SUCCEEDED: b"s",
    JobState.FAILED: b"f",
    JobState.CANCELLED: b"c",
    JobState.EXPIRED: b"x",
}
"""One byte for each terminal state, as the journal's `ended` facts hold them; `-` is a request not journalled."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job as it is accepted. `id` is the request's 16 bytes; `size_bytes` that of its record.

    `key` and `digest` are 16-byte digests of (tenant, model, Idempotency-Key) and of what was asked; empty without a
    key. `about` is kept as it is: `webhook` (url, ...), `on_disconnect`, `client_id`, `version`, `deadline_us`, ...
    """

    id: bytes
    size_bytes: int
    accepted_us: int
    retention_s: int
    tenant: str = ""
    key: bytes = b""
    digest: bytes = b""
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def deadline_us(self) -> int:
        """Microseconds since the epoch, 0 for none."""
        deadline = self.about.get("deadline_us")
        return deadline if type(deadline) is int else 0


@dataclass(frozen=True, slots=True)
class JobTicket:
    """What accepting gave. `created` False: the key was known, `id` is the earlier job's, nothing was recorded.

    `durability` is the level reached: memory, fsync or replicated:<n>.
    """

    id: bytes
    created: bool
    durability: str


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job, recorded by the settlement that wins. `result` is the response record, empty for none.

    `detail` joins the job's last event: `executor`, `batch_rows`, `queue_us`, `infer_us`, `error`, `dead_letter`, ...
    """

    state: JobState
    result: bytes = b""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job: `number` counts from 1 within it, `kind` is past tense, `time_us` wall clock.

    Kinds: accepted, batched, returned, moved, succeeded, failed, cancelled, expired.
    """

    number: int
    kind: str
    time_us: int
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as the log has it; `result` is the response record once it has one (see `Jobs.job_result`)."""

    model: str
    id: bytes
    state: JobState
    tenant: str
    attempts: int
    size_bytes: int
    result_size_bytes: int
    accepted_us: int
    ended_us: int
    retention_s: int
    durability: str
    about: Mapping[str, Any]
    events: tuple[JobEvent, ...] = ()

    @property
    def public_id(self) -> str:
        return public_id(self.model, self.id)


def public_id(model: str, job_id: bytes) -> str:
    """The id callers see: `<32 hex digits>.<model>`; it tells any gateway which slot of the log to ask."""
    return f"{job_id.hex()}.{quote(model, safe='-_.~')}"


def parse_public_id(text: str) -> tuple[str, bytes] | None:
    """(model, id), or None for text that is no job id."""
    digits, _, model = text.partition(".")
    if not model or not _HEX.fullmatch(digits):
        return None
    return unquote(model), bytes.fromhex(digits)


Line = tuple[int, int]
"""(level, lane) of a queue stream."""

FIRST_LINE: Line = (0, 0)
"""Of models without priority levels and callers without a tenant: the log keeps no list of its own for it."""


@dataclass(frozen=True, slots=True)
class JobPlace:
    """A job's place as the log has it. `rank` are the active jobs of its own line that were accepted before it.

    `lines` are the active jobs of each line that has some, those that run and this one among them. `requests` are the
    model's unsettled requests, jobs among them; `paused` and `owner` are the model's.
    """

    line: Line
    rank: int
    lines: Mapping[Line, int]
    requests: int
    paused: bool = False
    owner: str = ""

    @property
    def active(self) -> int:
        return sum(self.lines.values())


@dataclass(frozen=True, slots=True)
class Ahead:
    """The jobs that are served before one: of smaller levels, of its own line, of other lanes' turns meanwhile.

    `calls` are the requests that are no jobs and may be among them: more are not there, fewer may be before it.
    """

    higher: int
    own: int
    turns: int
    calls: int = 0

    @property
    def jobs(self) -> int:
        return self.higher + self.own + self.turns


def ahead_of(place: JobPlace, weights: Mapping[int, int]) -> Ahead:
    """What is served before a job if nothing new came; `weights` are those of lanes, 1 where there is none.

    Exact where jobs of one line alone wait. Of another lane of the same level it is off by no more than one turn of it
    (the largest batch, times its weight) and one job, if all jobs have as many rows: whose turn it is now is not known.
    """
    level, lane = place.line
    share = max(1, weights.get(lane, 1))
    higher = turns = 0
    for (of_level, of_lane), count in place.lines.items():
        if of_level < level:
            higher += count
        elif of_level == level and of_lane != lane:
            turns += min(count, place.rank * max(1, weights.get(of_lane, 1)) // share)
    jobs = higher + place.rank + turns
    # calls are served as jobs are, and come and go with the queue: as many of them as there are parts of it before
    calls = max(0, place.requests - place.active)
    return Ahead(higher, place.rank, turns, -(-calls * (jobs + 1) // max(1, place.active)))


@dataclass(frozen=True, slots=True)
class DeliveryNote:
    """What a gateway notes when it first gives the outcome of a job to a caller: a note in the log (ADR 0070).

    The gateway writes it (`gateway.jobs.job_queries`), the console reads it (`charonia.console.stories`). A call that
    is no job has none: its settlement is its reply. `at_us` is a Unix time in microseconds, by the clock of `gateway`,
    an incarnation.
    """

    at_us: int
    gateway: str

    def pack(self) -> bytes:
        return bytes(msgpack.packb([self.at_us, self.gateway]))

    @staticmethod
    def unpack(data: bytes) -> DeliveryNote:
        """Raises `InvalidRecord`."""
        try:
            at_us, gateway, *_ = msgpack.unpackb(data)
            return DeliveryNote(int(at_us), str(gateway))
        except Exception as error:
            raise InvalidRecord(f"a note of a job's delivery cannot be read: {error}") from None
