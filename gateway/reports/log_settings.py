"""The log settings that both protocols change at run time, over Python's logging (H45, G16, L3).

Fronts check values, and refuse wrong ones in their own form.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

from charonia.errors import Unsupported
from charonia.log_lines import (
    DEFAULT,
    Severities,
    change_format,
    change_severities,
    current_file,
    current_format,
    current_severities,
)

_log = logging.getLogger(__name__)

TYPES: dict[str, type] = {
    "log_file": str,
    "log_info": bool,
    "log_warning": bool,
    "log_error": bool,
    "log_verbose_level": int,
    "log_format": str,
}
"""The settings and their types, in the order of the reply. Fronts check values before `LogSwitches.changed`."""

_MAX_VERBOSE_LEVEL = 2**31 - 1
"""The greatest number of 32 bits with a sign, as which Triton keeps the level."""


@dataclass(frozen=True, slots=True)
class LogSwitches:
    """The settings, in the order of the reply (H45)."""

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = DEFAULT

    @property
    def severities(self) -> Severities:
        """Which lines are written."""
        return Severities(self.log_info, self.log_warning, self.log_error, self.log_verbose_level)

    def changed(self, wanted: dict[str, Any]) -> LogSwitches:
        """The settings after a partial update, all or nothing; unknown keys are ignored.

        Values must have the types of `TYPES`, formats must be known. Raises `Unsupported` for a setting that cannot be
        changed.
        """
        if "log_file" in wanted:
            raise Unsupported("log file location can not be updated through network protocol")
        changes = {key: value for key, value in wanted.items() if key in TYPES}
        if "log_verbose_level" in changes:
            changes["log_verbose_level"] = _verbose_level(changes["log_verbose_level"])
        return replace(self, **changes)

    def reply(self) -> dict[str, Any]:
        return asdict(self)


def _verbose_level(number: int) -> int:
    """The level that Triton makes of a number: its lowest 32 bits with a sign, and a negative one is 0. A greater
    number has no place in the gRPC answer (`uint32_param`).
    """
    level = number & 0xFFFFFFFF
    return level if level <= _MAX_VERBOSE_LEVEL else 0


def current() -> LogSwitches:
    """The settings of this process."""
    severities = current_severities()
    return LogSwitches(
        current_file(),
        severities.info,
        severities.warning,
        severities.error,
        _verbose_level(severities.verbose),
        current_format(),
    )


def apply(switches: LogSwitches) -> None:
    """Apply the settings in this process, at once (L3)."""
    change_severities(switches.severities)
    change_format(switches.log_format)
    _log.info("log settings of this process: %s", switches.reply())
