"""What a callable and its tensors become: a model configuration and a way to call it (P21)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import charonia
from charonia import Binding, TensorSpec, bind
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.models.interface import ModelInterface
from executors.configuration.config import normalise, unsupported_features, validate

X = [TensorSpec("X", np.float32, (-1, 2))]
Y = [TensorSpec("Y", "FP16", (3,))]


def double(X: Any) -> Any:
    return X * 2


def test_a_binding_is_the_function_and_a_configuration() -> None:
    made = bind(double, inputs=X, outputs=Y, max_batch_size=4, instances=2)
    assert isinstance(made, Binding)
    assert made(3) == 6
    config = normalise(made.config)
    validate(config, "double")
    assert not unsupported_features(config)
    interface = ModelInterface.of(config)
    assert (interface.name, interface.backend, interface.max_batch_size) == ("double", "bound", 4)
    assert (interface.inputs["X"].datatype, interface.inputs["X"].dims) == (DataType.FP32, (-1, 2))
    assert (interface.outputs["Y"].datatype, interface.outputs["Y"].dims) == (DataType.FP16, (3,))
    assert [(group.kind, group.count) for group in interface.instance_groups] == [("KIND_CPU", 2)]
    assert interface.dynamic_batching is not None
    assert interface.parameters["charonia.max_execution_s"] == "0"


def test_it_is_a_decorator_as_well() -> None:
    @bind(name="other", inputs=X, outputs=Y)
    def function(X: Any) -> Any:
        return X

    assert isinstance(function, Binding)
    assert (function.name, function.config.max_batch_size) == ("other", 0)
    assert function(1) == 1


@pytest.mark.parametrize(
    ("given", "block"), [(None, True), (True, True), (False, False), ({"preferred_batch_size": [4]}, True), ({}, True)]
)
def test_dynamic_batching(given: Any, block: bool) -> None:
    config = bind(double, inputs=X, outputs=Y, max_batch_size=4, dynamic_batching=given).config
    assert config.HasField("dynamic_batching") is block
    if given:
        assert list(config.dynamic_batching.preferred_batch_size) == ([4] if given is not True else [])
    assert not bind(double, inputs=X, outputs=Y).config.HasField("dynamic_batching")


def test_config_adds_and_overrides() -> None:
    more = {"response_cache": {"enable": True}, "parameters": {"k": {"string_value": "v"}}}
    config = bind(double, inputs=X, outputs=Y, config=more).config
    assert config.response_cache.enable
    assert set(config.parameters) == {"k"}


@pytest.mark.parametrize(
    ("dtype", "datatype"),
    [
        (np.float32, "FP32"),
        ("float64", "FP64"),
        (np.dtype(">i4"), "INT32"),
        (bool, "BOOL"),
        (str, "BYTES"),
        (bytes, "BYTES"),
        (object, "BYTES"),
        ("BYTES", "BYTES"),
        ("BF16", "BF16"),
        (ml_dtypes.bfloat16, "BF16"),
        (DataType.UINT8, "UINT8"),
    ],
)
def test_types_of_tensors(dtype: Any, datatype: str) -> None:
    assert TensorSpec("X", dtype).datatype is DataType(datatype)


@pytest.mark.parametrize("dtype", ["FP31", np.complex64, "no type", object()])
def test_what_is_no_type(dtype: Any) -> None:
    with pytest.raises(InvalidArgument):
        bind(double, inputs=[TensorSpec("X", dtype)], outputs=Y)


def with_default(X: Any, MORE: Any = None) -> Any: ...
def by_position(inputs: Any, /) -> Any: ...
def anything(**inputs: Any) -> Any: ...
def keys(inputs: Any) -> Any: ...


@pytest.mark.parametrize(
    ("function", "inputs", "style"),
    [
        (double, X, "keywords"),
        (anything, X, "keywords"),
        (keys, X, "dict"),
        (by_position, X, "dict"),
        (keys, [TensorSpec("inputs", np.int8)], "keywords"),
        (with_default, X, "keywords"),
        (with_default, [*X, TensorSpec("MORE", np.int8, optional=True)], "keywords"),
        (double, [*X, TensorSpec("MORE", np.int8, optional=True)], "dict"),
        (dict.keys, X, "dict"),
    ],
)
def test_how_it_is_called(function: Any, inputs: list[TensorSpec], style: str) -> None:
    assert bind(function, name="m", inputs=inputs, outputs=Y).style == style
    assert bind(function, name="m", inputs=inputs, outputs=Y, style="requests").style == "requests"


def generator(X: Any) -> Iterator[Any]:
    yield X


async def asynchronous(X: Any) -> AsyncIterator[Any]:
    yield X


@pytest.mark.parametrize("function", [generator, asynchronous])
def test_a_generator_is_decoupled(function: Any) -> None:
    config = bind(function, inputs=X, outputs=Y, max_batch_size=2).config
    assert config.model_transaction_policy.decoupled
    assert not config.HasField("dynamic_batching")
    with pytest.raises(InvalidArgument, match="its style is keywords or dict"):
        bind(function, inputs=X, outputs=Y, style="requests")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"inputs": []}, "needs at least one input and one output"),
        ({"outputs": []}, "needs at least one input and one output"),
        ({"inputs": X * 2}, "two tensors of one name among X, X"),
        ({"max_batch_size": -1}, "max_batch_size must be a whole number of at least 0, got -1"),
        ({"instances": 0}, "instances must be a whole number of at least 1, got 0"),
        ({"version": True}, "version must be a whole number of at least 1, got True"),
        ({"name": "a/b"}, "must not contain path traversal characters"),
        ({"style": "positional"}, "is keywords, dict or requests, got 'positional'"),
        ({"function": 3}, "only a callable can be bound"),
        ({"config": {"max_batch": 3}}, "max_batch"),
        ({"inputs": [TensorSpec("X", np.int8, ())]}, "model input 'X' must specify 'dims' for "),
    ],
)
def test_what_cannot_be_bound(given: dict[str, Any], text: str) -> None:
    with pytest.raises(Exception, match=text) as caught:
        bind(**{"function": double, "name": "m", "inputs": X, "outputs": Y, **given})
    assert isinstance(caught.value, charonia.errors.CharoniaError)


def test_the_package_offers_what_its_docs_name() -> None:
    assert all(getattr(charonia, name) is not None for name in charonia.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = charonia.nothing
