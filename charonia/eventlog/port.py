"""The log as services see it, by roles: each part gets the role that it uses. Pure interface, no I/O.

`Streams` (entries in order), `Work` (accepted requests) with `Waves` (many of them in one entry), `Progress` (how far
they are, of resumable models), `Jobs`, `Journals`, `Sequences`, `Leases` (who owns what, who lives), `Notes`
(values and times by key), `Statistics`, `Blobs` and `Capacity` (the memory the log uses).
`EventLog` is all of them, for the code that opens it and for parts that pass roles on to others.

Its adapter is `charonia.eventlog.redis` (Redis or Valkey >= 7.0, one server or a cluster); tests have one in memory
(tests/rigs/memory_log). One contract suite (tests/contract) runs over all. Every method that cannot reach the log
raises `charonia.errors.LogUnavailable`.

Streams have one reader each, which remembers its place; entries are deleted when what they carry is settled.
There are no consumer groups: the single owner of a model makes pending lists a second truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from charonia.errors import CharoniaError
from charonia.facts.jobs import JobEnd, JobPlace, JobRecord, JobTicket, NewJob
from charonia.facts.journal import Ran
from charonia.facts.sequence_states import SequenceStep
from charonia.tensors import Buffer

Fields = Sequence[Buffer]
"""Alternating field names and values of an entry: [b"h", header, b"r", record, b"r", record, ...]."""

START = b"0-0"

MAX_STRING_BYTES = 512 << 20
"""The longest string that a server of the log takes (its `proto-max-bulk-len`, unless that is configured). For a longer
one it ends the connection, and with it what others had sent on that: the adapter refuses it before it writes.
"""

MAX_RECORD_BYTES = 500_000_000
"""Of one record as it is made. Receipt, durations and report, which are added later, fit in what is left of
`MAX_STRING_BYTES`.
"""

MAX_ENTRY_BYTES = 2 * MAX_RECORD_BYTES
"""Of all values of an entry: a server refuses an entry of more than 1 GiB. Records of one field are one string."""

MOST_TAKEN = 1000
"""Members that one `keep_recent` takes out at most."""


class Entry(Struct):
    """One stream entry. `id` is opaque but ordered within its stream; `fields` alternate name and value."""

    id: bytes
    fields: list[Buffer]


OnEntries = Callable[[bytes, list[Entry]], None]
"""Called in the event loop with a stream's name and its next entries, oldest first. Must not block or raise."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Fields to append to a stream along with a settlement."""

    stream: bytes
    fields: Fields


