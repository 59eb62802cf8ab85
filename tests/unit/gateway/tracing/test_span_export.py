"""Spans leave in the background and within bounds, whatever the collector does (N6)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from otlp_receiver import Receiver

from charonia.traces.contexts import PROPAGATED, TIMESTAMPS, Context, Parent
from charonia.traces.reports import Report
from charonia.traces.trace_settings import OPENTELEMETRY, TraceOptions
from gateway.tracing.span_export import SpanExport
from gateway.tracing.trace import Finished
from gateway.tracing.writer import TraceWriter


def trace(number: int = 1, *, parent: Parent | None = None, error: str = "") -> Finished:
    trace_id = number.to_bytes(16, "big")
    stamps = (
        ("REQUEST_START", 20), ("QUEUE_START", 21), ("COMPUTE_START", 30), ("COMPUTE_INPUT_END", 31),
        ("COMPUTE_OUTPUT_START", 38), ("COMPUTE_END", 39), ("REQUEST_END", 45),
    )  # fmt: skip
    child = Report(b"grandkid", "inner", 2, "", (("QUEUE_START", 32), ("REQUEST_END", 37)), "inner failed")
    report = Report(b"children", "m", 1, "q", stamps, "", (("charonia.batch_size", 4),), (), (child,))
    context = Context(TIMESTAMPS | PROPAGATED, trace_id, b"children", "vendor=1")
    front = (("HTTP_SEND_END", 50), ("HTTP_RECV_START", 10))
    return Finished(context, b"rootspan", parent, report, front, error, 0, 0)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def export(receiver: Receiver, **settings: int) -> SpanExport:
    options = TraceOptions(mode=OPENTELEMETRY, url=receiver.url, resource=(("a.b", "c"),), **settings)  # type: ignore
    return SpanExport(options, "gateway-1", "9.9")


def test_what_arrives(receiver: Receiver) -> None:
    sending = export(receiver)
    sending.write([trace(parent=Parent(bytes(16), b"far-away", True, "vendor=1"), error="why")])
    sending.close()
    root, model, compute, inner = receiver.spans
    assert [span.name for span in receiver.spans] == ["InferRequest", "m", "compute", "inner"]
    assert {span.trace_id for span in receiver.spans} == {f"{1:032x}"}
    assert (root.parent, model.parent, compute.parent, inner.parent) == (
        b"far-away".hex(), b"rootspan".hex(), b"children".hex(), b"children".hex(),
    )  # fmt: skip
    assert root.resource.items() >= {
        "service.name": "triton-inference-server", "service.instance.id": "gateway-1", "a.b": "c",
    }.items()  # fmt: skip
    assert (root.begin_ns, root.end_ns, root.events) == (10, 50, {"HTTP_RECV_START": 10, "HTTP_SEND_END": 50})
    assert (model.begin_ns, model.end_ns, list(model.events)) == (
        20,
        45,
        ["REQUEST_START", "QUEUE_START", "REQUEST_END"],
    )
    assert (compute.begin_ns, compute.end_ns, len(compute.events)) == (30, 39, 4)
    assert (root.error, model.error, compute.error, inner.error) == ("why", "why", "", "inner failed")
    assert model.attributes == {
        "triton.model_name": "m", "triton.model_version": 1, "triton.trace_id": 1, "triton.trace_parent_id": 0,
        "triton.request_id": "q", "charonia.batch_size": 4,
    }  # fmt: skip
    assert (inner.attributes["triton.trace_id"], inner.attributes["triton.trace_parent_id"]) == (2, 1)
    assert {span.state for span in receiver.spans} == {"vendor=1"}
    assert sending.dropped == 0


def test_a_request_without_a_report_has_two_spans(receiver: Receiver) -> None:
    sending = export(receiver)
    report = Report(b"children", "m", 1, "", (("REQUEST_START", 5),))
    sending.write([Finished(trace().context, b"rootspan", None, report, (), "refused", 0, 0)])
    sending.close()
    assert [(span.name, span.begin_ns, span.end_ns) for span in receiver.spans] == [("InferRequest", 5, 5), ("m", 5, 5)]


def until(look: object) -> None:
    give_up_at = time.monotonic() + 30
    while not look():  # type: ignore[operator]
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


def test_a_collector_that_hangs_costs_its_spans_and_no_memory(receiver: Receiver) -> None:
    receiver.goes_on.clear()
    sending = export(receiver, bsp_max_queue_size=16, bsp_max_export_batch_size=8, bsp_schedule_delay=1)
    sending.write([trace(1), trace(2)])
    until(lambda: sending._exporter.taken == 8)  # the worker hangs with these
    sending.write([trace(number) for number in range(3, 13)])
    assert sending.dropped == 6 * 4  # whole traces: four wait, six do not
    receiver.goes_on.set()
    sending.close()
    assert {span.trace_id for span in receiver.spans} == {f"{number:032x}" for number in range(1, 7)}


def test_a_trace_that_cannot_be_told_takes_no_other_with_it(receiver: Receiver) -> None:
    broken = replace(trace(2), report=replace(trace(2).report, stamps=()))
    sending = export(receiver)
    sending.write([trace(1), broken, trace(3)])
    sending.close()
    assert {span.trace_id for span in receiver.spans} == {f"{number:032x}" for number in (1, 3)}
    assert sending.dropped == 1


def test_what_a_collector_refuses_is_counted_and_said_once(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 400
    sending = export(receiver, bsp_schedule_delay=1)
    for number in (1, 2):
        sending.write([trace(number)])
        until(lambda number=number: sending.dropped == 4 * number)
    assert caplog.text.count("the collector does not take spans") == 1
    receiver.status = 200
    sending.write([trace(3)])
    sending.close()
    assert {span.trace_id for span in receiver.spans} == {f"{3:032x}"}


class Stuck(SpanExporter):
    """Never comes back, and never ends."""

    def __init__(self) -> None:
        self.entered = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        threading.Event().wait(60)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None: ...


def test_the_end_of_a_gateway_does_not_wait_for_its_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.tracing.span_export._CLOSE_S", 0.05)
    stuck = Stuck()
    sending = SpanExport(TraceOptions(mode=OPENTELEMETRY, bsp_schedule_delay=1), "g", "9", stuck)
    writer = TraceWriter(sending)
    writer.put(trace())
    assert stuck.entered.wait(30)
    begun = time.monotonic()
    writer.close()
    assert time.monotonic() - begun < 10
