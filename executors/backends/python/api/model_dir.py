"""`pb_utils.get_model_dir`: the directory of the model file, which the model process sets once (P8)."""

from __future__ import annotations

_directory = ""


def set_model_dir(directory: str) -> None:
    global _directory
    _directory = directory


def get_model_dir() -> str:
    """The version's directory, which contains `model.py`."""
    return _directory
