"""The metadata of a served model (H5, G3). Pure."""

from __future__ import annotations

from collections.abc import Iterable

from charonia.catalog.catalog import ServedVersion
from gateway.handler import ModelMetadata, TensorMetadata


def metadata_of(served: ServedVersion, versions: Iterable[int]) -> ModelMetadata:
    """The metadata of one version. `versions` are the numbers of all that are READY, or of the one that was named."""
    interface = served.interface
    inputs, outputs = (
        tuple(TensorMetadata(s.name, s.datatype.value, interface.client_shape(s)) for s in specs.values())
        for specs in (interface.inputs, interface.outputs)
    )
    numbers = tuple(str(number) for number in versions)
    return ModelMetadata(interface.name, numbers, interface.platform or interface.backend, inputs, outputs)
