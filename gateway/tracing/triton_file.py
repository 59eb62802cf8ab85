"""Writes traces to Triton's trace file (N2, N3): one JSON array, complete after every write.

A log frequency of n puts n traces into each of `<file>.0`, `<file>.1` and so on; other settings begin the next one. A
file of that name from an earlier start is replaced.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import BinaryIO

from charonia.traces.contexts import TIMESTAMPS
from charonia.traces.triton_text import objects

from .trace import Finished

_log = logging.getLogger(__name__)


class _Array:
    """A file that holds a JSON array, also while it grows."""

    def __init__(self, path: str) -> None:
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115
        self._empty = True
        self.traces = 0

    def append(self, objects: Sequence[bytes]) -> None:
        body = b",\n".join(objects)
        if self._empty:
            self._file.write(b"[" + body + b"]\n")
        else:
            self._file.seek(-2, 2)  # the bracket and the line end
            self._file.write(b",\n" + body + b"]\n")
        self._empty = False
        self._file.flush()

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
