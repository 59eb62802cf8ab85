"""The HTTP front's part of a trace: the caller's context in headers, and the names of its timestamps (N4)."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.tracing.trace import Trace
from gateway.tracing.tracer import Tracer

HTTP_RECV_START, HTTP_RECV_END = "HTTP_RECV_START", "HTTP_RECV_END"
HTTP_SEND_START, HTTP_SEND_END = "HTTP_SEND_START", "HTTP_SEND_END"


TRACEPARENT = b"traceparent"


def begin_trace(tracer: Tracer, model: str, headers: Iterable[tuple[bytes, bytes]]) -> Trace | None:
    """Begins the trace of a request whose headers have just arrived; None if it is not to be traced."""
    traceparent = tracestate = ""
    for name, value in headers:
        if name == TRACEPARENT:
            traceparent = value.decode("latin-1")
        elif name == b"tracestate":
            tracestate = f"{tracestate},{value.decode('latin-1')}" if tracestate else value.decode("latin-1")
    trace = tracer.begin(model, traceparent, tracestate)
    if trace is not None:
        trace.mark(HTTP_RECV_START)
    return trace
