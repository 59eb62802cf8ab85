"""Finds the file with a model's code: its own `model.py`, or that of its python-based backend (P1, P20)."""

from __future__ import annotations

from pathlib import Path

from charonia.backend import ModelSource

OWN_BACKEND = "python"
RUNTIME = "model.py"
BACKEND_DIRECTORY = "backend-directory"
"""The backend setting that holds `--backend-directory`."""


def python_based(source: ModelSource) -> Path | None:
    """The `model.py` of a python-based backend: the version's, the model's, or the backend's; None without any."""
    word = source.config.backend
    places = [source.version_directory, source.directory]
    directory = source.backend_config.get(BACKEND_DIRECTORY, "")
    if directory and word == Path(word).name and word not in (".", ".."):
        places.append(Path(directory) / word)
    for place in places:
        if (place / RUNTIME).is_file():
            return (place / RUNTIME).absolute()
    return None


def code_file(source: ModelSource) -> Path:
    """Return the file to run. The model process checks that it exists."""
    if source.config.backend not in ("", OWN_BACKEND):
        return python_based(source) or source.version_directory.absolute() / RUNTIME
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
