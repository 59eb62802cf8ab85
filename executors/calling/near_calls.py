"""The calls of a model with a namespace: models of its own repository take precedence over others with that name (R2).

Triton rejects a call of an ambiguous name; here a pipeline written in Python finds its own models, as an ensemble does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from charonia.backend import ModelCalls, OpenCall
from charonia.inference import InferenceRequest
from charonia.models.interface import ModelInterface


class ResolvingCalls(ModelCalls, Protocol):
    """`ModelCalls` that can resolve names. Implemented by `executor_calls.ExecutorCalls`."""

    async def resolve(self, model: str, near: str) -> str:
        """`charonia.catalog.catalog.Catalog.resolve`."""


class NearCalls:
    """A `ModelCalls` for the model `key` in `namespace`. All calls go through `calls`."""

    def __init__(self, calls: ResolvingCalls, namespace: str, key: str) -> None:
        self._calls = calls
        self._namespace = namespace
        self._key = key

    async def find(self, model: str, version: int) -> ModelInterface:
        return await self._calls.find(await self._calls.resolve(model, self._namespace), version)

    async def open(
        self, request: InferenceRequest, model: str, origins: Sequence[object], *, blocks: bool = False
    ) -> OpenCall:
        """Open a call. `model` is a name; the log uses its key."""
        called = await self._calls.resolve(request.model, self._namespace)
        return await self._calls.open(replace(request, model=called), self._key, origins, blocks=blocks)

    async def load(self, model: str, config_json: str, files: dict[str, bytes]) -> None:
        await self._calls.load(model, config_json, files)

    async def unload(self, model: str, *, unload_dependents: bool) -> None:
        await self._calls.unload(model, unload_dependents=unload_dependents)

    async def is_ready(self, model: str, version: str) -> bool:
        return await self._calls.is_ready(await self._calls.resolve(model, self._namespace), version)
