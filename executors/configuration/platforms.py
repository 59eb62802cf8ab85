"""Detects a model's backend, platform and default file name (R5, C2, C73). Does not check what is installed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from charonia.models.config_errors import StructureError
from protos.model_config_pb2 import ModelConfig

ENSEMBLE = "ensemble"


@dataclass(frozen=True, slots=True)
class Platform:
    """A row of R5. `files` are the file names in a version directory that identify the backend, the usual one first."""

    backend: str
    platform: str
    files: tuple[str, ...]


# The first row of a backend gives its usual platform and file name.
PLATFORMS = (
    Platform("onnxruntime", "onnxruntime_onnx", ("model.onnx",)),
    Platform("python", "", ("model.py",)),
    Platform("tensorrt", "tensorrt_plan", ("model.plan",)),
    Platform("pytorch", "pytorch_libtorch", ("model.pt", "model.pt2")),
    Platform("tensorflow", "tensorflow_savedmodel", ("model.savedmodel",)),
    Platform("tensorflow", "tensorflow_graphdef", ("model.graphdef",)),
    Platform("openvino", "", ("model.xml",)),
    Platform("vllm", "", ("model.json",)),
    Platform("fil", "", ("xgboost.json", "xgboost.model", "model.txt", "checkpoint.tl")),
    Platform("dali", "", ("model.dali",)),
)
_OF_PLATFORM = {row.platform: row for row in PLATFORMS if row.platform}
_OF_BACKEND = {row.backend: row for row in reversed(PLATFORMS)}
_OF_FILE = {file: row for row in PLATFORMS for file in row.files}


def default_filename(backend: str, platform: str) -> str:
    """The file that a backend opens when the configuration names none; "" when it has no default."""
    row = _OF_PLATFORM.get(platform) or _OF_BACKEND.get(backend)
    return row.files[0] if row else ""


def detect_backend(config: ModelConfig, model_name: str, files: Iterable[str]) -> tuple[str, str]:
    """Return (backend, platform) from the platform, else the backend, else file names, else a ".<backend>" model name.

    `files` are the entries of one version directory. An ensemble is ("", "ensemble"). Raises `StructureError` (C2).
    """
    platform, backend = config.platform, config.backend
    if platform == ENSEMBLE or (not platform and not backend and config.HasField("ensemble_scheduling")):
        if backend:
            raise _pair(platform, backend)
        return "", ENSEMBLE
    if platform:
        row = _OF_PLATFORM.get(platform)
        if row is None:
            raise (
                _pair(platform, backend)
                if backend
                else StructureError(f"unexpected platform type '{platform}' for {model_name}")
            )
        if backend and backend != row.backend:
            raise _pair(platform, backend)
        return row.backend, platform
    if backend:
        return backend, _platform_among(backend, config.default_model_filename, files)
    for file in sorted(files, key=_precedence):
        if file in _OF_FILE:
            return _OF_FILE[file].backend, _OF_FILE[file].platform
    stem, dot, suffix = model_name.rpartition(".")
    if dot and stem and suffix:
        return suffix, _platform_among(suffix, config.default_model_filename, ())
    raise StructureError(f"must specify 'platform' or 'backend' for '{model_name}'")


def _platform_among(backend: str, default_filename: str, files: Iterable[str]) -> str:
    """The platform of a backend: of several, the one whose usual file is present, else the first."""
    rows = [row for row in PLATFORMS if row.backend == backend]
    present = {default_filename, *files}
    for row in rows:
        if present.intersection(row.files):
            return row.platform
    return rows[0].platform if rows else ""


def _precedence(file: str) -> int:
    names = list(_OF_FILE)
    return names.index(file) if file in _OF_FILE else len(names)


def _pair(platform: str, backend: str) -> StructureError:
    return StructureError(f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}")
