"""The gRPC front's part of a trace: the caller's context in metadata, and timestamps of reading and sending (N4).

The server writes the reply: for the trace, sending ends when the reply is passed to it.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.tracing.trace import Trace
from gateway.tracing.tracer import Tracer

WAITREAD_START, WAITREAD_END = "GRPC_WAITREAD_START", "GRPC_WAITREAD_END"
SEND_START, SEND_END = "GRPC_SEND_START", "GRPC_SEND_END"


def begin_trace(tracer: Tracer, model: str, metadata: Iterable[tuple[str, str | bytes]], came_ns: int) -> Trace | None:
    """Begins the trace of a request that was received at `came_ns`; None if it is not to be traced."""
    words = {name: value for name, value in metadata if name in ("traceparent", "tracestate")}
    traceparent, tracestate = (
        value if isinstance(value, str) else value.decode("latin-1")
        for value in (words.get("traceparent", ""), words.get("tracestate", ""))
    )
    trace = tracer.begin(model, traceparent, tracestate)
    if trace is not None:
        trace.front.append((WAITREAD_START, came_ns))
        trace.mark(WAITREAD_END)
    return trace


def sent(trace: Trace) -> None:
    """End a trace: its last answer is passed to the server, or there is none."""
    trace.mark(SEND_END)
    trace.finish()
