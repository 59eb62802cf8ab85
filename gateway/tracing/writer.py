"""A thread that writes finished traces down, so that no request waits for a disk or a collector.

What waits is bounded: traces that come faster than they are written are dropped and counted. Where and how they are
written is the `Sink`'s.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Protocol

from charonia.options.settings import SERVER_VERSION, GatewaySettings
from charonia.traces.trace_settings import OPENTELEMETRY

from .trace import Finished
from .triton_file import TritonFile

_log = logging.getLogger(__name__)

MOST_WAITING = 10_000
_CLOSE_S = 3.0


class Sink(Protocol):
    """Used by one thread."""

    @property
    def dropped(self) -> int:
        """Traces, or parts of them, that could not be written."""

    def write(self, traces: Sequence[Finished]) -> None: ...

    def close(self) -> None: ...


class TraceWriter:
    """`put` from the event loop; `close` writes what waits, for a few seconds at most."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._refused = 0
        self._failing = False
        self.written = 0
        """Traces handed to the sink."""

    @property
    def dropped(self) -> int:
        return self._refused + self._sink.dropped

    def put(self, trace: Finished) -> None:
        if self._waiting.qsize() >= MOST_WAITING:
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
            while len(traces) < MOST_WAITING and not self._waiting.empty():
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
            if not self._failing:  # once for a row of them
                _log.error("traces cannot be written: %s: %s", type(error).__name__, error)
            self._failing = True


def trace_writer(settings: GatewaySettings) -> TraceWriter | None:
    """None where traces would lead nowhere. Raises `StartupError` for a library that is missing."""
    options = settings.tracing
    if not options.leads_somewhere:
        return None
    if options.mode == OPENTELEMETRY:
        from .span_export import SpanExport  # its libraries take time to load

        return TraceWriter(SpanExport(options, settings.incarnation, SERVER_VERSION))
    return TraceWriter(TritonFile(options.file))
