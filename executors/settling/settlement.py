"""Makes the log records for the end of a batch: settlements, statistics, replies, and facts. Pure.

Keyless requests are answered in the write that settles them (ADR 0002), jobs only after the settlement was won
(ADR 0004). A request without an answer (left out, or its instance died) is neither settled nor answered.

`trace_reports` adds to the answers what happened to traced requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia.calls.entry_packer import replies_of, replies_to
from charonia.eventlog.port import Reply
from charonia.facts import counters
from charonia.facts.events import (
    FIELD_FACT,
    BatchDied,
    BatchDiedInCompany,
    BatchFinished,
    RequestsRescheduled,
    pack_fact,
)
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobState
from charonia.facts.journal import FIELD, NOT_JOURNALLED, pack_started
from charonia.facts.processor_use import Packed
from charonia.tensors import Buffer
from charonia.wire import (
    FLAG_JOB,
    FLAG_JOURNALLED,
    FLAG_TIMED,
    BatchHeader,
    RequestRecord,
    time_response,
)
from executors.batches.batch_results import REJECTED, Death, Executed, Execution, Failure

KEPT_LINES = 20
_MAX_STDERR_CHARACTERS = 16_384

_NOT_JOURNALLED = bytes([NOT_JOURNALLED])


@dataclass(slots=True)
class Settlement:
    """The requests of a batch that end.

    `indices` are their positions in the batch, in order; `requests` are (id, attempt) pairs and `outcomes` outcome
    codes, both in the same order. `outcomes` is empty when nothing is journalled. `jobs` are the positions of jobs,
    `ends` their ends by id.
    """

    indices: list[int] = field(default_factory=list)
    requests: list[tuple[bytes, int]] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    ends: dict[bytes, JobEnd] = field(default_factory=dict)
    outcomes: bytes = b""

    def split_jobs(self) -> tuple[Settlement, Settlement]:
        """Return two settlements: that of the jobs, and that of all others."""
        return self._part(True), self._part(False)

    def _part(self, of_jobs: bool) -> Settlement:
        jobs = set(self.jobs)
        at = [number for number, index in enumerate(self.indices) if (index in jobs) is of_jobs]
        return Settlement(
            [self.indices[number] for number in at],
            [self.requests[number] for number in at],
            self.jobs if of_jobs else [],
            self.ends if of_jobs else {},
            bytes([self.outcomes[number] for number in at]) if self.outcomes else b"",
        )


def settlement(
    executor: str, header: BatchHeader, records: Sequence[RequestRecord], executed: Executed, flags: int
) -> Settlement:
    """Return the settlement of an executed batch. `flags` is the union of the records' flags."""
    if all(executed.answers):
        requests = [(record.id, attempt) for record, attempt in zip(records, header.attempts, strict=True)]
        found = Settlement(list(range(len(requests))), requests)
    else:
        indices = [index for index, answer in enumerate(executed.answers) if answer]
        found = Settlement(indices, [(records[index].id, header.attempts[index]) for index in indices])
    if flags & (FLAG_JOB | FLAG_JOURNALLED):
        _add_outcomes(found, executor, header, records, executed)
    return found


def _add_outcomes(
    found: Settlement, executor: str, header: BatchHeader, records: Sequence[RequestRecord], executed: Executed
) -> None:
    """Add what records and journal keep: the ends of jobs, and the outcomes of journalled requests."""
    failures = {failure.index: failure for failure in executed.failures}
    executions = {index: execution for execution in executed.executions for index in execution.indices}
    outcomes: list[bytes] = []
    for index in found.indices:
        record, failure = records[index], failures.get(index)
        state = _state(failure)
        outcomes.append(OUTCOME_CODES[state] if record.journalled else _NOT_JOURNALLED)
        if record.is_job:
            detail: dict[str, Any] = {
                "executor": executor,
                "batch_id": header.batch_id,
                "batch_rows": sum(records[i].rows for i in found.indices),
                "attempt": header.attempts[index],
            }
            detail |= _timing(record, executions.get(index), failure)
            found.jobs.append(index)
            found.ends[record.id] = JobEnd(state, executed.answers[index], detail)
    if any(outcome != _NOT_JOURNALLED for outcome in outcomes):
        found.outcomes = b"".join(outcomes)


def _state(failure: Failure | None) -> JobState:
    if failure is None:
        return JobState.SUCCEEDED
    # REJECTED means here that the deadline passed before the request could run
    return JobState.EXPIRED if failure.reason == REJECTED else JobState.FAILED


def _timing(record: RequestRecord, execution: Execution | None, failure: Failure | None) -> Mapping[str, Any]:
    """Times in us; `start_us` is wall clock. A failed run is not timed, so its `queue_us` is all its time."""
    if execution is not None:
        return {
            "batch_rows": execution.rows,
            "queue_us": max(0, execution.start_ns - record.accepted_ns) // 1000,
            "start_us": execution.start_ns // 1000,
            "infer_us": execution.infer_ns // 1000,
        }
    assert failure is not None
    return {
        "queue_us": max(0, failure.end_ns - record.accepted_ns) // 1000,
        "error": failure.error.message,
        "code": failure.error.code.name,
    }


