"""The time limits of a python model's processes, read from its configuration and the backend's settings (item P18)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument, Unsupported
from executors.ceilings import max_execution_s, number, parameter_seconds

_MIB = 1 << 20
FINALIZE_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds; 0 is no limit.

    `start_s` is from spawn to the first answer (`stub-timeout-seconds`), `load_s` for auto-complete and initialize
    (`charonia.max_load_s`), `max_execution_s` for one batch, `finalize_s` for an orderly end.
    """

    start_s: float = 30.0
    load_s: float = 600.0
    max_execution_s: float = 600.0
    finalize_s: float = 5.0

    @staticmethod
    def of(source: ModelSource) -> Limits:
        """Raises `InvalidArgument` for values that are no times, `Unsupported` for settings that come later."""
        settings = source.backend_config
        _refuse(source.name, {key: value.string_value for key, value in source.config.parameters.items()}, settings)
        return Limits(
            start_s=_seconds(settings, "stub-timeout-seconds", 30.0),
            load_s=parameter_seconds(source, "charonia.max_load_s", 600.0),
            max_execution_s=max_execution_s(source),
            finalize_s=FINALIZE_S,
        )


def _refuse(model: str, parameters: Mapping[str, str], settings: Mapping[str, str]) -> None:
    if parameters.get("EXECUTION_ENV_PATH"):
        raise Unsupported(
            f"model '{model}' sets EXECUTION_ENV_PATH, which is not supported yet: python models run in the server's "
            "own environment"
        )
    size = settings.get("shm-default-byte-size")
    if size is not None and number("shm-default-byte-size", size) < _MIB:
        raise InvalidArgument("shm-default-byte-size can't be smaller than 4 MiBs")


def _seconds(settings: Mapping[str, str], key: str, default: float) -> float:
    return number(key, settings[key]) if key in settings else default
