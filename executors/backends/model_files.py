"""Where the file of a model's version lies."""

from __future__ import annotations

from pathlib import Path

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument, NotFound


def model_path(source: ModelSource, default: str, *, may_be_directory: bool = False, chosen: str = "") -> Path:
    """Return the model file: `chosen`, else `default_model_filename`, else `default`.

    If that is a directory, it is the one such file in it.

    Raises `InvalidArgument` for a name that leads out of the version directory, `NotFound` when there is no file (R5).
    """
    filename = chosen or source.config.default_model_filename or default
    root = source.version_directory.resolve()
    path = (root / filename).resolve()
    if not path.is_relative_to(root) or path == root:
        raise InvalidArgument(
            f"default model filename '{filename}' of '{source.name}' is outside the version directory"
        )
    if path.is_dir() and not may_be_directory:
        named = path / default
        candidates = [named] if named.is_file() else sorted(path.glob(f"*{named.suffix}"))
        if len(candidates) != 1:
            raise NotFound(f"unable to find '{named}' for model '{source.name}'")
        path = candidates[0].resolve()
        if not path.is_relative_to(root):
            raise InvalidArgument(f"model file of '{source.name}' is outside the version directory")
    if not path.exists():
        raise NotFound(f"unable to find '{path}' for model '{source.name}'")
    return path
