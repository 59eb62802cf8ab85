"""The calls of a model that has a namespace: the models of its own repository go before others of the same name (R2).

Triton refuses a call of an ambiguous name; here a pipeline written in Python finds its own parts as an ensemble does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from charonia.backend import ModelCalls, OpenCall
from charonia.inference import InferenceRequest
from charonia.models.interface import ModelInterface


class ResolvingCalls(ModelCalls, Protocol):
    """Calls of whoever knows all models."""

    async def resolve(self, model: str, near: str) -> str:
        """`charonia.catalog.catalog.Catalog.resolve`."""


class NearCalls:
    """A `ModelCalls` for the model `key` in `namespace`; whatever it calls goes through `calls`."""

    def __init__(self, calls: ResolvingCalls, namespace: str, key: str) -> None:
        self._calls = calls
        self._namespace = namespace
        self._key = key

    async def find(self, model: str, version: int) -> ModelInterface:
        return await self._calls.find(await self._calls.resolve(model, self._namespace), version)

    async def open(
        self, request: InferenceRequest, model: str, origins: Sequence[object], *, blocks: bool = False
    ) -> OpenCall:
        """`model` is the name its code knows; in the log it is known by its key."""
        called = await self._calls.resolve(request.model, self._namespace)
        return await self._calls.open(replace(request, model=called), self._key, origins, blocks=blocks)

    async def load(self, model: str, config_json: str, files: dict[str, bytes]) -> None:
        await self._calls.load(model, config_json, files)

    async def unload(self, model: str, *, unload_dependents: bool) -> None:
        await self._calls.unload(model, unload_dependents=unload_dependents)

    async def is_ready(self, model: str, version: str) -> bool:
        return await self._calls.is_ready(await self._calls.resolve(model, self._namespace), version)
