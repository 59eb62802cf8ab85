"""One traced request at its gateway: what its front and its service note, and what it is in the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.traces.contexts import Context, Parent, Traced
from charonia.traces.reports import REQUEST_END, REQUEST_START, RESPONSE_COMPLETE, Report, Stamp
from charonia.wire import ResponseRecord


@dataclass(frozen=True, slots=True)
class Finished:
    """A trace to be written. `report` is the request's with all that was made for it; `front` are the times around it.

    `root_id` is the id of the span that stands for the call, whose parent `parent` is, if it has one.
    """

    context: Context
    root_id: bytes
    parent: Parent | None
    report: Report
    front: tuple[Stamp, ...]
    error: str
    log_frequency: int
    series: int
    """Traces under other settings have another number."""

    def merged(self) -> Report:
        """The request's report with the times around it."""
        return replace(self.report, stamps=(*self.front, *self.report.stamps))


@dataclass(slots=True, eq=False)
class Trace(Traced):
    """A trace in the making. Made by `Tracer.begin`; `finish` it once, after everything was noted."""

    root_id: bytes = b""
    parent: Parent | None = None
    model: str = ""
    version: int = 0
    request_id: str = ""
    front: list[Stamp] = field(default_factory=list)
    own: list[Stamp] = field(default_factory=list)
    """Times of the request itself, as this gateway sees it."""
    error: str = ""
    log_frequency: int = 0
    series: int = 0
    counted: str = ""
    """The count that it is to be taken from."""
    on_finish: Callable[[Trace], None] | None = None
    awaits_report: bool = False
    """Its request is a job: there is more to come after its call is over."""
    is_over: bool = False
    """Its call is over, and what it waits for now comes by another way."""

    def mark(self, name: str) -> None:
        """Something of the front happens now."""
        self.front.append((name, wall_ns()))

    def begins(self, model: str, version: int, request_id: str) -> None:
        """The request is accepted by the gateway and goes on its way."""
        self.model, self.version, self.request_id = model, version, request_id
        self.own.append((REQUEST_START, wall_ns()))

    def ends(self, error: str = "") -> None:
        """It has its last answer."""
        now_ns = wall_ns()
        self.own.append((REQUEST_END, now_ns))
        self.front.append((RESPONSE_COMPLETE, now_ns))
        self.error = error

    def finish(self) -> None:
        """Nothing more happens to its call; a second time does nothing."""
        on_finish, self.on_finish = self.on_finish, None
        if on_finish is not None:
            on_finish(self)

    def finished(self) -> Finished:
        """What is to be written: what the executor says of the request, between what this gateway saw of it."""
        report = self.report
        if report is None:
            own = Report(
                self.context.span_id, self.model, self.version, self.request_id, tuple(self.own), self.error, ()
            )
        else:
            names = {name for name, _ in self.own}
            between = tuple(stamp for stamp in report.stamps if stamp[0] not in names)
            own = replace(report, stamps=(*self.own, *between), request_id=self.request_id or report.request_id)
        error = self.error or own.error
        return Finished(
            self.context, self.root_id, self.parent, own, tuple(self.front), error, self.log_frequency, self.series
        )


async def reported(trace: Traced, send: Callable[[], Awaitable[ResponseRecord]]) -> ResponseRecord:
    """Send a traced request whose answer will be others' as well, and keep what it says of this request alone."""
    record = await send()
    trace.took(record.report)
    return record


def answered(trace: Traced, record: ResponseRecord) -> None:
    """The last answer to a traced request is here."""
    trace.took(record.report)
    if isinstance(trace, Trace):
        trace.ends(record.error.message if record.error is not None else "")


def failed(trace: Traced, error: CharoniaError) -> None:
    """There will be none."""
    if isinstance(trace, Trace):
        trace.ends(error.message)


def left(trace: Traced) -> None:
    """Its caller has gone."""
    if isinstance(trace, Trace):
        trace.ends("the caller has gone")
