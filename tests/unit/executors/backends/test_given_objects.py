"""Mistakes in what a backend hands over are told in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from charonia.backend import Backend, GraphSignature, InstanceSpec, Model, ModelSource
from charonia.errors import InternalError
from charonia.models.config_forms import parse
from executors.backends.given_objects import checked_instance, checked_signature, loaded_model


class Whole(Model):
    async def create_instance(self, spec: InstanceSpec) -> Any: ...


class Gives(Backend):
    def __init__(self, model: Any) -> None:
        self.model = model

    async def load(self, source: ModelSource) -> Any:
        return self.model


class Batches:
    def execute(self, inputs: Any, outputs: Any) -> Any: ...

    def close(self) -> None: ...


class Streams:
    async def execute_stream(self, requests: Any, responses: Any) -> None: ...

    async def close_instance(self) -> None: ...


SOURCE = ModelSource("m", 1, Path("m"), parse('name: "m" backend: "foo"'))


async def test_a_whole_model_passes() -> None:
    model = Whole()
    assert await loaded_model(Gives(model), SOURCE) is model


@pytest.mark.parametrize("found", [None, 3, Batches()], ids=lambda found: type(found).__name__)
async def test_what_is_no_model_is_named(found: Any) -> None:
    with pytest.raises(InternalError, match=f"backend 'foo' loaded a {type(found).__name__}, which is no model"):
        await loaded_model(Gives(found), SOURCE)


def test_signatures() -> None:
    for found in (None, GraphSignature((), ()), SOURCE.config):
        assert checked_signature(found, "foo") is found
    with pytest.raises(InternalError, match="backend 'foo' gave a list as signature: it must be a GraphSignature"):
        checked_signature([], "foo")


def test_instances() -> None:
    for made in (Batches(), Streams()):
        assert checked_instance(made, "foo") is made
    for made in (None, Whole()):
        with pytest.raises(InternalError, match=f"backend 'foo' made a {type(made).__name__}, which is no instance"):
            checked_instance(made, "foo")
