"""What `memory_log.log` knows of one model: unsettled requests, tenants and jobs.

The rules of the scripts (charonia/eventlog/scripts) in plain Python; streams are the log's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgpack

from charonia.clock import monotonic_ns, wall_ns
from charonia.eventlog.port import FENCED, OTHERWISE, Limits, ProgressPart
from charonia.eventlog.refusal_texts import (
    BOUND_BYTES,
    BOUND_REQUESTS,
    BOUND_TENANT_BYTES,
    BOUND_TENANT_REQUESTS,
    key_reused,
    over_limit,
)
from charonia.facts.jobs import FIRST_LINE, MOVED, JobEnd, JobEvent, JobPlace, JobRecord, JobState, Line, NewJob
from charonia.facts.sequence_states import SequenceStep
from charonia.tensors import Buffer

RECORD_SIZE_BYTES = 512
"""What a job's record counts for beside its result and texts."""


@dataclass(slots=True)
class Unsettled:
    """A request that was accepted and not settled."""

    size_bytes: int
    tenant: str
    attempt: int = 0
    progress: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class KeptJob:
    """A job's record."""

    new: NewJob
    durability: str
    events: list[JobEvent]
    line: Line = FIRST_LINE
    queued_us: int = 0
    state: JobState = JobState.QUEUED
    attempts: int = 0
    result: bytes = b""
    ended_us: int = 0
    expires_ns: int = 0
    kept_size_bytes: int = 0
    next_index: int = 0
    responses_size_bytes: int = 0

    def add_event(self, kind: str, time_us: int, detail: Mapping[str, object]) -> None:
        self.events.append(JobEvent(len(self.events) + 1, kind, time_us, dict(detail)))

    def record(self, model: str, *, with_events: bool) -> JobRecord:
        new = self.new
        return JobRecord(
            model=model,
            id=new.id,
            state=self.state,
            tenant=new.tenant,
            attempts=self.attempts,
            size_bytes=new.size_bytes,
            result_size_bytes=len(self.result),
            accepted_us=new.accepted_us,
            ended_us=self.ended_us,
            retention_s=new.retention_s,
            durability=self.durability,
            about=dict(new.about),
            events=tuple(self.events) if with_events else (),
        )


