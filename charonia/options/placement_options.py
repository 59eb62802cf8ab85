"""Pool, labels and the room for models of an executor, from option values."""

from __future__ import annotations

import re
from dataclasses import dataclass

from charonia.errors import InvalidArgument, StartupError
from charonia.models.placement import check_pool, label_of

from .values import Values

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?")
_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """`budget_bytes` is 0 for no bound."""

    labels: dict[str, str]
    budget_bytes: int


def placement_options(values: Values) -> PlacementOptions:
    """Raises `StartupError` for what cannot be meant."""
    try:
        check_pool(values["pool"])
        labels = dict(label_of(text) for text in values["label"])
    except InvalidArgument as error:
        raise StartupError(error.message) from None
    if len(labels) != len(values["label"]):
        raise StartupError("--label has the same key twice")
    budget_bytes = size_bytes("--model-memory-budget", values["model_memory_budget"])
    if (budget_bytes or values["max_loaded_models"]) and values["model_control_mode"] != "none":
        raise StartupError(
            "--model-memory-budget and --max-loaded-models need --model-control-mode none: in the mode "
            f"'{values['model_control_mode']}' others say what is loaded"
        )
    return PlacementOptions(labels, budget_bytes)


def size_bytes(option: str, text: str) -> int:
    """`1073741824`, `512MiB`, `1.5 GiB` in bytes, 0 for "". Raises `StartupError`."""
    if not text:
        return 0
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[found[2] or "B"]) if found else 0
    if size < 1:
        raise StartupError(f"{option} must be a size like 4GiB or 536870912, got '{text}'")
    return size
