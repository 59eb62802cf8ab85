"""What a python model's process runs and how long it may take: the file with its code (P1, P20), its limits (P18)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument
from executors.configuration.time_parameters import max_execution_s, number, parameter_seconds

from .model_environments import CACHE_DIRECTORY

_log = logging.getLogger(__name__)

_MIB = 1 << 20
_CPU_ONLY = "FORCE_CPU_ONLY_INPUT_TENSORS"
_KNOWN = {
    "stub-timeout-seconds",
    "shm-default-byte-size",
    "shm-growth-byte-size",
    "shm-region-prefix-name",
    "thread-pool-size",
    "default-max-batch-size",
    "backend-directory",
    CACHE_DIRECTORY,
}
FINALIZE_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds; 0: no limit.

    `start_s` is from spawn to the first answer (`stub-timeout-seconds`), `load_s` for auto-complete and initialize
    (`charonia.max_load_s`), `max_execution_s` for one batch, `finalize_s` for an orderly end.
    """

    start_s: float = 30.0
    load_s: float = 600.0
    max_execution_s: float = 600.0
    finalize_s: float = 5.0

    @staticmethod
    def of(source: ModelSource) -> Limits:
        """Read a model's limits. Raises `InvalidArgument` for malformed values."""
        settings = source.backend_config
        _check(source)
        return Limits(
            start_s=_seconds(settings, "stub-timeout-seconds", 30.0),
            load_s=parameter_seconds(source, "charonia.max_load_s", 600.0),
            max_execution_s=max_execution_s(source),
            finalize_s=FINALIZE_S,
        )


def _check(source: ModelSource) -> None:
    """Check settings of Triton's that have no effect: shared memory grows as needed, inputs are in host memory."""
    settings, parameters = source.backend_config, source.config.parameters
    size = settings.get("shm-default-byte-size")
    if size is not None and number("shm-default-byte-size", size) < _MIB:
        raise InvalidArgument("shm-default-byte-size can't be smaller than 4 MiBs")
    growth = settings.get("shm-growth-byte-size")
    if growth is not None and number("shm-growth-byte-size", growth) <= 0:
        raise InvalidArgument("shm-growth-byte-size can't be smaller than or equal to zero.")
    if _CPU_ONLY in parameters and parameters[_CPU_ONLY].string_value not in ("yes", "no"):
        raise InvalidArgument(f"Incorrect value for {_CPU_ONLY}: {parameters[_CPU_ONLY].string_value}'")
    for key in sorted(settings.keys() - _KNOWN):
        _log.warning("model %s: the python backend has no setting '%s'", source.name, key)


def _seconds(settings: Mapping[str, str], key: str, default: float) -> float:
    return number(key, settings[key]) if key in settings else default


OWN_BACKEND = "python"
RUNTIME = "model.py"
BACKEND_DIRECTORY = "backend-directory"
"""The backend setting that holds `--backend-directory`."""


def python_based(source: ModelSource) -> Path | None:
    """The `model.py` of a python-based backend, None without one. Model directories hold none, as in Triton."""
    word = source.config.backend
    directory = source.backend_config.get(BACKEND_DIRECTORY, "")
    if not directory or word != Path(word).name or word in (".", ".."):
        return None
    file = searched(source)
    return file.absolute() if file.is_file() else None


def searched(source: ModelSource) -> Path:
    """Where the `model.py` of a python-based backend has to be."""
    return Path(source.backend_config.get(BACKEND_DIRECTORY, ""), source.config.backend, RUNTIME)


def code_file(source: ModelSource) -> Path:
    """Return the file to run. The model process checks that it exists."""
    if source.config.backend not in ("", OWN_BACKEND):
        return python_based(source) or searched(source).absolute()
    return source.version_directory.absolute() / (source.config.default_model_filename or RUNTIME)


def mentions(source: ModelSource, word: str) -> bool:
    """Whether the model's code, or a file in the same directory, contains a word."""
    for path in code_file(source).parent.glob("*.py"):
        try:
            if word in path.read_text("utf-8", "replace"):
                return True
        except OSError:
            continue
    return False
