"""What an executor reports of traced requests with their answers (N3-N5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from charonia.errors import InvalidArgument
from charonia.facts.processor_use import ProcessorUse
from charonia.tensors import Tensor
from charonia.traces.contexts import TENSORS, TIMESTAMPS, Context
from charonia.traces.reports import Report
from charonia.wire import (
    FLAG_JOB,
    FLAG_JOURNALLED,
    BatchHeader,
    RequestRecord,
    pack_failure,
    pack_request,
    pack_response,
    request_meta,
    unpack_request,
    unpack_response,
)
from executors.batches.batch_results import OTHER, Executed, Execution, Failure
from executors.running.submitted_batch import SubmittedBatch
from executors.settling.trace_reports import with_reports

X = Tensor.of("x", np.ones((1, 2), np.float32))
META = request_meta(3, "abc", [X], (), {})


def record(
    number: int,
    trace: Context | None,
    endpoint: bytes = b"g",
    rows: int = 1,
    level: int = 0,
    timeout_us: int = 0,
    flags: int = 0,
) -> RequestRecord:
    packed = pack_request(
        bytes([number]) * 16, endpoint, b"q", META, [X.data],
        rows=rows, signature=1, level=level, accepted_ns=100, timeout_us=timeout_us, trace=trace,
        flags=flags,
    )  # fmt: skip
    return unpack_request(packed)


def context(number: int, flags: int = TIMESTAMPS, report_to: str = "") -> Context:
    return Context(flags, bytes(16), bytes([number]) * 8, report_to=report_to)


def batch(*records: RequestRecord) -> SubmittedBatch:
    header = BatchHeader("b-1", "m", 3, "abc", 7, tuple(range(1, len(records) + 1)), b"f:{m}")
    return SubmittedBatch(list(records), lambda _job, _executed: None, header)


def answer(one: RequestRecord) -> bytes:
    return pack_response(one.id, "m", 3, [X], {})


def run(*indices: int) -> Execution:
    return Execution(indices, 2, 1000, 1060, 10, 30, 20)


def test_what_a_simulation_needs_to_know_is_reported() -> None:
    one = record(1, context(1), rows=2, level=3, timeout_us=500)
    executed = Executed([answer(one)], [run(0)])
    (found,) = with_reports(batch(one), executed, executed.answers, "e-1")
    report = unpack_response(found).report
    assert report is not None
    assert report.about[-3:] == (("charonia.rows", 2), ("charonia.priority", 3), ("charonia.timeout_us", 500))


@pytest.mark.parametrize(("flags", "journalled"), [(0, None), (FLAG_JOURNALLED, 1), (FLAG_JOB, 1)])
def test_what_the_log_knew_before_it_ran_is_reported(flags: int, journalled: int | None) -> None:
    one = record(1, context(1), flags=flags)
    executed = Executed([answer(one)], [run(0)])
    report = unpack_response(with_reports(batch(one), executed, executed.answers, "e-1")[0]).report
    assert report is not None
    assert dict(report.about).get("charonia.journalled") == journalled


def test_the_first_traced_one_says_what_the_processors_do() -> None:
    records = [record(1, None), record(2, context(2)), record(3, context(3))]
    executed = Executed([answer(one) for one in records], [run(0, 1, 2)])
    use = ProcessorUse("h", 2.0, 1, 1, 2, 3, 4, 5, 6)
    answers = with_reports(batch(*records), executed, executed.answers, "e-1", use)
    reports = [report for one in answers if (report := unpack_response(one).report) is not None]
    assert [dict(one.about).get("charonia.processor_use") for one in reports] == [use.text(), None]


def test_the_traced_ones_of_a_batch() -> None:
    records = [record(1, context(1)), record(2, None), record(3, context(3, TIMESTAMPS | TENSORS))]
    child = Report(b"children", "callee", 1, "", ())
    assert records[0].trace is not None
    records[0].trace.add(child)
    executed = Executed([answer(one) for one in records], [run(0, 1, 2)])
    found = [unpack_response(one).report for one in with_reports(batch(*records), executed, executed.answers, "e-1")]
    first, none, third = found
    assert none is None
    assert first is not None
    assert third is not None
    assert first == Report(
        b"\1" * 8,
        "m",
        3,
        "q",
        (
            ("REQUEST_START", 100), ("QUEUE_START", 100), ("COMPUTE_START", 1000), ("COMPUTE_INPUT_END", 1010),
            ("COMPUTE_OUTPUT_START", 1040), ("COMPUTE_END", 1060), ("REQUEST_END", 1060),
        ),
        about=(
            ("charonia.executor", "e-1"), ("charonia.batch_id", "b-1"), ("charonia.attempt", 1),
            ("charonia.batch_size", 2),
        ),
        children=(child,),
    )  # fmt: skip
    assert [(t.activity, t.name, t.data) for t in third.tensors] == [
        (activity, "x", bytes(X.data))
        for activity in ("TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_INPUT", "TENSOR_BACKEND_OUTPUT")
    ]


def test_a_failure_and_a_request_without_an_answer() -> None:
    records = [record(1, context(1)), record(2, context(2))]
    error = InvalidArgument("no")
    executed = Executed([pack_failure(records[0].id, "m", 3, error), b""], [], [Failure(0, error, OTHER, 900)])
    failed, left = with_reports(batch(*records), executed, executed.answers, "e-1")
    assert left == b""
    report = unpack_response(failed).report
    assert report is not None
    assert (report.error, report.stamps[-1], len(report.stamps)) == ("no", ("REQUEST_END", 900), 3)


def test_what_cannot_be_reported_is_answered_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> bytes:
        raise ValueError("broken")

    monkeypatch.setattr("executors.settling.trace_reports.reported_response", fails)
    one = record(1, context(1))
    executed = Executed([answer(one)], [run(0)])
    assert with_reports(batch(one), executed, executed.answers, "e-1") == executed.answers
    assert "cannot be reported" in caplog.text
