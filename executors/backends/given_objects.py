"""Checks what a backend's code returns, so that a mistake there fails its own model alone, with a clear error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from charonia.backend import (
    Backend,
    BatchInstance,
    GraphSignature,
    Model,
    ModelSource,
    RequestInstance,
    StreamingInstance,
)
from charonia.errors import InternalError, error_of_model
from charonia.tasks import ends_caller
from protos.model_config_pb2 import ModelConfig


@contextmanager
def code_of_models() -> Iterator[None]:
    """Turn an exit, and a `CancelledError` that does not cancel the current task, into an error of the model."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        if ends_caller(error):
            raise
        raise error_of_model(error) from error


async def loaded_model(backend: Backend, source: ModelSource) -> Model:
    """Have a backend load a model. Raises what it raises, `InternalError` when it gives something else."""
    found: Any = await backend.load(source)
    if not all(callable(getattr(found, method, None)) for method in ("signature", "create_instance", "close")):
        raise InternalError(
            f"backend '{source.config.backend}' loaded a {type(found).__name__}, which is no model: it needs "
            "signature, create_instance and close, as charonia.backend.Model has them"
        )
    return cast("Model", found)


def checked_signature(found: Any, backend: str) -> GraphSignature | ModelConfig | None:
    """What a model gave as its signature. Raises `InternalError` when it is something else."""
    if found is None or isinstance(found, GraphSignature | ModelConfig):
        return found
    raise InternalError(
        f"backend '{backend}' gave a {type(found).__name__} as signature: it must be a GraphSignature, a ModelConfig "
        "or None"
    )


def checked_instance(made: Any, backend: str) -> BatchInstance | RequestInstance | StreamingInstance:
    """What a model made as its instance. Raises `InternalError` when it is none of these."""
    if not isinstance(made, BatchInstance | RequestInstance | StreamingInstance):
        raise InternalError(
            f"backend '{backend}' made a {type(made).__name__}, which is no instance: it needs execute and close, or "
            "execute_requests or execute_stream and close_instance"
        )
    return made
