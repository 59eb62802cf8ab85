"""Detects a model's backend, platform and default file name (R5, C2, C73) from what backends declare."""

from __future__ import annotations

from collections.abc import Iterable

from charonia.backend import Format
from charonia.models.config_errors import StructureError
from protos.model_config_pb2 import ModelConfig

from .declarations import every_format, formats_of

ENSEMBLE = "ensemble"


def format_of(backend: str, platform: str) -> Format:
    """The format of a backend's platform, else its usual one; an empty one for a backend that declares none."""
    formats = formats_of(backend)
    return next((found for found in formats if found.platform == platform), formats[0] if formats else Format())


def detect_backend(config: ModelConfig, model_name: str, files: Iterable[str]) -> tuple[str, str]:
    """Return (backend, platform) from the platform, else the backend, else file names, else a ".<backend>" model name.

    `files` are the entries of one version directory. An ensemble is ("", "ensemble"). Raises `StructureError` (C2).
    """
    platform, backend = config.platform, config.backend
    if platform == ENSEMBLE or (not platform and not backend and config.HasField("ensemble_scheduling")):
        if backend:
            raise _pair(platform, backend)
        return "", ENSEMBLE
    if backend and platform:
        platforms = {found.platform for found in formats_of(backend)} - {""}
        if platforms and platform not in platforms:  # a backend without platforms takes any word, as in Triton
            raise _pair(platform, backend)
        return backend, platform
    if platform:
        for name, found in every_format():
            if found.platform == platform:
                return name, platform
        raise StructureError(f"unexpected platform type '{platform}' for {model_name}")
    if backend:
        return backend, _platform_among(backend, config.default_model_filename, files)
    present = set(files)
    for name, found in every_format():
        if present.intersection(found.files):
            return name, found.platform
    stem, dot, suffix = model_name.rpartition(".")
    if dot and stem and suffix:
        return suffix, _platform_among(suffix, config.default_model_filename, ())
    raise StructureError(f"must specify 'platform' or 'backend' for '{model_name}'")


def _platform_among(backend: str, default_filename: str, files: Iterable[str]) -> str:
    """The platform of a backend: of several, the one with a file that is present, else the first."""
    formats = formats_of(backend)
    present = {default_filename, *files}
    usual = formats[0].platform if formats else ""
    return next((found.platform for found in formats if present.intersection(found.files)), usual)


def _pair(platform: str, backend: str) -> StructureError:
    return StructureError(f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}")
