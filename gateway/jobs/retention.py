"""How much of a model's ended jobs and journal is kept: the operator's options, and what the model's configuration
says instead (`parameters: charonia.job_retention_s`, `charonia.job_retention_bytes`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from charonia.eventlog.port import Jobs
from charonia.models.interface import ModelInterface
from charonia.options.settings import GatewaySettings

_log = logging.getLogger(__name__)

PARAMETER_SECONDS = "charonia.job_retention_s"
PARAMETER_BYTES = "charonia.job_retention_bytes"


@dataclass(frozen=True, slots=True)
class Retention:
    """Of one model: seconds an ended job is kept at most, bytes of all its ended jobs (0 = no bound)."""

    seconds: int
    size_bytes: int


class Retentions:
    """The retention of every model, told to the log when a model is first used and when it changes."""

    def __init__(self, log: Jobs, settings: GatewaySettings) -> None:
        self._log = log
        self._settings = settings
        self._told: dict[str, Retention] = {}

    def of(self, interface: ModelInterface) -> Retention:
        """A parameter that is no number is ignored, with a word in the log when the model is first used."""
        settings = self._settings
        return Retention(
            _parameter(interface, PARAMETER_SECONDS, 1, settings.job_retention_s),
            _parameter(interface, PARAMETER_BYTES, 0, settings.job_retention_size_bytes),
        )

    async def tell(self, model: str, interface: ModelInterface) -> Retention:
        """The model's (`model` is its key) retention, known to the log when this returns. Raises `LogUnavailable`."""
        retention = self.of(interface)
        if self._told.get(model) != retention:
            await self._log.set_retention(
                model,
                size_bytes=retention.size_bytes,
                journal_s=self._settings.journal_retention_s,
                journal_size_bytes=self._settings.journal_retention_size_bytes,
            )
            self._told[model] = retention
            for name in (PARAMETER_SECONDS, PARAMETER_BYTES):
                text = interface.parameters.get(name)
                if text is not None and not _is_number(text):
                    _log.warning("model '%s': parameter '%s' is no whole number and is ignored", interface.name, name)
        return retention

    def forget(self) -> None:
        """The log may have lost what it was told."""
        self._told.clear()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 15


def _parameter(interface: ModelInterface, name: str, least: int, otherwise: int) -> int:
    text = interface.parameters.get(name)
    if text is None or not _is_number(text):
        return otherwise
    return max(least, int(text))
