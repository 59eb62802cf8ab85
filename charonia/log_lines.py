"""Log lines: where they go (L1), and their two formats, chosen by `--log-format` and changed at run time (L2, L3).

`charonia.composition.logs` sets the handler and the level up; `gateway.reports.log_settings` is what clients change.
"""

from __future__ import annotations

import logging
import logging.handlers
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

DEFAULT, ISO8601 = "default", "ISO8601"
FORMATS = (DEFAULT, ISO8601)


@dataclass(frozen=True, slots=True)
class Severities:
    """Which lines are written (L1): each switch hides its own severity alone, `verbose` above 0 adds details."""

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose: int = 0

    @property
    def level(self) -> int:
        """The lowest level of logging that is written."""
        if self.verbose > 0:
            return logging.DEBUG
        if self.info:
            return logging.INFO
        if self.warning:
            return logging.WARNING
        return logging.ERROR if self.error else logging.CRITICAL

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written; the interface of filters of logging."""
        shown = {logging.INFO: self.info, logging.WARNING: self.warning, logging.ERROR: self.error}
        return shown.get(record.levelno, True)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_FURTHER_LINE = re.compile(r"\n(?=\S)")


class LineFormatter(logging.Formatter):
    """Writes log lines in one of `FORMATS`. Times of ISO8601 are UTC.

    Clients choose names that stand in messages: control characters are escaped, and further lines of a message are
    indented, so that none of them looks like a line of its own or speaks to a terminal.
    """

    def __init__(self, name: str = DEFAULT) -> None:
        self.name = name
        if name == ISO8601:
            super().__init__("%(asctime)s %(levelname).1s %(process)d %(name)s] %(message)s", "%Y-%m-%dT%H:%M:%SZ")
            self.converter = time.gmtime
        else:
            super().__init__("%(levelname).1s%(asctime)s %(process)d %(name)s] %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if text.isprintable():
            return text
        return _FURTHER_LINE.sub("\n  ", _CONTROL.sub(_escaped, text))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def open_handler(file: str, form: str = DEFAULT) -> logging.Handler:
    """Writes whole lines to the end of a file that several processes may share, or to stderr. Raises OSError.

    A file that was moved away is made again, so that logs can be rotated.
    """
    watched = logging.handlers.WatchedFileHandler
    handler = watched(file, encoding="utf-8") if file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(form))
    return handler


def current_file() -> str:
    """The path of the file that this process's lines go to; "" for stderr."""
    return next((handler.baseFilename for handler in _files()), "")


def descriptors() -> set[int]:
    """Those that lines are written to, apart from stderr."""
    return {handler.stream.fileno() for handler in _files() if handler.stream is not None}


def current_format() -> str:
    """The format of this process's lines."""
    return next((formatter.name for _, formatter in _own_handlers()), DEFAULT)


def change_format(name: str) -> None:
    """Write all later lines of this process in a format. Handlers of a program that we run in stay as they are."""
    for handler, _ in _own_handlers():
        handler.setFormatter(LineFormatter(name))


def current_severities() -> Severities:
    """Those that were chosen last, or those that correspond to the root logger's level where a program has set it."""
    level = logging.getLogger().getEffectiveLevel()
    chosen = (filter_ for handler, _ in _own_handlers() for filter_ in handler.filters)
    for severities in chosen:
        if isinstance(severities, Severities) and severities.level == level:
            return severities
    return Severities(
        info=level <= logging.INFO,
        warning=level <= logging.WARNING,
        error=level <= logging.ERROR,
        verbose=1 if level <= logging.DEBUG else 0,
    )


def change_severities(severities: Severities) -> None:
    """Write later lines of these severities alone. Handlers of a program that we run in get them by the level."""
    logging.getLogger().setLevel(severities.level)
    for handler, _ in _own_handlers():
        handler.filters = [other for other in handler.filters if not isinstance(other, Severities)] + [severities]


def _files() -> Iterator[logging.FileHandler]:
    return (handler for handler, _ in _own_handlers() if isinstance(handler, logging.FileHandler))


def _own_handlers() -> Iterator[tuple[logging.Handler, LineFormatter]]:
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, LineFormatter):
            yield handler, handler.formatter