def increments(
    records: Sequence[RequestRecord], executed: Executed, won: Sequence[bool] | None = None
) -> dict[str, int]:
    """Return what a batch adds to its model's statistics; with `won`, only the requests whose settlement was won count.

    A batch's durations count in full for each of its requests, as in Triton. Increments are written once per batch into
    `s:{m}` and folded by the gateways. Responses of cancelled requests are counted in any case. Empty when there is
    nothing to count.
    """
    totals: dict[str, int] = {}
    for execution in executed.executions:
        indices = execution.indices if won is None else [i for i in execution.indices if won[i]]
        if indices:
            _add_execution(totals, records, execution, indices)
    for failure in executed.failures:
        if won is None or won[failure.index]:
            waited_ns = failure.end_ns - records[failure.index].accepted_ns
            counters.add(totals, counters.of_failures(1, waited_ns, failure.reason))
    for index, counts in executed.responses.items():
        if won is None or won[index] or index in executed.cancelled:
            counters.add(totals, counts)
    return totals


def rows_of(records: Sequence[RequestRecord], executed: Executed) -> Sequence[int]:
    """Return the rows of each request of a batch if all succeeded, else (): with them, the log counts the requests that
    this settlement wins in the same step.
    """
    answered = sum([len(execution.indices) for execution in executed.executions if execution.first])
    if answered != len(records) or executed.failures or executed.responses:
        return ()
    return [record.rows for record in records]


def _add_execution(
    totals: dict[str, int], records: Sequence[RequestRecord], execution: Execution, indices: Sequence[int]
) -> None:
    start, end = execution.start_ns, execution.end_ns
    count = len(indices)
    chosen = records if count == len(records) else [records[index] for index in indices]
    accepted = [record.accepted_ns for record in chosen]
    if max(accepted) <= start:
        together = sum(accepted)
        queued, whole = count * start - together, count * end - together
    else:  # the clocks of two machines differ: no duration may be negative
        queued = sum([max(0, start - at) for at in accepted])
        whole = sum([max(0, end - at) for at in accepted])
    input_ns, infer_ns, output_ns = execution.input_ns, execution.infer_ns, execution.output_ns
    rows = sum([record.rows for record in chosen])
    values = (
        *(count, whole, count, queued),
        *(count, count * input_ns, count, count * infer_ns),
        *(count, count * output_ns, rows, 1),
        *(1, input_ns, infer_ns, output_ns, start // 1_000_000),
    )
    names = counters.of_execution(execution.rows)
    added = dict(zip(names, values, strict=True))
    if not execution.first:
        for name in names[counters.OF_RUN]:
            del added[name]
    if totals:
        counters.add(totals, added)
    else:  # nearly always: a batch is one execution
        totals.update(added)


def replies(records: Sequence[RequestRecord], answers: Sequence[Buffer], indices: Sequence[int]) -> list[Reply]:
    """The answers of these requests, one entry per endpoint. Requests without an endpoint get none."""
    whole = len(indices) == len(records)
    chosen = records if whole else [records[index] for index in indices]
    if len({record.endpoint for record in chosen}) == 1:  # nearly always
        endpoint, sent = chosen[0].endpoint, answers if whole else [answers[i] for i in indices]
        return replies_to(endpoint, sent) if endpoint else []
    return replies_of((records[index].endpoint, answers[index]) for index in indices)


def with_durations(records: Sequence[RequestRecord], executed: Executed) -> list[bytes]:
    """The answers, with the durations of their execution where requested (S56)."""
    answers = list(executed.answers)
    for execution in executed.executions:
        times = (execution.input_ns, execution.infer_ns, execution.output_ns)
        for index in execution.indices:
            if records[index].flags & FLAG_TIMED and answers[index]:
                answers[index] = time_response(answers[index], times)
    return answers


def batch_finished(
    executor: str, batch_id: str, pairs: Iterable[tuple[str, bytes]] = (), tokens: int = 0
) -> list[bytes]:
    """The fact that frees a slot. The owner releases its (endpoint, answer) pairs in order (S6)."""
    return [FIELD_FACT, pack_fact(BatchFinished(executor, batch_id, tuple(pairs), tokens))]


def batch_died(executor: str, batch_id: str, death: Death, ids: Iterable[bytes]) -> list[bytes]:
    """The fact that an instance died under a batch. `ids` are the requests without an outcome."""
    stderr = "\n".join(death.stderr.rstrip().split("\n")[-KEPT_LINES:])[-_MAX_STDERR_CHARACTERS:]
    joined = b"".join(ids)
    if death.shared_instance and not death.blameless:
        shared = BatchDiedInCompany(executor, batch_id, death.reason, stderr, death.instance, joined)
        return [FIELD_FACT, pack_fact(shared)]
    fact = BatchDied(executor, batch_id, death.reason, stderr, death.blameless, death.instance, joined)
    return [FIELD_FACT, pack_fact(fact)]


def requests_rescheduled(
    executor: str, header: BatchHeader, records: Sequence[RequestRecord], executed: Executed
) -> list[bytes]:
    """The fact that a model rescheduled requests (S41)."""
    ids = b"".join(records[index].id for index in sorted(executed.rescheduled))
    return [FIELD_FACT, pack_fact(RequestsRescheduled(executor, header.batch_id, ids))]


def start_entry(
    executor: str,
    header: BatchHeader,
    records: Sequence[RequestRecord],
    indices: Sequence[int],
    use: Packed | None = None,
) -> list[bytes]:
    """The journal entry for the start of these requests (`charonia.facts.journal`)."""
    ids = [records[index].id for index in indices]
    attempts = [header.attempts[index] for index in indices]
    return [FIELD, pack_started(ids, attempts, executor, header.batch_id, use)]