Settled = Callable[[list[bool] | CharoniaError], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of unsettled work, checked exactly when it is accepted; 0 = no bound. For a model, and for a tenant."""

    requests: int = 0
    size_bytes: int = 0
    tenant_requests: int = 0
    tenant_size_bytes: int = 0


def kept_response(entry: Entry) -> tuple[int, int, bytes]:
    """(attempt, index, record) of an entry of `keys.job_responses`."""
    _, attempt, _, record = entry.fields
    return int(bytes(attempt)), int(entry.id.partition(b"-")[0]) - 1, bytes(record)


class StreamReader(Protocol):
    """Follows a changing set of streams on a connection of its own and hands entries to callbacks, in order.

    Reconnects by itself, with jitter, and goes on where it was. `on_state(up: bool)` is told when the log is lost and
    found again.
    """

    def start(self, on_entries: OnEntries | None = None, on_state: Callable[[bool], None] | None = None) -> None:
        """`on_entries` gets the entries of streams that were added without a callback of their own."""

    def add(self, stream: bytes, after: bytes = START, *, consume: bool = False, take: OnEntries | None = None) -> None:
        """Follow a stream from after an entry id. `consume`: entries are deleted once the callback has had them.

        `after=b"$"` means only entries appended from now on. Adding a followed stream again changes nothing.
        """

    def remove(self, stream: bytes) -> None: ...

    async def close(self) -> None: ...


Sent = Callable[[bytes | CharoniaError], None]
"""Called with the id of an appended entry once its level is reached, or with the error."""


class EndedWave(Struct, frozen=True):
    """An executed wave: its entry in a queue stream, how many of its requests succeeded, and their rows together."""

    stream: bytes
    entry_id: bytes
    succeeded: int = 0
    rows: int = 0


Ended = Callable[[Sequence[bool] | CharoniaError], None]
"""Called with whether each wave was still there, or with the error."""
Counted = Callable[[CharoniaError | None], None]
"""Called with None once the statistics are written, or with the error."""


class Waves(Protocol):
    """The log's role for waves: similar requests in one queue entry, which marks them as unsettled while it exists.

    A wave is accepted by one append and settled by one deletion: the first deletion wins (docs/adr/0015). A process
    that must handle its requests one by one bursts it into ordinary entries first. Lanes are open already: the first
    request of each goes through `Work.accept`.
    """

    def send(self, stream: bytes, record: Sequence[Buffer], done: Sent) -> bool:
        """Append a wave, given in pieces, to a queue stream, at the server's own durability level.

        It is written with the next `flush`, or at the end of the tick; `done` is called later. False when it cannot be
        written now: then nothing was done. The same holds for every error that it raises: the sender sends the requests
        another way, so a model would compute those of a wave that was taken twice.
        """

    def flush(self) -> None:
        """Write everything sent so far at once."""

    def end(
        self,
        waves: Sequence[EndedWave],
        statistics: tuple[bytes, Mapping[str, int]],
        replies: Sequence[Reply],
        done: Ended,
    ) -> bool:
        """Append `replies`, then delete these waves of one model: they are settled. Written with this tick; as `send`
        otherwise.

        In the same step as the deletions, their increments are added to the statistics of that key. Those of waves that
        were not there any more are left out (`charonia.facts.counters.without`): who settles requests counts them.
        """

    def count(self, key: bytes, increments: Mapping[str, int], done: Counted) -> bool:
        """`Statistics.add_statistics`, as `end`: one tick's settlements and statistics are one write."""

    async def burst(
        self,
        model: str,
        stream: bytes,
        entry_id: bytes,
        requests: Sequence[tuple[bytes, int]],
        fields: Fields,
        *,
        tenant: str = "",
    ) -> bytes:
        """Replace a wave by an entry with `fields` that carries its requests (id, size_bytes) one by one, in one step.
        From then on they are unsettled and counted as those of `Work.accept`. Returns the new entry's id; b"" when the
        wave was settled or burst before.
        """

    async def waiting(self, stream: bytes, entry_ids: Sequence[bytes]) -> list[bool]:
        """Whether the stream still has each of these entries; a wave has its own until it is settled or burst."""

    async def queue_entries(self, model: str) -> int:
        """How many entries a model's queues have, with those of running waves and recently settled ones."""

    async def lease(self, model: str, holder: str, requests: int, size_bytes: int, limits: Limits) -> bool:
        """Reserve capacity for so many requests and bytes under a model's bounds, instead of the holder's former lease.
        Senders count waves against their own lease, so that none costs the log a count. False, and nothing changed,
        when a bound of `limits` would be exceeded. 0 and 0 end a lease.
        """

    async def leases(self, model: str) -> list[str]:
        """The holders of leases of a model, in no order."""


class Streams(Protocol):
    """Entries in order, each stream with one reader."""

    async def append(self, stream: bytes, fields: Fields) -> bytes:
        """Append one entry; returns its id. Commands of one event loop tick leave in one write."""

    async def delete_entries(self, stream: bytes, ids: Sequence[bytes]) -> None: ...

    async def range(self, stream: bytes, after: bytes = START, count: int = 1000) -> list[Entry]:
        """Up to `count` entries with ids above `after`, oldest first."""

    async def delete_stream(self, stream: bytes) -> None: ...

    def reader(self) -> StreamReader: ...


class Work(Protocol):
    """The accepted requests of a model: counted, bounded, unsettled until their first settlement."""

    @property
    def waves(self) -> Waves: ...

    async def accept(
        self,
        model: str,
        level: int,
        lane: int,
        requests: Sequence[tuple[bytes, int]],
        fields: Fields,
        limits: Limits,
        *,
        tenant: str = "",
        journalled: bool = False,
        durability: str = "",
    ) -> None:
        """Record requests, all or none: append `fields` as one entry of the queue and count each (id, size_bytes).

        A lane's first entry also appends `LaneOpened` to the model's facts. Raises `ResourceExhausted` when a bound of
        `limits` would be passed, naming the bound. All requests are one tenant's, their ids are
        new, and ids that differ in their last byte alone never belong to two tenants. `durability`
        (memory, fsync, replicated:<n>; "" is the server's level) is reached when this returns; when the entry is
        written but the level is not reached in time, raises `LogUnavailable`: the outcome is unknown.
        """

    async def settle(
        self,
        model: str,
        requests: Sequence[tuple[bytes, int]],
        statistics: tuple[bytes, Mapping[str, int]] | None,
        replies: Sequence[Reply],
        facts: Sequence[Reply] = (),
        *,
        ends: Mapping[bytes, JobEnd] | None = None,
        outcomes: bytes = b"",
        ran: Ran | None = None,
        sequences: Mapping[bytes, SequenceStep] | None = None,
        rows: Sequence[int] = (),
    ) -> list[bool]:
        """End (id, attempt) requests; the first settle of a request wins, a settle of an older attempt is fenced.

        `ends` holds how the jobs among them end: one that is won gets its end, result and last event recorded in the
        same step, and the ended jobs of the model are kept within its retention (`set_retention`). The end of a job
        whose `about` has a `webhook` appends [b"i", its id in hex] to `keys.webhooks(model)`. `outcomes` has one byte
        for each request (`charonia.facts.jobs.OUTCOME_CODES`, `-` for none): when any of these is won, the journal gets
        an `ended` fact, which says that all of them had started in `ran`, if that is given.

        `sequences` holds, for requests of sequences, what becomes of the sequence's record; in the same step, for those
        that are won.

        Returns which of them this call won. `statistics` (key, increments) is applied when all were won. With `rows`,
        those of each request, all of which succeeded in the executions that the increments count, the others are left
        out when some were won (`charonia.facts.counters.without`). Without, the caller computes what it won and calls
        `add_statistics`. Increments named `last_*` are maxima, not sums.

        `replies` are appended before the settlement and `facts` after it, all in one write, won or not: a write that
        is cut short leaves a request answered but unsettled (it runs again and its reader drops the duplicate), never
        settled and unanswered.
        """

    def settle_now(
        self,
        model: str,
        requests: Sequence[tuple[bytes, int]],
        statistics: tuple[bytes, Mapping[str, int]] | None,
        replies: Sequence[Reply],
        facts: Sequence[Reply],
        done: Settled,
        *,
        outcomes: bytes = b"",
        ran: Ran | None = None,
        rows: Sequence[int] = (),
    ) -> bool:
        """`settle` without jobs and sequences, written at once and without a task that waits for it.

        All requests are journalled when there are `outcomes`, else none. `done` is called later in the event loop, with
        what `settle` would return or the error it would raise. False when this cannot be done now: then nothing was
        done, and it is `settle`'s turn.
        """

    async def begin_attempt(
        self,
        model: str,
        token: int,
        ids: Sequence[bytes],
        attempt: int,
        *,
        jobs: Sequence[bytes] = (),
        journalled: Sequence[bytes] = (),
        executor: str = "",
        batch_id: str = "",
    ) -> list[bool]:
        """Raise the attempt of requests before they are executed; False for those already settled.

        Needed before every attempt but the first, and before the first of jobs and of journalled requests: `jobs`
        become running and get a `batched` event, `journalled` ones a `batched` journal fact, unless settled; without an
        `executor` (of an ensemble, which none runs) the event has no detail. Raises
        `charonia.errors.Cancelled` when `token` is no longer the model's owner token (a stalled former owner).
        """

    async def unsettled(self, model: str, ids: Sequence[bytes]) -> list[int]:
        """For each id the attempt it is at (0: accepted, never retried), or -1 when it is settled or unknown."""

    async def unsettled_ids(self, model: str) -> list[bytes]:
        """Every unsettled request, in no order. Scans all of them in the log, so it is for repairs only."""

    async def pending(self, model: str) -> tuple[int, int]:
        """(requests, bytes) accepted and unsettled, exact."""

    async def pending_of_tenants(self, model: str, tenants: Sequence[str]) -> list[tuple[int, int]]: ...

    async def set_paused(self, model: str, paused: bool) -> None:
        """Store whether a model's queue is held back; a `QueueCommanded` fact notifies its owner."""

    async def paused(self, model: str) -> bool: ...

    async def lanes(self, model: str) -> list[tuple[int, int]]:
        """(level, lane) of every queue stream the model has had."""


@dataclass(frozen=True, slots=True)
class ProgressPart:
    """Records of one request, those of its responses `first_index`, `first_index + 1`, ... in this attempt."""

    id: bytes
    attempt: int
    first_index: int
    records: Sequence[bytes]


FENCED = -1
"""Of `Progress.append_progress`: the request is settled, unknown or at a later attempt."""
OTHERWISE = -2
"""The log has another record at one of these places."""


class Progress(Protocol):
    """How far requests of resumable models are: a record for each response that may be seen. It goes with the request,
    when `Work.settle` ends it.
    """

    async def append_progress(self, model: str, parts: Sequence[ProgressPart]) -> list[int]:
        """Append records, each request's at its own place; parts of one request follow one another.

        Returns for each part how many records the request has. That is at least `first_index + len(records)` when they
        were appended, or were before. Less than `first_index`: those before are missing, nothing was appended.
        `FENCED` and `OTHERWISE` likewise. Only `Work.begin_attempt` fences earlier attempts.
        """

    async def append_progress_and_replies(
        self, model: str, parts: Sequence[ProgressPart], replies: Sequence[Reply]
    ) -> tuple[list[int], bool]:
        """`append_progress`, and `Streams.append` of the entries in the same step if all records were taken.

        Returns the numbers, and whether the entries were appended. An adapter that cannot do both at once appends none.
        """

    async def progress(self, model: str, ids: Sequence[bytes]) -> list[list[bytes]]:
        """The records of each request, by index. After `begin_attempt` only that attempt adds to them."""

    async def progress_ids(self, model: str) -> list[bytes]:
        """The requests that have records, in no order."""

    async def drop_progress(self, model: str, ids: Sequence[bytes]) -> None:
        """Delete the records of requests: for those that were settled by a release that does not know of them."""


class Jobs(Protocol):
    """The jobs of a model, their records and events, and the journal."""

    async def accept_job(
        self,
        model: str,
        level: int,
        lane: int,
        job: NewJob,
        fields: Fields,
        limits: Limits,
        *,
        journalled: bool = True,
        durability: str = "",
    ) -> JobTicket:
        """Record one job as `accept` records a request, with its job record and its idempotency record, in one step.

        A known key gives the earlier job's ticket and records nothing. Raises `KeyReused` when that one asked for
        something else, and what `accept` raises.
        """

    async def job(self, model: str, job_id: bytes) -> JobRecord | None:
        """A job with its events, without its result. Raises `InternalError` for a record that cannot be read."""

    async def jobs_of_keys(self, model: str, key_digests: Sequence[bytes]) -> list[bytes | None]:
        """The id of the job that each idempotency key stands for (`NewJob.key`); None for a key of no job."""

    async def job_result(self, model: str, job_id: bytes) -> bytes | None:
        """The response record of an ended job; None when there is none (any more)."""

    async def add_job_responses(
        self, model: str, job_id: bytes, attempt: int, first_index: int, records: Sequence[Buffer]
    ) -> bool:
        """Keep response records of a running job, whose places are (attempt, first_index), (attempt, first_index + 1).

        An index that is not above all kept ones is passed over: it is a later attempt's and was visible before. False,
        and nothing kept, when the job has ended, is unknown or has begun a later attempt. The job's last record is not
        among them: it is its result (`settle`). They count towards the job's size (`set_retention`) and go with it.

        They are entries of the stream `keys.job_responses`, which may be followed: ids `<index + 1>-0`.
        """

    async def job_responses(
        self, model: str, job_id: bytes, after_index: int = -1, count: int = 100
    ) -> list[tuple[int, int, bytes]]:
        """Up to `count` kept responses (attempt, index, record) with an index above `after_index`, by index."""

    async def add_job_event(self, model: str, job_id: bytes, kind: str, detail: Mapping[str, object]) -> bool:
        """Add an event to a job that has not ended; False when it has or is unknown.

        `returned` makes a running job a queued one again; `moved` says the `level` it waits at from now on.
        """

    async def jobs(
        self, model: str, *, ended: bool, after: tuple[int, bytes] | None = None, count: int = 100
    ) -> list[JobRecord]:
        """Jobs without events: active ones oldest first, or ended ones newest first; `after` is (time_us, id) of the
        last one seen (accepted or ended). Ids whose record has expired are skipped and forgotten, those whose record
        cannot be read are skipped.
        """

    async def job_position(self, model: str, job_id: bytes) -> JobPlace | None:
        """A job's position among the active ones of its model; None when it is not active. With more than 1,024 levels
        and lanes they are not distinguished: all count as one line.
        """

    async def job_models(self) -> list[str]:
        """Models that have had jobs."""

    async def set_retention(self, model: str, *, size_bytes: int, journal_s: int, journal_size_bytes: int) -> None:
        """How much of ended jobs (records with results) and of the journal a model keeps, 0 = no bound.

        Kept in the log. A record is counted as 512 bytes, its result and the texts it carries.
        """


class Journals(Protocol):
    """The journals of models: what is deleted of them, and the seals over what was written."""

    async def trim_journal(self, model: str, oldest_unfinished: bytes, *, sealed: bool = False) -> int:
        """Delete journal entries past retention, none as young as `oldest_unfinished`; how many.

        `oldest_unfinished` is an entry id, or `+` when nothing is unfinished. What is too much in bytes is estimated:
        one call may leave some of it to the next. What a seal covers goes as a whole or stays, and with it the seals
        before. `sealed`: nothing that no seal covers goes.
        """

    async def last_seal(self, model: str) -> Entry | None:
        """The last seal of the journal (`charonia.facts.seals`)."""

    async def seal_journal(self, model: str, after: bytes, seal_id: bytes, record: bytes) -> bool:
        """Append a seal under the id of the last entry it covers. False, and nothing done, unless the last seal has the
        id `after` (`START`: there is none).
        """

    async def journal_complete(self, model: str) -> bool:
        """Whether the journal still has its beginning: nothing of it was ever trimmed."""


class Sequences(Protocol):
    """What is known of the live sequences of a model; `Work.settle` writes it with the end of each request."""

    async def sequences(self, model: str) -> dict[bytes, bytes]:
        """The `about` of each live sequence, by its key (`SequenceStep.about`)."""

    async def sequence_states(self, model: str, names: Sequence[bytes]) -> list[tuple[bytes, bytes] | None]:
        """For each key (about, state); None for a sequence that has no record, b"" for one without a state."""

    async def keep_states(self, model: str, states: Mapping[bytes, tuple[bytes, bytes]]) -> list[bool]:
        """Write states of sequences, by key (about, state), each only while its `about` is this; which were written."""

    async def forget_sequences(self, model: str, runs: Mapping[bytes, bytes]) -> None:
        """Delete sequences by their keys, each only while its `about` begins with the given run."""


class Leases(Protocol):
    """Who owns a model, which processes live, and the clock and the epoch that this depends on."""

    async def owner(self, model: str) -> tuple[str, int]:
        """(owner incarnation or "", token) of a model."""

    async def take_ownership(self, model: str, owner: str, previous: str) -> int:
        """Become a model's owner if its owner still is `previous` ("" for none): a new, larger token, or 0."""

    async def release_ownership(self, model: str, owner: str, token: int) -> None: ...

    async def append_fenced(self, stream: bytes, fence: bytes, token: int, fields: Fields, ttl_s: int) -> bool:
        """Append an entry unless a larger token has been used with `fence`, a key in the stream's slot, which is kept
        for `ttl_s` seconds more; returns whether that was done. Without fields only the token is used.
        """

    async def beat(self, role: str, incarnation: str, ttl_ms: int) -> bool:
        """Renew a process's heartbeat lease, or make it; returns whether it still existed."""

    async def prolong(self, role: str, incarnation: str, ttl_ms: int) -> bool:
        """Renew a heartbeat lease that has not ended; False, and nothing changed, when it has."""

    async def end_beat(self, role: str, incarnation: str) -> None: ...

    async def alive(self, role: str, incarnations: Sequence[str]) -> list[bool]: ...

    async def last_beat_ms(self, role: str, incarnations: Sequence[str]) -> list[int]:
        """How long ago each process's last heartbeat was; -1 if its lease has ended."""

    async def clock_ns(self) -> int:
        """The log's clock: nanoseconds since the epoch."""

    async def epoch(self) -> str:
        """Names this log's contents: a flushed or exchanged log has another name. The first caller makes it."""


class Keys(Protocol):
    """Values by key."""

    async def delete_keys(self, keys: Iterable[bytes]) -> None: ...


class Notes(Keys, Protocol):
    """Values and numbers by key, and sets of members in the order of their times."""

    async def put_note(self, key: bytes, data: bytes, ttl_s: int) -> None:
        """Keep a value under a key for a time; the last one written is the one kept."""

    async def notes(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value that `put_note` stored under each key; None if there is none (any more)."""

    async def add_to_count(self, key: bytes, amount: int) -> int:
        """Add to the number under a key, which begins at 0; returns the sum. `delete_keys` deletes it."""

    async def set_times(self, key: bytes, times: Mapping[bytes, int]) -> None:
        """Put members into a set ordered by time (microseconds), or give members of it another time."""

    async def due(self, key: bytes, until_us: int, count: int) -> list[bytes]:
        """Up to `count` members whose time is not after `until_us`, earliest first."""

    async def drop_times(self, key: bytes, members: Sequence[bytes]) -> None: ...

    async def count_times(self, key: bytes) -> int:
        """How many members the set has."""

    async def keep_until(self, key: bytes, until_us: int) -> None:
        """Have the set or stream under a key expire at a time (microseconds since the epoch); of several calls the
        latest time counts. Without a call a set stays until its last member is dropped, and a stream for ever.
        """

    async def keep_recent(
        self, key: bytes, uses: Mapping[bytes, tuple[int, int]], limit_bytes: int, drop: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Put members with (time in us, size in bytes) into a set; evict the oldest while their total size is too
        large.

        First the members of `drop` are removed. A known member keeps the later time and gets the new size; one with
        size -1 keeps its size if it is known, and is not added otherwise. Returns the members evicted because of
        `limit_bytes`, at most `MOST_TAKEN`: if so many, call again. The key has a hash tag.
        """


class Statistics(Keys, Protocol):
    """Counters by key."""

    async def add_statistics(self, key: bytes, increments: Mapping[str, int]) -> None: ...

    async def statistics(self, key: bytes) -> dict[str, int]: ...


class Blobs(Keys, Protocol):
    """Large payloads by name."""

    async def put_blob(self, blob_id: str, data: Buffer, ttl_s: int) -> None: ...

    async def blob(self, blob_id: str) -> bytes | None: ...


class Capacity(Protocol):
    """The space that the log takes."""

    async def memory_bytes(self) -> tuple[int, int]:
        """Bytes that its server uses, and the most that it may use, 0 without a bound; of a cluster those of all
        primaries.

        Raises `LogUnavailable`.
        """


class QueueLog(Streams, Work, Protocol):
    """Requests in the queues of models."""


class JobLog(Streams, Jobs, Journals, Protocol):
    """Jobs with their journals, and the streams in which others follow them."""


class RequestLog(QueueLog, JobLog, Protocol):
    """Requests, jobs among them."""


class AuditedLog(RequestLog, Progress, Protocol):
    """Requests, and how far they are."""


class SettlementLog(RequestLog, Statistics, Protocol):
    """Requests, and the counters of how they ended."""


class WaveLog(QueueLog, Notes, Statistics, Protocol):
    """Waves, and what is noted when they are settled."""


class ControlLog(Streams, Leases, Protocol):
    """The processes' messages to each other, and which processes live."""


class RequestedModels(Streams, Blobs, Protocol):
    """Requests to load models, and the files that come with them."""


class EventLog(
    Streams, Work, Progress, Jobs, Journals, Sequences, Leases, Notes, Statistics, Blobs, Capacity, Protocol
):
    """All roles. One instance per process; safe for concurrent use from one event loop."""

    async def open(self) -> None:
        """Connect and check the server (version floor, reachability). Raises `charonia.errors.StartupError`."""

    async def close(self) -> None: ...