@dataclass(slots=True)
class ModelWork:
    """One model: accepted, unsettled requests, their tenants, jobs, and who owns it.

    `on_forgotten` is called with jobs whose record is gone.
    """

    model: str
    on_forgotten: Callable[[str, bytes], None]
    requests: dict[bytes, Unsettled] = field(default_factory=dict)
    size_bytes: int = 0
    tenants: dict[str, tuple[int, int]] = field(default_factory=dict)
    lanes: set[tuple[int, int]] = field(default_factory=set)
    owner: str = ""
    token: int = 0
    paused: bool = False
    jobs: dict[bytes, KeptJob] = field(default_factory=dict)
    kept_size_bytes: int = 0
    keys: dict[bytes, bytes] = field(default_factory=dict)
    keep_size_bytes: int = 0
    keep_journal_s: int = 0
    keep_journal_size_bytes: int = 0
    journal_complete: bool = True
    sealed_to: int = 0
    """The id of the last seal that was ever made: as a stream does, no seal gets an id up to it again."""
    sequences: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)
    """Key to (about, state)."""
    leases: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Holder to (requests, bytes)."""

    # -- requests -----------------------------------------------------------------------------------------------------

    def accept(self, requests: Sequence[tuple[bytes, int]], limits: Limits, tenant: str) -> None:
        """Count requests, all or none. Raises `ResourceExhausted`."""
        size_bytes = sum(size for _, size in requests)
        tenant_requests, tenant_size_bytes = self.tenants.get(tenant, (0, 0))
        leased_requests, leased_bytes = self.leased()
        counts = (
            (BOUND_REQUESTS, limits.requests, len(self.requests) + leased_requests + len(requests)),
            (BOUND_BYTES, limits.size_bytes, self.size_bytes + leased_bytes + size_bytes),
            (BOUND_TENANT_REQUESTS, tenant and limits.tenant_requests, tenant_requests + len(requests)),
            (BOUND_TENANT_BYTES, tenant and limits.tenant_size_bytes, tenant_size_bytes + size_bytes),
        )
        for bound, most, count in counts:
            if most and count > int(most):
                raise over_limit(self.model, bound, limits, tenant)
        for request_id, size in requests:
            self.requests[bytes(request_id)] = Unsettled(size, tenant)
        self.size_bytes += size_bytes
        if tenant:
            self.tenants[tenant] = (tenant_requests + len(requests), tenant_size_bytes + size_bytes)

    def add(self, requests: Sequence[tuple[bytes, int]], tenant: str) -> None:
        """Count requests that were accepted before, in a wave."""
        for request_id, size in requests:
            self.requests[bytes(request_id)] = Unsettled(size, tenant)
            self.size_bytes += size
            if tenant:
                count, size_bytes = self.tenants.get(tenant, (0, 0))
                self.tenants[tenant] = (count + 1, size_bytes + size)

    def leased(self) -> tuple[int, int]:
        """(requests, bytes) that senders of waves have leased together."""
        return sum(one[0] for one in self.leases.values()), sum(one[1] for one in self.leases.values())

    def lease(self, holder: str, requests: int, size_bytes: int, limits: Limits) -> bool:
        """Reserve room for waves in place of what the holder had; False when a bound would be passed."""
        held = self.leases.get(holder, (0, 0))
        leased = self.leased()
        grown = leased[0] + requests - held[0] + len(self.requests), leased[1] + size_bytes - held[1] + self.size_bytes
        if requests > held[0] and limits.requests and grown[0] > limits.requests:
            return False
        if size_bytes > held[1] and limits.size_bytes and grown[1] > limits.size_bytes:
            return False
        self.leases[holder] = (requests, size_bytes)
        if not requests and not size_bytes:
            del self.leases[holder]
        return True

    def take(self, request_id: bytes, attempt: int) -> bool:
        """End a request unless it is over or at a later attempt."""
        known = self.requests.get(request_id)
        if known is None or known.attempt > attempt:
            return False
        del self.requests[request_id]
        self.size_bytes -= known.size_bytes
        if known.tenant:
            requests, size_bytes = self.tenants[known.tenant]
            if requests == 1:
                del self.tenants[known.tenant]
            else:
                self.tenants[known.tenant] = (requests - 1, size_bytes - known.size_bytes)
        return True

    def append_progress(self, part: ProgressPart) -> int:
        """What `append_progress.lua` does for one request."""
        known = self.requests.get(part.id)
        if known is None or known.attempt > part.attempt:
            return FENCED
        if len(known.progress) < part.first_index:
            return len(known.progress)
        kept = known.progress[part.first_index : part.first_index + len(part.records)]
        if kept != [bytes(record) for record in part.records[: len(kept)]]:
            return OTHERWISE
        known.progress += [bytes(record) for record in part.records[len(kept) :]]
        return len(known.progress)

    def step(self, step: SequenceStep) -> None:
        """What a settled request does to its sequence's record."""
        if not step.about:
            self.sequences.pop(step.key, None)
            return
        _, state = self.sequences.get(step.key, (b"", b""))
        self.sequences[step.key] = (step.about, state if step.state is None else bytes(step.state))

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def earlier(self, new: NewJob) -> KeptJob | None:
        """The job that a key stands for. Raises `KeyReused` when it is of another request."""
        if not new.key:
            return None
        known = self.job(self.keys.get(new.key, b""))
        if known is not None and known.new.digest != new.digest:
            raise key_reused()
        return known

    def add_job(self, new: NewJob, durability: str, line: Line) -> None:
        accepted = JobEvent(1, "accepted", new.accepted_us)
        self.jobs[new.id] = KeptJob(new, durability, [accepted], line, new.accepted_us)
        if new.key:
            self.keys[new.key] = new.id

    def job(self, job_id: bytes) -> KeptJob | None:
        """A job whose retention is not over."""
        found = self.jobs.get(job_id)
        if found is not None and found.state.terminal and found.expires_ns <= monotonic_ns():
            self._forget(found)
            return None
        return found

    def begin_job(self, job_id: bytes, attempt: int, detail: Mapping[str, object]) -> None:
        found = self.jobs.get(job_id)
        if found is not None and not found.state.terminal:
            found.state = JobState.RUNNING
            found.attempts = attempt
            found.add_event("batched", now_us(), detail)

    def tell_job(self, job_id: bytes, kind: str, detail: Mapping[str, object]) -> bool:
        """Add an event to a job that has not ended."""
        found = self.jobs.get(job_id)
        if found is None or found.state.terminal:
            return False
        if kind == "returned":
            found.state = JobState.QUEUED
        elif kind == MOVED:
            found.line = (int(str(detail["level"])), found.line[1])
            found.queued_us = now_us()
        found.add_event(kind, now_us(), detail)
        return True

    def add_responses(
        self, job_id: bytes, attempt: int, first_index: int, records: Sequence[Buffer]
    ) -> list[tuple[int, Buffer]] | None:
        """Those with an index above all kept ones; None when the job has ended or begun a later attempt."""
        found = self.jobs.get(job_id)
        if found is None or found.state.terminal or found.attempts > attempt:
            return None
        fresh = [(index, record) for index, record in enumerate(records, first_index) if index >= found.next_index]
        if fresh:
            found.next_index = fresh[-1][0] + 1
            found.responses_size_bytes += sum(len(record) for _, record in fresh)
        return fresh

    def end_job(self, job_id: bytes, end: JobEnd) -> bool:
        """Record an end; True when a webhook is to be told."""
        found = self.jobs.get(job_id)
        if found is None or found.state.terminal:
            return False
        found.state = end.state
        found.result = bytes(end.result)
        found.ended_us = now_us()
        found.expires_ns = monotonic_ns() + found.new.retention_s * 1_000_000_000
        found.add_event(end.state.value, found.ended_us, end.detail)
        texts = len(msgpack.packb(dict(end.detail))) + len(msgpack.packb(dict(found.new.about)))
        found.kept_size_bytes = RECORD_SIZE_BYTES + len(found.result) + found.responses_size_bytes + texts
        self.kept_size_bytes += found.kept_size_bytes
        # the dict's order is that of the ends from here on
        self.jobs[job_id] = self.jobs.pop(job_id)
        self._keep_within_bounds()
        return bool(found.new.about.get("webhook"))

    def active(self) -> list[KeptJob]:
        """Jobs that have not ended, by the time they were accepted."""
        found = [job for job in self.jobs.values() if not job.state.terminal]
        return sorted(found, key=lambda job: (job.new.accepted_us, job.new.id))

    def place(self, job_id: bytes) -> JobPlace | None:
        """Where an active job stands."""
        active = self.active()
        own = next((job for job in active if job.new.id == job_id), None)
        if own is None:
            return None
        lines = Counter(job.line for job in active)
        at = (own.queued_us, own.new.id)
        rank = sum((job.queued_us, job.new.id) < at for job in active if job.line == own.line)
        return JobPlace(own.line, rank, dict(lines), len(self.requests), self.paused, self.owner)

    def ended(self) -> list[KeptJob]:
        """Ended jobs, newest first; what has expired is forgotten."""
        found = [job for job in list(self.jobs.values()) if self.job(job.new.id) and job.state.terminal]
        return sorted(found, key=lambda job: (job.ended_us, job.new.id), reverse=True)

    def _keep_within_bounds(self) -> None:
        if self.keep_size_bytes and self.kept_size_bytes > self.keep_size_bytes:
            for job in reversed(self.ended()):
                if self.kept_size_bytes <= self.keep_size_bytes:
                    break
                self._forget(job)

    def _forget(self, job: KeptJob) -> None:
        del self.jobs[job.new.id]
        self.on_forgotten(self.model, job.new.id)
        self.kept_size_bytes -= job.kept_size_bytes
        if job.new.key and self.keys.get(job.new.key) == job.new.id:
            del self.keys[job.new.key]


def now_us() -> int:
    return wall_ns() // 1000
