"""One traced request at its gateway: the timestamps of its front and its service, and the finished trace."""

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
    """A trace to be written. `report` is the request's, with its children; `front` are the front's timestamps.

    `root_id` is the id of the span that stands for the call; `parent` is its parent, if it has one.
    """

    context: Context
    root_id: bytes
    parent: Parent | None
    report: Report
    front: tuple[Stamp, ...]
    error: str
    log_frequency: int
    series: int
    """Differs between settings of the trace file."""

    def merged(self) -> Report:
        """The request's report with the front's timestamps."""
        return replace(self.report, stamps=(*self.front, *self.report.stamps))


@dataclass(slots=True, eq=False)
class Trace(Traced):
    """A trace in progress, made by `Tracer.begin`. Call `finish` once, after all timestamps."""

    root_id: bytes = b""
    parent: Parent | None = None
    model: str = ""
    version: int = 0
    request_id: str = ""
    tenant: str = ""
    front: list[Stamp] = field(default_factory=list)
    own: list[Stamp] = field(default_factory=list)
    """Timestamps of the request itself at this gateway."""
    error: str = ""
    log_frequency: int = 0
    series: int = 0
    counted: str = ""
    """The name of the count in the log that it is counted by."""
    on_finish: Callable[[Trace], None] | None = None
    awaits_report: bool = False
    """Its request is a job, whose report arrives after the call has ended."""
    is_over: bool = False
    """Its call has ended; only its report is awaited."""

    def mark(self, name: str) -> None:
        """Add a timestamp of the front."""
        self.front.append((name, wall_ns()))

    def begins(self, model: str, version: int, request_id: str, tenant: str = "") -> None:
        """The gateway has accepted the request; once more, if another version has failed it."""
        self.model, self.version, self.request_id, self.tenant = model, version, request_id, tenant
        if all(name != REQUEST_START for name, _ in self.own):
            self.own.append((REQUEST_START, wall_ns()))

    def ends(self, error: str = "") -> None:
        """The request has its last answer."""
        now_ns = wall_ns()
        self.own.append((REQUEST_END, now_ns))
        self.front.append((RESPONSE_COMPLETE, now_ns))
        self.error = error

    def finish(self) -> None:
        """The call has ended; further calls have no effect."""
        on_finish, self.on_finish = self.on_finish, None
        if on_finish is not None:
            on_finish(self)

    @property
    def _about(self) -> tuple[tuple[str, str | int], ...]:
        return (("charonia.tenant", self.tenant),) if self.tenant else ()

    def finished(self) -> Finished:
        """The trace to write: the executor's report, between this gateway's timestamps."""
        report = self.report
        if report is None:
            own = Report(
                self.context.span_id,
                self.model,
                self.version,
                self.request_id,
                tuple(self.own),
                self.error,
                self._about,
            )
        else:
            names = {name for name, _ in self.own}
            between = tuple(stamp for stamp in report.stamps if stamp[0] not in names)
            own = replace(
                report,
                stamps=(*self.own, *between),
                request_id=self.request_id or report.request_id,
                about=(*report.about, *self._about),
            )
        error = self.error or own.error
        return Finished(
            self.context, self.root_id, self.parent, own, tuple(self.front), error, self.log_frequency, self.series
        )


async def reported(trace: Traced, send: Callable[[], Awaitable[ResponseRecord]]) -> ResponseRecord:
    """Send a traced request whose answer is shared with others, and keep the part about this request."""
    record = await send()
    trace.took(record.report)
    return record


def answered(trace: Traced, record: ResponseRecord) -> None:
    """The last answer to a traced request has arrived."""
    trace.took(record.report)
    if isinstance(trace, Trace):
        trace.ends(record.error.message if record.error is not None else "")


def failed(trace: Traced, error: CharoniaError) -> None:
    """A traced request has failed."""
    if isinstance(trace, Trace):
        trace.ends(error.message)


def left(trace: Traced) -> None:
    """The client of a traced request has left."""
    if isinstance(trace, Trace):
        trace.ends("the caller has gone")
