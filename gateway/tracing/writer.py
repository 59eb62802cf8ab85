"""A thread that writes finished traces down, so that no request waits for a disk or a collector.

What waits is bounded: traces that come faster than they are written are dropped and counted. Where they are written is
the `Sink`'s; spans are `span_export`'s.

Triton's trace file (N2, N3) is one JSON array, complete after every write. A log frequency of n puts n traces into each
of `<file>.0`, `<file>.1` and so on; other settings begin the next one. A file of that name from an earlier start is
replaced.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Sequence
from io import FileIO
from typing import Protocol

from charonia.options.settings import SERVER_VERSION, GatewaySettings
from charonia.traces.contexts import TIMESTAMPS
from charonia.traces.trace_settings import OPENTELEMETRY
from charonia.traces.triton_text import objects

from .trace import Finished

_log = logging.getLogger(__name__)

MAX_WAITING = 10_000
_CLOSE_S = 3.0


class _Array:
    """A file that holds a complete JSON array after every write."""

    def __init__(self, path: str) -> None:
        self._file: FileIO = open(path, "wb", buffering=0)  # noqa: SIM115
        self._empty = True
        self.traces = 0

    def append(self, objects: Sequence[bytes]) -> None:
        body = b",\n".join(objects)
        if self._empty:
            body = b"[" + body
        else:
            self._file.seek(-2, 2)  # the bracket and the line end
            body = b",\n" + body
        self._empty = False
        rest = memoryview(body + b"]\n")
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()


class TritonFile:
    """The `Sink` of mode triton."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers = itertools.count(1)
        self._all: _Array | None = None
        self._part: _Array | None = None
        self._parts = 0
        self._series = -1
        self.dropped = 0

    def write(self, traces: Sequence[Finished]) -> None:
        waiting: list[bytes] = []
        for trace in traces:
            try:
                timestamps = bool(trace.context.flags & TIMESTAMPS)
                found = objects(trace.merged(), self._next_id, timestamps=timestamps)
            except Exception:  # one that cannot be told must not take the others with it
                _log.exception("a trace of model '%s' cannot be written", trace.report.model)
                self.dropped += 1
                continue
            if trace.log_frequency <= 0:
                waiting += found
            else:
                self._write_part(trace, found)
        if waiting:
            if self._all is None:
                self._all = _Array(self._path)
            self._all.append(waiting)

    def _next_id(self) -> int:
        return next(self._numbers)

    def _write_part(self, trace: Finished, found: list[bytes]) -> None:
        part = self._part
        if part is not None and (part.traces >= trace.log_frequency or trace.series != self._series):
            part.close()
            part = self._part = None
        if part is None:
            part = self._part = _Array(f"{self._path}.{self._parts}")
            self._parts += 1
            self._series = trace.series
        part.append(found)
        part.traces += 1

    def close(self) -> None:
        for file in (self._all, self._part):
            if file is not None:
                file.close()


class Sink(Protocol):
    """Writes traces; used by one thread."""

    @property
    def dropped(self) -> int:
        """Number of traces, or parts of traces, that could not be written."""

    def write(self, traces: Sequence[Finished]) -> None: ...

    def close(self) -> None: ...


class TraceWriter:
    """Writes traces in a thread: `put` from the event loop; `close` writes the rest, within a few seconds."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._refused = 0
        self._failing = False
        self.written = 0
        """Traces passed to the sink."""

    @property
    def dropped(self) -> int:
        return self._refused + self._sink.dropped

    def put(self, trace: Finished) -> None:
        if self._waiting.qsize() >= MAX_WAITING:
            self._refused += 1
            return
        self._waiting.put(trace)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Blocks."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        going = True
        while going:
            traces = [self._waiting.get()]
            while len(traces) < MAX_WAITING and not self._waiting.empty():
                traces.append(self._waiting.get())
            going = None not in traces
            self._write([trace for trace in traces if trace is not None])
        try:
            self._sink.close()
        except Exception:
            _log.exception("the last traces were not written")

    def _write(self, traces: list[Finished]) -> None:
        if not traces:
            return
        try:
            self._sink.write(traces)
            self.written += len(traces)
            self._failing = False
        except Exception as error:
            self._refused += len(traces)
            if not self._failing:  # once for consecutive failures
                _log.error("traces cannot be written: %s: %s", type(error).__name__, error)
            self._failing = True


def trace_writer(settings: GatewaySettings) -> TraceWriter | None:
    """The writer; None if traces are not written anywhere. Raises `StartupError` for a missing library."""
    options = settings.tracing
    if not options.leads_somewhere:
        return None
    if options.mode == OPENTELEMETRY:
        from .span_export import SpanExport  # its libraries take time to load

        return TraceWriter(SpanExport(options, settings.incarnation, SERVER_VERSION))
    return TraceWriter(TritonFile(options.file))
