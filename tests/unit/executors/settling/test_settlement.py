"""What the end of a batch writes: who is settled how, what is answered with it, what the facts say."""

from __future__ import annotations

import numpy as np

from charonia.errors import DeadlineExceeded, InvalidArgument
from charonia.facts.events import BatchDied, BatchFinished, unpack_fact
from charonia.facts.jobs import JobState
from charonia.facts.journal import JournalFact, read_facts
from charonia.tensors import Tensor
from charonia.wire import (
    FLAG_JOB,
    FLAG_JOURNALLED,
    BatchHeader,
    RequestRecord,
    pack_request,
    records_of,
    request_meta,
    unpack_request,
)
from executors.batches.batch_results import BACKEND, REJECTED, Death, Executed, Execution, Failure
from executors.settling.settlement import batch_died, batch_finished, replies, settlement, start_entry

ME = "executor-1"
MICROSECOND = 1000


def record(number: int, flags: int = 0, endpoint: str = "gw") -> RequestRecord:
    tensor = Tensor.of("x", np.zeros((1, 1), np.float32))
    packed = pack_request(
        bytes([number]) * 16,
        endpoint.encode(),
        b"",
        request_meta(1, "", [tensor], (), {}),
        [tensor.data],
        rows=1,
        signature=0,
        level=0,
        accepted_ns=5 * MICROSECOND,
        flags=flags,
    )
    return unpack_request(packed)


def header(*attempts: int) -> BatchHeader:
    return BatchHeader("b-1", "m", 1, "", 1, attempts, b"f:{m}")


def executed(*answers: bytes, failures: tuple[Failure, ...] = ()) -> Executed:
    good = tuple(i for i, answer in enumerate(answers) if answer and all(f.index != i for f in failures))
    execution = Execution(good, 7, 20 * MICROSECOND, 90 * MICROSECOND, 1, 30 * MICROSECOND, 1)
    return Executed(list(answers), [execution], list(failures))


def flags_of(records: list[RequestRecord]) -> int:
    flags = 0
    for one in records:
        flags |= one.flags
    return flags


def test_keyless_requests_have_neither_ends_nor_outcomes() -> None:
    records = [record(1), record(2)]
    found = settlement(ME, header(0, 3), records, executed(b"a", b"b"), 0)
    assert found.indices == [0, 1]
    assert found.requests == [(records[0].id, 0), (records[1].id, 3)]
    assert (found.jobs, found.ends, found.outcomes) == ([], {}, b"")


def test_what_has_no_answer_is_not_settled() -> None:
    records = [record(1), record(2, FLAG_JOB | FLAG_JOURNALLED), record(3, FLAG_JOURNALLED)]
    found = settlement(ME, header(0, 1, 2), records, executed(b"a", b"", b"c"), flags_of(records))
    assert found.indices == [0, 2]
    assert found.requests == [(records[0].id, 0), (records[2].id, 2)]
    assert found.ends == {}
    assert found.outcomes == b"-s"


def test_jobs_end_with_their_answers_and_what_happened_to_them() -> None:
    job = FLAG_JOB | FLAG_JOURNALLED
    records = [record(1, job), record(2, job), record(3, FLAG_JOB), record(4)]
    failures = (
        Failure(1, InvalidArgument("no good"), BACKEND, 25 * MICROSECOND),
        Failure(2, DeadlineExceeded("too late"), REJECTED, 25 * MICROSECOND),
    )
    done = executed(b"a", b"b", b"c", b"d", failures=failures)
    found = settlement(ME, header(2, 2, 2, 2), records, done, flags_of(records))
    assert found.jobs == [0, 1, 2]
    assert found.outcomes == b"sf--"
    good, bad, late = (found.ends[records[index].id] for index in found.jobs)
    assert (good.state, good.result) == (JobState.SUCCEEDED, b"a")
    about = {"executor": ME, "batch_id": "b-1", "attempt": 2}
    assert good.detail == {**about, "batch_rows": 7, "queue_us": 15, "start_us": 20, "infer_us": 30}
    assert (bad.state, bad.result) == (JobState.FAILED, b"b")
    assert bad.detail == {**about, "batch_rows": 4, "queue_us": 20, "error": "no good", "code": "INVALID_ARG"}
    assert (late.state, late.detail["error"]) == (JobState.EXPIRED, "too late")

    jobs, others = found.split_jobs()
    assert (jobs.indices, others.indices) == ([0, 1, 2], [3])
    assert jobs.requests + others.requests == found.requests
    assert jobs.ends == found.ends
    assert (others.ends, others.jobs) == ({}, [])
    assert (jobs.outcomes, others.outcomes) == (b"sf-", b"-")


def test_each_endpoint_gets_one_entry_and_nobody_without_one() -> None:
    records = [record(1, endpoint="one"), record(2, endpoint="two"), record(3, endpoint=""), record(4, endpoint="one")]
    found = replies(records, [b"a", b"b", b"c", b"d"], [0, 1, 2, 3])
    assert [(reply.stream, [bytes(r) for r in records_of(reply.fields)]) for reply in found] == [
        (b"r:one", [b"a", b"d"]),
        (b"r:two", [b"b"]),
    ]
    assert replies(records, [b"a", b"b", b"c", b"d"], [1])[0].stream == b"r:two"


def test_the_fact_of_a_death_is_bounded_and_names_its_requests() -> None:
    lines = "\n".join(f"line {number}" for number in range(100))
    fields = batch_died(ME, "b-1", Death("m_0", "gone", lines + "\n", True), [b"a" * 16, b"b" * 16])
    fact = unpack_fact(fields[1])
    last = "\n".join(f"line {number}" for number in range(80, 100))
    assert fact == BatchDied(ME, "b-1", "gone", last, True, "m_0", b"a" * 16 + b"b" * 16)
    endless = unpack_fact(batch_died(ME, "b-1", Death("m_0", "gone", "x" * 1_000_000), [])[1])
    assert isinstance(endless, BatchDied)
    assert len(endless.stderr) < 20_000
    assert unpack_fact(batch_finished(ME, "b-1", [("gw", b"a")])[1]) == BatchFinished(ME, "b-1", (("gw", b"a"),))


def test_the_beginning_of_a_run_says_equal_attempts_once() -> None:
    records = [record(1), record(2), record(3)]

    def fact(*given: int) -> JournalFact:
        (found,) = read_facts(start_entry(ME, header(*given), records, [0, 2]))
        return found

    ids = (records[0].id, records[2].id)
    assert fact(4, 1, 4) == JournalFact("started", ids, (4, 4), (), ME, "b-1")
    assert fact(4, 1, 5) == JournalFact("started", ids, (4, 5), (), ME, "b-1")
    assert len(start_entry(ME, header(4, 1, 4), records, [0, 2])[1]) < len(
        start_entry(ME, header(4, 1, 5), records, [0, 2])[1]
    )
