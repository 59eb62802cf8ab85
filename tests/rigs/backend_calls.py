"""What a test asks of a backend in one step."""

from __future__ import annotations

from typing import Any

from charonia.backend import Backend, InstanceSpec, ModelSource
from charonia.exchange.exchanging_instance import with_wanted_memory


async def instance_of(backend: Backend, spec: InstanceSpec) -> Any:
    """An instance of a model that was just loaded, with NumPy arrays at both ends."""
    model = await backend.load(spec.source)
    return await with_wanted_memory(model, await model.create_instance(spec), spec)


async def signature_of(backend: Backend, source: ModelSource) -> Any:
    """What a model that was just loaded says of itself."""
    return await (await backend.load(source)).signature()
