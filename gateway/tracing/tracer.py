"""Selects the requests of this gateway that are traced (N1, N2), and passes their traces to the writer.

Every gateway traces each n-th of its own requests. A count set at run time holds for all gateways together: a trace is
written once it is counted in the log. A count set at start is each gateway's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Awaitable

from charonia import keys
from charonia.errors import CharoniaError, InvalidArgument, Unavailable
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.port import Notes
from charonia.facts.events import Fact, TraceSettingChanged
from charonia.facts.jobs import JobTicket
from charonia.tasks import Tasks
from charonia.traces.contexts import PROPAGATED, TIMESTAMPS, Context, Parent, read_parent
from charonia.traces.trace_settings import (
    OPENTELEMETRY,
    TraceOptions,
    TraceSettings,
    Wanted,
    applied,
    changed,
    check,
    read_change,
    reply,
)
from charonia.wire import ResponseRecord

from .trace import Trace
from .writer import TraceWriter

MAX_AWAITED = 10_000
"""Max jobs whose reports one gateway waits for; the oldest trace is written without it."""
_HEARD_WITHIN_S = 10.0


class _Sampler:
    """Samples requests for the models that share settings."""

    __slots__ = ("_seen", "counted", "left", "series", "settings")

    def __init__(self, settings: TraceSettings, counted: str, series: int) -> None:
        self.settings = settings
        self.counted = counted
        self.left = settings.count
        """Number of traces left, -1 for no limit; of a count in the log the number known here."""
        self.series = series
        self._seen = 0

    def samples(self) -> bool:
        """Whether the next request is traced."""
        rate = self.settings.rate
        if rate <= 0 or self.left == 0:
            return False
        self._seen += 1
        if self._seen < rate:
            return False
        self._seen = 0
        if self.left > 0 and not self.counted:
            self.left -= 1
        return True

    def passes_over(self) -> bool:
        """Whether the next request is not traced; one that would be is not counted."""
        rate = self.settings.rate
        if rate <= 0 or self.left == 0:
            return True
        if self._seen + 1 >= rate:
            return False
        self._seen += 1
        return True


class Tracer:
    """The traces of one gateway. While it is not `on`, no request is traced and it need not be asked."""

    def __init__(self, options: TraceOptions, control: ControlPlane, log: Notes, writer: TraceWriter | None) -> None:
        self._options = options
        self._log = log
        self._control = control
        self._catalog = control.catalog
        self._writer = writer
        self._propagates = options.mode == OPENTELEMETRY
        self._samplers: dict[str, _Sampler] = {}
        self._of_all = _Sampler(options.initial, "", 0)
        self._series = 0
        self._awaited: OrderedDict[bytes, Trace] = OrderedDict()
        self._tasks = Tasks()
        self._uncounted = 0
        self.on = False
        self._catalog.process_listeners.append(self._heard)
        self._apply()

    @property
    def written(self) -> int:
        return self._writer.written if self._writer is not None else 0

    @property
    def dropped(self) -> int:
        return self._uncounted + (self._writer.dropped if self._writer is not None else 0)

    # -- settings -----------------------------------------------------------------------------------------------------

    async def settings(self, model: str) -> dict[str, list[str]]:
        """The full setting of a model, or of all (""). Raises `InvalidArgument` for a model that is not served."""
        self._check(model)
        settings, counted = self._effective(model)
        if counted and settings.count > 0:
            used = await self._log.add_to_count(keys.trace_count(counted), 0)
            settings = applied(settings, {"count": max(0, settings.count - used)})
        elif settings.count > 0:
            sampler = self._samplers.get(model, self._of_all)
            settings = applied(settings, {"count": max(0, sampler.left)})
        return reply(self._options, settings)

    async def update(self, model: str, wanted: Wanted) -> dict[str, list[str]]:
        """Change settings for every gateway, all or nothing. Raises H44's errors for invalid ones."""
        self._check(model)
        change = read_change(wanted)
        if change:
            known = self._catalog.trace_settings.get(model)
            said = changed(known.settings if known is not None else {}, change)
            of_all, _ = self._effective("")
            check(self._options, applied(of_all if model else self._options.initial, said))
            before = known.counted if known is not None else ""
            counted = before if "count" not in change else os.urandom(8).hex() if "count" in said else ""
            fact = TraceSettingChanged(model, said, counted)
            await self._announce(fact)
            if before and before != counted:
                with contextlib.suppress(CharoniaError):
                    await self._log.delete_keys([keys.trace_count(before)])
        return await self.settings(model)

    async def _announce(self, fact: TraceSettingChanged) -> None:
        """Returns when this gateway has read the fact, or a later one."""
        heard = asyncio.Event()

        def listen(said: Fact) -> None:
            if said == fact:
                heard.set()

        self._catalog.process_listeners.append(listen)
        try:
            await self._control.announce(fact)
            await asyncio.wait_for(heard.wait(), _HEARD_WITHIN_S)
        except TimeoutError:
            raise Unavailable("the change of the trace setting is recorded, but has not come back yet") from None
        finally:
            self._catalog.process_listeners.remove(listen)

    def _check(self, model: str) -> None:
        if model and not self._catalog.served(self._catalog.resolve(model)):
            raise InvalidArgument(f"Request for unknown model : {model}")

    def _heard(self, fact: Fact) -> None:
        if isinstance(fact, TraceSettingChanged):
            self._apply()

    def begin_anew(self) -> None:
        """The log was replaced, and its settings are gone."""
        self._apply()

    def _effective(self, model: str) -> tuple[TraceSettings, str]:
        """The settings for a model, and the name of its count in the log, "" for this gateway's own."""
        settings, counted = self._options.initial, ""
        for name in ("", model) if model else ("",):
            fact = self._catalog.trace_settings.get(name)
            if fact is not None:
                settings = applied(settings, fact.settings)
                if (count := fact.settings.get("count")) is not None:
                    counted = fact.counted if count >= 0 else ""
        return settings, counted

    def _apply(self) -> None:
        self._series += 1
        self._of_all = self._sampler(self._of_all, "")
        models = [model for model, fact in self._catalog.trace_settings.items() if model and fact.settings]
        self._samplers = {model: self._sampler(self._samplers.get(model), model) for model in models}
        levels = [sampler.settings.level for sampler in (self._of_all, *self._samplers.values())]
        self.on = self._writer is not None and any(levels)

    def _sampler(self, known: _Sampler | None, model: str) -> _Sampler:
        """Keep the sampler if nothing changed for it."""
        settings, counted = self._effective(model)
        if known is not None and (known.settings, known.counted) == (settings, counted):
            return known
        return _Sampler(settings, counted, self._series)

    # -- traces -------------------------------------------------------------------------------------------------------

    def begin(self, model: str, traceparent: str = "", tracestate: str = "") -> Trace | None:
        """Begin the trace of a request; None if it is not to be traced.

        `traceparent` and `tracestate` are the headers about the caller's span (N6).
        """
        sampler = self._samplers.get(model, self._of_all)
        settings = sampler.settings
        if not settings.level:
            return None
        parent = read_parent(traceparent, tracestate) if traceparent and self._propagates else None
        wanted = parent is not None and parent.sampled
        if not wanted and not sampler.samples():
            return None
        return self._new(model, sampler, parent, counted="" if wanted else sampler.counted)

    def passes_over(self, model: str, *, is_sampled: bool) -> bool:
        """Whether a request that has come is not traced, as `begin` would say; `is_sampled` if its caller's span is.

        One that may be traced is `begin`'s to decide.
        """
        sampler = self._samplers.get(model, self._of_all)
        if not sampler.settings.level:
            return True
        return not (is_sampled and self._propagates) and sampler.passes_over()

    def _new(self, model: str, sampler: _Sampler, parent: Parent | None, *, counted: str) -> Trace:
        drawn = os.urandom(32)
        # tensors are only for the file: spans do not hold them
        flags = TIMESTAMPS | PROPAGATED if self._propagates else sampler.settings.level
        trace_id, state = (parent.trace_id, parent.state) if parent is not None else (drawn[16:], "")
        return Trace(
            Context(flags, trace_id, drawn[:8], state),
            root_id=drawn[8:16],
            parent=parent,
            model=model,
            log_frequency=sampler.settings.log_frequency,
            series=sampler.series,
            counted=counted,
            on_finish=self._finished,
        )

    def _finished(self, trace: Trace) -> None:
        if not trace.own:
            return  # it was refused before it became a request
        if trace.awaits_report:
            trace.on_finish, trace.is_over = self._finished, True
            return
        if trace.counted:
            self._tasks.spawn(self._count(trace))
        elif self._writer is not None:
            self._writer.put(trace.finished())

    async def _count(self, trace: Trace) -> None:
        sampler = self._samplers.get(trace.model, self._of_all)
        try:
            number = await self._log.add_to_count(keys.trace_count(trace.counted), 1)
        except CharoniaError:
            self._uncounted += 1
            return
        if sampler.counted == trace.counted:
            sampler.left = max(0, sampler.settings.count - number)
            if number <= sampler.settings.count and self._writer is not None:
                self._writer.put(trace.finished())

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def accepted(self, job_id: bytes, trace: Trace, accepting: Awaitable[JobTicket]) -> JobTicket:
        """Await the acceptance of a traced job that no caller waits for, and then its report."""
        self.await_report(job_id, trace)
        created = False
        try:
            ticket = await accepting
            created = ticket.created
            return ticket
        finally:
            if not created:
                self.await_no_report(job_id)

    def await_report(self, job_id: bytes, trace: Trace) -> None:
        """Wait for the report of a traced job after its call has ended."""
        trace.awaits_report = True
        self._awaited[job_id] = trace
        if len(self._awaited) > MAX_AWAITED:
            self._give_up(next(iter(self._awaited)))

    def await_no_report(self, job_id: bytes, error: str = "") -> None:
        """Write the trace of a job for which no report will come."""
        trace = self._awaited.pop(job_id, None)
        if trace is not None:
            trace.awaits_report = False
            if error:
                trace.ends(error)
            if error or trace.is_over:
                trace.finish()

    def report_for(self, response: ResponseRecord) -> bool:
        """Handle the report of a job; False if no trace waits for it."""
        trace = self._awaited.get(response.id)
        if trace is None or response.report is None:
            return False
        trace.took(response.report)
        self._give_up(response.id)
        return True

    def _give_up(self, job_id: bytes) -> None:
        trace = self._awaited.pop(job_id)
        trace.awaits_report = False
        trace.finish()

    async def close(self) -> None:
        """Write the traces in progress."""
        for job_id in list(self._awaited):
            self._give_up(job_id)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._tasks.settled(), 1.0)
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)
