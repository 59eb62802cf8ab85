"""Sends spans to an OpenTelemetry collector over OTLP/HTTP (N1, N6), in the background and within bounds.

The SDK's batch processor gathers and sends; what it cannot hold, or the collector does not take, is lost and counted.
The SDK's own environment variables (headers, certificates) hold beside the options.

Spans are the call, each model that took part, and each model's compute; names, attributes and events are Triton's. They
are made from what was reported once a request is over, with ids that were given while it ran, so that spans which model
code makes of its own find their parents.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from charonia.errors import StartupError
from charonia.traces.reports import COMPUTE, COMPUTE_END, COMPUTE_START, Report, Stamp
from charonia.traces.trace_settings import TraceOptions

from .trace import Finished

_log = logging.getLogger(__name__)

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)

Attributes = Mapping[str, str | int]
SERVICE = "triton-inference-server"
"""The service name of Triton's spans, unless `resource` has another."""
_TIMEOUT_S = 5.0
_CLOSE_S = 2.0


class SpanMaker:
    """Makes the spans of one gateway; `triton.trace_id` counts its traces."""

    def __init__(self, resource: Resource, version: str) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("charonia", version)
        self._numbers = itertools.count(1)

    def spans(self, trace: Finished) -> list[ReadableSpan]:
        """The spans of a trace: the root first, parents before children."""
        state = TraceState.from_header([trace.context.state]) if trace.context.state else TraceState()
        ids = _Ids(int.from_bytes(trace.context.trace_id, "big"), state)
        parent = ids.context(trace.parent.span_id, remote=True) if trace.parent is not None else None
        root = ids.context(trace.root_id)
        stamps = sorted(trace.front, key=lambda stamp: stamp[1])
        own = trace.report.stamps
        times = [ns for _, ns in (*stamps, *own)]
        return [
            self._span("InferRequest", root, parent, {}, stamps, min(times), max(times), trace.error, SpanKind.SERVER),
            *self._of_model(trace.report, ids, root, 0, trace.error),
        ]

    def _of_model(
        self, report: Report, ids: _Ids, parent: SpanContext, parent_number: int, error: str
    ) -> Iterator[ReadableSpan]:
        context, number = ids.context(report.span_id), next(self._numbers)
        attributes: dict[str, str | int] = {
            "triton.model_name": report.model,
            "triton.model_version": report.version,
            "triton.trace_id": number,
            "triton.trace_parent_id": parent_number,
        }
        if report.request_id:
            attributes["triton.request_id"] = report.request_id
        attributes |= dict(report.about)
        stamps = sorted(report.stamps, key=lambda stamp: stamp[1])
        around = [stamp for stamp in stamps if stamp[0] not in COMPUTE]
        begin, end = stamps[0][1], stamps[-1][1]
        yield self._span(report.model, context, parent, attributes, around, begin, end, error)
        compute = [stamp for stamp in stamps if stamp[0] in COMPUTE]
        if compute:
            times = dict(compute)
            own = ids.context(hashlib.blake2b(report.span_id, digest_size=8).digest())
            begin, end = times.get(COMPUTE_START, begin), times.get(COMPUTE_END, end)
            yield self._span("compute", own, context, {}, compute, begin, end, "")
        for child in report.children:
            yield from self._of_model(child, ids, context, number, child.error)

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        attributes: Attributes,
        stamps: Sequence[Stamp],
        begin_ns: int,
        end_ns: int,
        error: str,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            [Event(stamp, timestamp=ns) for stamp, ns in stamps],
            kind=kind,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=begin_ns,
            end_time=end_ns,
            instrumentation_scope=self._scope,
        )


class _Ids:
    """Span contexts of one trace."""

    def __init__(self, trace_id: int, state: TraceState) -> None:
        self._trace_id = trace_id
        self._state = state

    def context(self, span_id: bytes, *, remote: bool = False) -> SpanContext:
        return SpanContext(self._trace_id, int.from_bytes(span_id, "big"), remote, _SAMPLED, self._state)


try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    from .span_export import SpanMaker
except ImportError as error:  # pragma: no cover - the package depends on them
    raise StartupError(
        "--trace-config opentelemetry needs the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http: "
        f"{error}"
    ) from None


class _Counted(SpanExporter):
    """The exporter, and the number of spans that it lost."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._failing = False
        self.taken = self.lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception:
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self.lost += len(spans)
            if not self._failing:  # once for consecutive failures
                _log.warning("the collector does not take spans: they are dropped until it does")
        self._failing = result is not SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class SpanExport:
    """The `Sink` of mode opentelemetry. Tests pass their own `exporter`."""

    def __init__(
        self, options: TraceOptions, instance: str, version: str, exporter: SpanExporter | None = None
    ) -> None:
        resource = {SERVICE_NAME: SERVICE, SERVICE_INSTANCE_ID: instance, **dict(options.resource)}
        self._maker = SpanMaker(Resource.create(resource), version)
        # this class logs failures once; the exporter would log one for every batch
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        # clients may write anything into a tracestate
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
        self._exporter = _Counted(exporter or OTLPSpanExporter(endpoint=options.url, timeout=_TIMEOUT_S))
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=options.bsp_max_queue_size,
            schedule_delay_millis=options.bsp_schedule_delay,
            max_export_batch_size=options.bsp_max_export_batch_size,
        )
        self._most = options.bsp_max_queue_size
        self._given = self._refused = 0

    @property
    def dropped(self) -> int:
        return self._refused + self._exporter.lost

    def write(self, traces: Sequence[Finished]) -> None:
        for trace in traces:
            try:
                spans = self._maker.spans(trace)
            except Exception:  # a trace that fails must not cost the others
                _log.exception("a trace of model '%s' cannot be sent", trace.report.model)
                self._refused += 1
                continue
            # the processor drops silently; part of a trace would be useless
            if self._given - self._exporter.taken + len(spans) > self._most:
                self._refused += len(spans)
                continue
            self._given += len(spans)
            for span in spans:
                self._processor.on_end(span)

    def close(self) -> None:
        """Send the waiting spans, within a time limit."""
        ending = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
