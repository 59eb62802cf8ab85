"""The parameters of a model of trees, and which file and format it has; names are those of Triton's backend."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from charonia.backend import ModelSource
from charonia.errors import InvalidArgument, NotFound, Unsupported
from executors.backends.model_files import model_path

_log = logging.getLogger(__name__)

FILES = {
    "xgboost_json": "xgboost.json",
    "xgboost_ubj": "xgboost.ubj",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
"""The usual file of each format."""
_LEGACY = "xgboost"
_LEGACY_FILE = "xgboost.model"
_REPLACED = {"algo": "layout", "threads_per_tree": "chunk_size", "output_class": "is_classifier"}
_REMOVED = ("storage_type", "blocks_per_sm")
_DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True)
class FilSettings:
    """What the parameters say. `is_classifier` is None where only the file can say."""

    path: Path
    format: str
    is_classifier: bool | None
    predict_proba: bool
    threshold: float
    threads: int
    """0 where nothing is said."""
    allow_unknown_field: bool


def settings_of(source: ModelSource) -> FilSettings:
    """Return the settings. Raises `InvalidArgument` for a parameter with a wrong value, `NotFound` without a file,
    `Unsupported` for XGBoost's binary format.
    """
    path, file_format = _file(source)
    output_class = source.flag("output_class")
    # what Triton takes and needs on GPUs alone is only checked
    for name in ("chunk_size", "transfer_threshold"):
        source.integer(name)
    return FilSettings(
        path,
        file_format,
        source.flag("is_classifier") if output_class is None else output_class,
        bool(source.flag("predict_proba")),
        _threshold(source),
        _threads(source),
        bool(source.flag("xgboost_allow_unknown_field")),
    )


def warn_of_retired(source: ModelSource) -> None:
    """Log a warning for each parameter that Triton's backend no longer has."""
    for name in (*_REPLACED, *_REMOVED):
        if source.parameter(name) is not None:
            instead = f"; use '{_REPLACED[name]}' instead" if name in _REPLACED else ""
            _log.warning("model '%s': the fil backend has no parameter '%s' any more%s", source.name, name, instead)


def _file(source: ModelSource) -> tuple[Path, str]:
    directory = source.version_directory
    named = source.config.default_model_filename
    # the name that defaults put into a configuration is that of the first format, whichever the model has
    is_usual = named in FILES.values()
    said = source.parameter("model_type")
    if said == _LEGACY:
        raise _legacy(source)
    if said is not None:
        if said not in FILES:
            raise InvalidArgument(
                f"parameter 'model_type' of '{source.name}' must be one of {', '.join(FILES)}, got '{said}'"
            )
        name = named if named and not (is_usual and (directory / FILES[said]).exists()) else FILES[said]
        return model_path(source, FILES[said], chosen=name), said
    if named and ((directory / named).exists() or not is_usual):
        file_format = _format_of(source, named)
        return model_path(source, FILES[file_format], chosen=named), file_format
    for file_format, name in FILES.items():
        if (directory / name).exists():
            return model_path(source, name, chosen=name), file_format
    if (directory / _LEGACY_FILE).exists():
        raise _legacy(source)
    raise NotFound(
        f"unable to find a file of trees for model '{source.name}' in '{directory}': one of "
        f"{', '.join(FILES.values())}, or another that 'default_model_filename' names"
    )


def _format_of(source: ModelSource, name: str) -> str:
    if name == _LEGACY_FILE:
        raise _legacy(source)
    for file_format, usual in FILES.items():
        if Path(name).suffix == Path(usual).suffix:
            return file_format
    raise InvalidArgument(
        f"model '{source.name}': the format of '{name}' is not known; set parameter 'model_type' to one of "
        f"{', '.join(FILES)}"
    )


def _legacy(source: ModelSource) -> Unsupported:
    return Unsupported(
        f"model '{source.name}' is in XGBoost's old binary format (model_type '{_LEGACY}', file '{_LEGACY_FILE}'), "
        "which is not read: load it with an XGBoost that reads it, save it with save_model('xgboost.ubj'), and set "
        "model_type to 'xgboost_ubj'"
    )


def _threshold(source: ModelSource) -> float:
    said = source.parameter("threshold")
    if said is None:
        return _DEFAULT_THRESHOLD
    try:
        threshold = float(said)
    except ValueError:
        threshold = math.nan
    if not math.isfinite(threshold):
        raise InvalidArgument(f"parameter 'threshold' of '{source.name}' must be a number, got '{said}'")
    return threshold


def _threads(source: ModelSource) -> int:
    return 0 if source.parameter("cpu_nthread") == "-1" else source.integer("cpu_nthread") or 0
