"""What an ensemble reports of a traced request with its answer: its times, and the reports of its steps (N5)."""

from __future__ import annotations

from charonia.calls.reporting import inputs_of
from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.traces.contexts import TENSORS
from charonia.traces.reports import QUEUE_INPUT, QUEUE_START, REQUEST_END, REQUEST_START, Report, tensors_of
from charonia.wire import RequestRecord, report_response


def reported(record: RequestRecord, answer: bytes, model: str, start_ns: int, error: CharoniaError | None) -> bytes:
    """The answer with its report. The request, which is traced, was begun at `start_ns`, 0 when it was not."""
    trace = record.trace
    assert trace is not None
    about = (("charonia.steps_begun_after_us", (start_ns - record.accepted_ns) // 1000),) if start_ns else ()
    report = Report(
        trace.context.span_id,
        model,
        record.meta.version,
        record.client_id,
        ((REQUEST_START, record.accepted_ns), (QUEUE_START, record.accepted_ns), (REQUEST_END, wall_ns())),
        error.message if error is not None else "",
        about,
        tensors_of(QUEUE_INPUT, inputs_of(record)) if trace.context.flags & TENSORS else (),
        tuple(trace.children),
    )
    return report_response(answer, report)
