"""Traces as OpenTelemetry spans (N6): the call, each model that took part, and each model's compute.

Names, attributes and events are Triton's. Spans are made from what was reported once a request is over, with ids that
were given while it ran, so that spans which model code makes of its own find their parents. Sending them is
`span_export`'s.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from charonia.traces.reports import COMPUTE, COMPUTE_END, COMPUTE_START, Report, Stamp

from .trace import Finished

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)

Attributes = Mapping[str, str | int]


class SpanMaker:
    """The spans of one gateway; `triton.trace_id` counts its traces."""

    def __init__(self, resource: Resource, version: str) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("charonia", version)
        self._numbers = itertools.count(1)

    def spans(self, trace: Finished) -> list[ReadableSpan]:
        """The root first, parents before children."""
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
