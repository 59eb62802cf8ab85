"""`/v2/logging` over Python's logging: what the settings are and what changing them does (H45).

The severity switches choose the root logger's level; one level stands for all of them, so a gap (warnings off, info on)
takes the lowest that is on.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

from charonia.errors import InternalError, InvalidArgument, Unsupported

from .jsondata import NOT_BOOLEAN, NOT_STRING, NOT_UNSIGNED

_SWITCHES = ("log_info", "log_warning", "log_error")


@dataclass(frozen=True, slots=True)
class LogSwitches:
    """The settings in the order of the reply (H45)."""

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"

    @property
    def level(self) -> int:
        """The logging level they amount to."""
        if self.log_verbose_level > 0:
            return logging.DEBUG
        if self.log_info:
            return logging.INFO
        if self.log_warning:
            return logging.WARNING
        return logging.ERROR if self.log_error else logging.CRITICAL

    def changed(self, wanted: dict[str, Any]) -> LogSwitches:
        """The settings after a partial update, all or nothing; unknown keys are ignored.

        Raises `Unsupported`, `InvalidArgument` or `InternalError` (E4) for a value that cannot be.
        """
        changes: dict[str, Any] = {}
        for key, value in wanted.items():
            if key == "log_file":
                raise Unsupported("log file location can not be updated through network protocol")
            if key in _SWITCHES:
                if not isinstance(value, bool):
                    raise InternalError(f"Unable to parse '{key}': {NOT_BOOLEAN}")
            elif key == "log_verbose_level":
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise InternalError(f"Unable to parse '{key}': {NOT_UNSIGNED}")
            elif key == "log_format":
                _check_format(value)
            else:
                continue
            changes[key] = value
        return replace(self, **changes)

    def reply(self) -> dict[str, Any]:
        return asdict(self)


def current() -> LogSwitches:
    """The settings that the root logger's present level stands for."""
    level = logging.getLogger().getEffectiveLevel()
    return LogSwitches(
        log_info=level <= logging.INFO,
        log_warning=level <= logging.WARNING,
        log_error=level <= logging.ERROR,
        log_verbose_level=1 if level <= logging.DEBUG else 0,
    )


def apply(switches: LogSwitches) -> None:
    """Effective immediately (L3)."""
    logging.getLogger().setLevel(switches.level)


def _check_format(value: Any) -> None:
    if not isinstance(value, str):
        raise InternalError(f"Unable to parse 'log_format': {NOT_STRING}")
    if value == "ISO8601":
        raise Unsupported("changing log_format to ISO8601 at run time is not built yet")
    if value != "default":
        raise InvalidArgument(f"invalid argument for --log_format, got: {value}")
