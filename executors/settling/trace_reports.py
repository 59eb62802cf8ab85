"""Adds reports to the answers of traced requests: when their batch was queued, run and cut, where, and with what.

Times of a report are those of the execution that the request was part of. Calls made by its model are in the record's
`trace` already. A report (`charonia.traces.reports`) goes to the gateway that began the trace, which exports it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from charonia.calls.entry_packer import inputs_of, reported_response
from charonia.facts.processor_use import ProcessorUse
from charonia.models.names import name_of
from charonia.traces.contexts import TENSORS
from charonia.traces.reports import (
    BACKEND_INPUT,
    BACKEND_OUTPUT,
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    QUEUE_INPUT,
    QUEUE_START,
    REQUEST_END,
    REQUEST_START,
    Report,
    ReportedTensor,
    Stamp,
    tensors_of,
)
from charonia.wire import FLAG_JOB, FLAG_JOURNALLED, BatchHeader, RequestRecord, unpack_response
from executors.batches.batch_results import Executed, Execution, Failure
from executors.running.submitted_batch import SubmittedBatch

_log = logging.getLogger(__name__)


def with_reports(
    batch: SubmittedBatch,
    executed: Executed,
    answers: Sequence[bytes],
    executor: str,
    use: ProcessorUse | None = None,
) -> list[bytes]:
    """The answers, with a report for each request that is traced; the first has the `use` of processors."""
    header, records = batch.header, batch.records
    assert header is not None
    executions = {index: execution for execution in executed.executions for index in execution.indices}
    failures = {failure.index: failure for failure in executed.failures}
    found = list(answers)
    for index, record in enumerate(records):
        if record.trace is None or not found[index]:
            continue
        execution = executions.get(index)
        about: list[tuple[str, str | int]] = [
            ("charonia.executor", executor),
            ("charonia.batch_id", header.batch_id),
            ("charonia.attempt", header.attempts[index]),
        ]
        if execution is not None:
            about.append(("charonia.batch_size", execution.rows))
        # what a simulation needs to know (`charonia.simulation`), where it is not as usual
        if record.rows > 1:
            about.append(("charonia.rows", record.rows))
        if record.level:
            about.append(("charonia.priority", record.level))
        if record.timeout_us:
            about.append(("charonia.timeout_us", record.timeout_us))
        if record.flags & (FLAG_JOB | FLAG_JOURNALLED):
            about.append(("charonia.journalled", 1))
        if use is not None:
            about.append(("charonia.processor_use", use.text()))
            use = None
        try:
            report = _report(header, record, found[index], execution, failures.get(index), tuple(about))
            found[index] = reported_response(found[index], report)
        except Exception:  # a missing report must not cost the answer
            _log.exception("what happened to a request of '%s' cannot be reported", header.model)
    return found


def _report(
    header: BatchHeader,
    record: RequestRecord,
    answer: bytes,
    execution: Execution | None,
    failure: Failure | None,
    about: tuple[tuple[str, str | int], ...],
) -> Report:
    assert record.trace is not None
    return Report(
        record.trace.context.span_id,
        name_of(header.model),
        header.version,
        record.client_id,
        _stamps(record, execution, failure),
        failure.error.message if failure is not None else "",
        about,
        _tensors(record, answer) if record.trace.context.flags & TENSORS else (),
        tuple(record.trace.children),
    )


def _stamps(record: RequestRecord, execution: Execution | None, failure: Failure | None) -> tuple[Stamp, ...]:
    stamps = [(REQUEST_START, record.accepted_ns), (QUEUE_START, record.accepted_ns)]
    if execution is not None:
        joined_ns = execution.start_ns + execution.input_ns
        stamps += [
            (COMPUTE_START, execution.start_ns),
            (COMPUTE_INPUT_END, joined_ns),
            (COMPUTE_OUTPUT_START, joined_ns + execution.infer_ns),
            (COMPUTE_END, execution.end_ns),
            (REQUEST_END, execution.end_ns),
        ]
    elif failure is not None:
        stamps.append((REQUEST_END, failure.end_ns))
    return tuple(stamps)


def _tensors(record: RequestRecord, answer: bytes) -> tuple[ReportedTensor, ...]:
    # the queue holds the same tensors as the model gets
    inputs = inputs_of(record)
    outputs = unpack_response(answer).outputs
    return (*tensors_of(QUEUE_INPUT, inputs), *tensors_of(BACKEND_INPUT, inputs), *tensors_of(BACKEND_OUTPUT, outputs))
