"""Splits the output of a model process into lines, passes them on with a prefix, and keeps the last ones. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

KEPT_LINES = 50
MAX_LINE_BYTES = 8192


class OutputLines:
    """Splits bytes into lines and passes them to `write`. Lines longer than `MAX_LINE_BYTES` are split."""

    def __init__(self, prefix: str, write: Callable[[str], object]) -> None:
        self._prefix = prefix
        self._write = write
        self._partial = b""
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    def feed(self, data: bytes) -> None:
        """Add bytes; complete lines are written at once, in one call."""
        lines = (self._partial + data).split(b"\n")
        self._partial = lines.pop()
        while len(self._partial) > MAX_LINE_BYTES:
            lines.append(self._partial[:MAX_LINE_BYTES])
            self._partial = self._partial[MAX_LINE_BYTES:]
        self._emit(lines)

    def end(self) -> None:
        """End the output; an unfinished line counts as a line."""
        if self._partial:
            self._emit([self._partial])
            self._partial = b""

    def last_lines(self) -> str:
        """Return the last lines, without the prefix."""
        return "\n".join(self._last)

    def _emit(self, lines: list[bytes]) -> None:
        if not lines:
            return
        texts = [line[:MAX_LINE_BYTES].decode("utf-8", "backslashreplace") for line in lines]
        self._last.extend(texts)
        self._write("".join([f"{self._prefix}{text}\n" for text in texts]))
