"""The log settings that both protocols change at run time, over Python's logging (H45, G16, L3).

The severity switches select the level of the root logger, which has no gaps: with warnings off and info on, the lowest
level that is on counts. Fronts check values, and refuse wrong ones in their own form.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

from charonia.errors import Unsupported
from charonia.log_lines import DEFAULT, change_format, current_file, current_format

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
    def level(self) -> int:
        """The logging level that they select."""
        if self.log_verbose_level > 0:
            return logging.DEBUG
        if self.log_info:
            return logging.INFO
        if self.log_warning:
            return logging.WARNING
        return logging.ERROR if self.log_error else logging.CRITICAL

    def changed(self, wanted: dict[str, Any]) -> LogSwitches:
        """The settings after a partial update, all or nothing; unknown keys are ignored.

        Values must have the types of `TYPES`, formats must be known. Raises `Unsupported` for a setting that cannot be
        changed.
        """
        if "log_file" in wanted:
            raise Unsupported("log file location can not be updated through network protocol")
        return replace(self, **{key: value for key, value in wanted.items() if key in TYPES})

    def reply(self) -> dict[str, Any]:
        return asdict(self)


def current() -> LogSwitches:
    """The settings that correspond to the root logger's level and the format of its lines."""
    level = logging.getLogger().getEffectiveLevel()
    return LogSwitches(
        log_file=current_file(),
        log_info=level <= logging.INFO,
        log_warning=level <= logging.WARNING,
        log_error=level <= logging.ERROR,
        log_verbose_level=1 if level <= logging.DEBUG else 0,
        log_format=current_format(),
    )


def apply(switches: LogSwitches) -> None:
    """Apply the settings in this process, at once (L3)."""
    logging.getLogger().setLevel(switches.level)
    change_format(switches.log_format)
    _log.info("log settings of this process: %s", switches.reply())
