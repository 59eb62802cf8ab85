"""Decides where a model runs: in the executor, in a process of its own, or in one that is sandboxed."""

from __future__ import annotations

import logging
from typing import Any

from charonia.backend import Backend, Isolation, ModelSource
from charonia.errors import InvalidArgument, Unsupported

from . import sandbox

_log = logging.getLogger(__name__)

ISOLATION = "charonia.isolation"
NONE, SANDBOX = "none", "sandbox"
_CHOICES: dict[str, Isolation] = {"none": "none", "process": "process", "sandbox": "sandbox"}


def isolation_of(source: ModelSource, backend: Backend, *, require_sandbox: bool, movable: bool = True) -> Isolation:
    """Where a model runs: as its parameter says, else as its backend does for its format.

    A backend that is not `movable` has processes of its own, or lives in this one. Without a sandbox on this machine
    a model that wants one gets a process and a warning. Raises `InvalidArgument` for an unknown word, `Unsupported` for
    what cannot be had; `require_sandbox` forbids to do without a sandbox that the parameter or the backend asks for.
    """
    default = _default(source, backend)
    chosen = ISOLATION in source.config.parameters
    written = source.config.parameters[ISOLATION].string_value if chosen else default
    if written not in _CHOICES:
        raise InvalidArgument(
            f"'{ISOLATION}' of model '{source.name}' must be \"none\", \"process\" or \"sandbox\", got '{written}'"
        )
    wanted = _CHOICES[written]
    if not movable:
        if wanted != NONE and chosen:
            raise Unsupported(
                f"'{ISOLATION}' of model '{source.name}' cannot be \"{wanted}\": backend '{backend.name}' runs its "
                "models in processes of their own already, or in the program that made it"
            )
        return "none"
    if require_sandbox and default == SANDBOX != wanted:
        raise Unsupported(
            f"'{ISOLATION}' of model '{source.name}' is \"{wanted}\", but its backend's models run in a sandbox and "
            "--require-sandbox forbids less"
        )
    if wanted != SANDBOX or sandbox.is_available():
        return wanted
    missing = f"model '{source.name}' wants a sandbox, which this kernel does not offer (Landlock version 4, Linux 6.7)"
    if require_sandbox:
        raise Unsupported(f"{missing}, and --require-sandbox forbids to load it without")
    _log.warning("%s: it runs in a process that is not restricted", missing)
    return "process"


def _default(source: ModelSource, backend: Backend) -> str:
    """What the backend says of a model's format, or of all its models."""
    asked: Any = getattr(backend, "isolation_of", None)
    return str(asked(source) if callable(asked) else getattr(backend, "isolation", NONE))
