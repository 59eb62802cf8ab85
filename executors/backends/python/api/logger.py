"""`pb_utils.Logger`: sends log lines of model code to the executor (P15)."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable

_LEVELS = ("INFO", "WARNING", "ERROR", "VERBOSE")


def _to_stderr(level: int, file: str, line: int, message: str) -> None:
    sys.stderr.write(f"{_LEVELS[level]} {file}:{line}] {message}\n")


_sink: Callable[[int, str, int, str], None] = _to_stderr


def send_lines_to(sink: Callable[[int, str, int, str], None] | None) -> None:
    """Set the function that gets lines: (level, file, line, message); None: stderr."""
    global _sink
    _sink = sink or _to_stderr


class Logger:
    """Logging functions, used without an instance: `pb_utils.Logger.log_info("...")`."""

    class LogLevel(enum.IntEnum):
        INFO = 0
        WARNING = 1
        ERROR = 2
        VERBOSE = 3

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: int = INFO) -> None:
        _send(level, message)

    @staticmethod
    def log_info(message: str) -> None:
        _send(Logger.INFO, message)

    @staticmethod
    def log_warn(message: str) -> None:
        _send(Logger.WARNING, message)

    @staticmethod
    def log_error(message: str) -> None:
        _send(Logger.ERROR, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        _send(Logger.VERBOSE, message)


def _send(level: int, message: str) -> None:
    caller = sys._getframe(2)
    known = int(level) if 0 <= level < len(_LEVELS) else 0
    _sink(known, caller.f_code.co_filename, caller.f_lineno, str(message))
