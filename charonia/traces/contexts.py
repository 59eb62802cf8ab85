"""The context of a traced request, and the reports gathered for it (N1, N5, N6). Pure.

The gateway that traces a request makes its context; requests made for it (by an ensemble or a model) have child
contexts. `gateway.tracing` selects the requests.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from charonia.errors import InvalidRecord

if TYPE_CHECKING:
    from charonia.tensors import Buffer

    from .reports import Report

TIMESTAMPS = 1
TENSORS = 2
PROPAGATED = 4
"""The trace is an OpenTelemetry trace: models and webhooks get its context (P17)."""

MAX_TRACESTATE = 512
"""Max characters of `tracestate`: every hop must pass on so many (W3C Trace Context). A longer one is dropped."""
MOST_CHILDREN = 1000
"""Max reports of calls and steps of one request."""

# flags, trace id, span id, length of tracestate, length of report_to
_CONTEXT = struct.Struct("<B16s8sHH")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class Parent:
    """The caller's span, from W3C `traceparent`."""

    trace_id: bytes
    span_id: bytes
    sampled: bool
    state: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """`span_id` is this request's own.

    `report_to` names the gateway that wants the report of a request that no caller waits for (a job); "" if the report
    comes with the answer.
    """

    flags: int
    trace_id: bytes
    span_id: bytes
    state: str = ""
    report_to: str = ""

    def child(self, span_id: bytes) -> Context:
        """The context of a request that is made for this one, which waits for the answer."""
        return replace(self, span_id=span_id, report_to="")

    @property
    def traceparent(self) -> str:
        """The W3C header for work done for this request."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-01"

    def carrier(self) -> dict[str, str]:
        """OpenTelemetry's propagation context as headers; empty for a trace that is not propagated."""
        if not self.flags & PROPAGATED:
            return {}
        return {"traceparent": self.traceparent} | ({"tracestate": self.state} if self.state else {})

    def pack(self) -> bytes:
        state, report_to = self.state.encode(), self.report_to.encode()
        return _CONTEXT.pack(self.flags, self.trace_id, self.span_id, len(state), len(report_to)) + state + report_to

    @staticmethod
    def unpack(data: Buffer, at: int) -> tuple[Context, int]:
        """The context at `at`, and its end. Raises `InvalidRecord`."""
        try:
            flags, trace_id, span_id, state_length, to_length = _CONTEXT.unpack_from(data, at)
            state_at = at + _CONTEXT.size
            to_at = state_at + state_length
            end = to_at + to_length
            if end > len(data):
                raise InvalidRecord("the trace context of a request is cut short")
            state = str(bytes(data[state_at:to_at]), "utf-8")
            return Context(flags, trace_id, span_id, state, str(bytes(data[to_at:end]), "utf-8")), end
        except (struct.error, UnicodeDecodeError) as error:
            raise InvalidRecord(f"the trace context of a request cannot be read: {error}") from None


@dataclass(slots=True)
class Traced:
    """One traced request in its process: `children` are the reports of requests made for it, `report` is its own."""

    context: Context
    children: list[Report] = field(default_factory=list)
    report: Report | None = None

    def add(self, report: Report | None) -> None:
        """A request made for it has ended."""
        if report is not None and len(self.children) < MOST_CHILDREN:
            self.children.append(report)

    def took(self, report: Report | None) -> None:
        """Its answer has arrived; one that was made for another request (from a cache) holds no report of this one."""
        if report is not None and report.span_id == self.context.span_id:
            self.report = report


def read_parent(traceparent: str, tracestate: str = "") -> Parent | None:
    """The caller's span; None for an invalid header, which is ignored (W3C Trace Context)."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = tracestate if len(tracestate) <= MAX_TRACESTATE and tracestate.isascii() else ""
    return Parent(bytes.fromhex(trace_id), bytes.fromhex(span_id), bool(int(flags, 16) & 1), state)
