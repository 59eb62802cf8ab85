"""What a gateway says of a served model (H5, G3), and how its versions are written (E6). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from charonia.catalog.catalog import ServedVersion
from charonia.errors import InvalidArgument
from charonia.inference import LATEST_VERSION
from gateway.handler import ModelMetadata, TensorMetadata

_DIGITS = re.compile(r"-?[0-9]{1,18}")


def parse_version(version: str) -> int:
    """The number of a version string, `LATEST_VERSION` for "". Raises E6's `InvalidArgument`."""
    if version in ("", "-1"):
        return LATEST_VERSION
    if not _DIGITS.fullmatch(version):
        raise InvalidArgument(
            f"failed to get model version from specified version string '{version}' (details: not a number), version "
            "should be an integral value > 0"
        )
    number = int(version)
    if number < 1:
        raise InvalidArgument(f"invalid model version specified '{version}' , version should be an integral value > 0")
    return number


def metadata_of(served: ServedVersion, versions: Iterable[int]) -> ModelMetadata:
    """The metadata of one version, with all that are READY."""
    interface = served.interface
    inputs, outputs = (
        tuple(TensorMetadata(s.name, s.datatype.value, interface.client_shape(s)) for s in specs.values())
        for specs in (interface.inputs, interface.outputs)
    )
    numbers = tuple(str(number) for number in versions)
    return ModelMetadata(interface.name, numbers, interface.platform or interface.backend, inputs, outputs)
