"""Binds a Python callable as a model, for users who have no repository (P21): `charonia.bind`.

A binding is the callable with everything a model configuration must say. It can still be called as before. Serving it
is `charonia.composition.bound_server`'s.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.models.names import check_model_name

if TYPE_CHECKING:
    from protos.model_config_pb2 import ModelConfig

Style = Literal["keywords", "dict", "requests"]

BACKEND = "bound"

_NEVER = "0"
_CEILING = "charonia.max_execution_s"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output. `dtype` is a NumPy type, `str` or `bytes`, or a wire name such as "FP32".

    `shape` is without the batch dimension; -1 stands for any size.
    """

    name: str
    dtype: Any
    shape: Sequence[int] = (-1,)
    optional: bool = False

    @property
    def datatype(self) -> DataType:
        """Raises `InvalidArgument` for a type that tensors do not have."""
        if isinstance(self.dtype, DataType):
            return self.dtype
        if isinstance(self.dtype, str) and self.dtype.isupper():
            return DataType.of(self.dtype)
        import numpy as np

        try:
            return DataType.of_numpy(np.dtype(self.dtype).newbyteorder("<"))
        except TypeError:
            raise InvalidArgument(f"tensor '{self.name}': {self.dtype!r} is no data type") from None


@dataclass(frozen=True, slots=True)
class Binding:
    """A callable as a model. Made by `bind`; calling it calls the function."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    config: ModelConfig
    style: Style
    version: int = 1

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)


def bind(
    function: Callable[..., Any] | None = None,
    *,
    name: str = "",
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    max_batch_size: int = 0,
    dynamic_batching: bool | Mapping[str, Any] | None = None,
    instances: int = 1,
    version: int = 1,
    style: Style | Literal[""] = "",
    config: Mapping[str, Any] | None = None,
) -> Any:
    """A `Binding` of `function`, or a decorator that makes one.

    `name` is the model's, by default the function's. With `max_batch_size` above 0 every array has a leading batch
    dimension and requests are joined; `dynamic_batching` says how (a mapping of the block of that name) or that they
    are not (False). `instances` is how many calls run at once, each in a thread of its own. `config` adds to the model
    configuration, or overrides it, in its JSON form.

    `style` is how the function is called: `keywords`, with one array for each input by its name; `dict`, with one
    mapping of them; `requests`, with the list of `Request`s, to answer with a list. By default `keywords` if the
    function can be called so, else `dict`. It returns a dict of arrays by output name, a list of them in the outputs'
    order, or the array of the only output. It may be a coroutine function. A generator function, asynchronous or not,
    is called for each request by itself and answers with a response for each thing it yields: a decoupled model.

    Raises `InvalidArgument` for a binding that cannot be.
    """
    from charonia.models.config_forms import from_json
    from executors.configuration.config import normalise, validate

    given = (tuple(inputs), tuple(outputs))

    def made(function: Callable[..., Any]) -> Binding:
        model = name or getattr(function, "__name__", "")
        check_model_name(model)
        _check(model, function, *given, max_batch_size, instances, version)
        chosen = style or _style_of(function, given[0])
        decoupled = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        if decoupled and chosen == "requests":
            raise InvalidArgument(f"'{model}': a generator is called for one request, its style is keywords or dict")
        if chosen not in ("keywords", "dict", "requests"):
            raise InvalidArgument(
                f"'{model}': the style of a bound function is keywords, dict or requests, got '{style}'"
            )
        joined = max_batch_size > 0 and not decoupled
        batching = joined if dynamic_batching is None else dynamic_batching
        written = _config(model, *given, max_batch_size, batching, instances)
        if decoupled:
            written["model_transaction_policy"] = {"decoupled": True}
        complete = from_json({**written, **(config or {})})
        validate(normalise(complete), model)
        return Binding(model, function, *given, complete, chosen, version)

    return made if function is None else made(function)


def _check(
    model: str,
    function: Callable[..., Any],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch_size: int,
    instances: int,
    version: int,
) -> None:
    if not callable(function):
        raise InvalidArgument(f"'{model}': only a callable can be bound, found type '{type(function)}'")
    if not inputs or not outputs:
        raise InvalidArgument(f"'{model}' needs at least one input and one output")
    for tensors in (inputs, outputs):
        names = [tensor.name for tensor in tensors]
        if len(set(names)) < len(names):
            raise InvalidArgument(f"'{model}' has two tensors of one name among {', '.join(names)}")
    for what, number, least in (
        ("max_batch_size", max_batch_size, 0),
        ("instances", instances, 1),
        ("version", version, 1),
    ):
        if type(number) is not int or number < least:
            raise InvalidArgument(f"'{model}': {what} must be a whole number of at least {least}, got {number!r}")


def _style_of(function: Callable[..., Any], inputs: Sequence[TensorSpec]) -> Style:
    try:
        signature = inspect.signature(function)
        signature.bind(**{tensor.name: None for tensor in inputs if not tensor.optional})
        signature.bind(**{tensor.name: None for tensor in inputs})
    except (TypeError, ValueError):  # it wants something else, or is written in C and does not tell
        return "dict"
    return "keywords"


def _config(
    model: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch_size: int,
    dynamic_batching: bool | Mapping[str, Any],
    instances: int,
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": model,
        "backend": BACKEND,
        "max_batch_size": max_batch_size,
        "input": [{**_tensor(tensor), **({"optional": True} if tensor.optional else {})} for tensor in inputs],
        "output": [_tensor(tensor) for tensor in outputs],
        "instance_group": [{"count": instances, "kind": "KIND_CPU"}],
        # a thread of the user's process cannot be ended
        "parameters": {_CEILING: {"string_value": _NEVER}},
    }
    if dynamic_batching or isinstance(dynamic_batching, Mapping):
        document["dynamic_batching"] = dict(dynamic_batching) if isinstance(dynamic_batching, Mapping) else {}
    return document


def _tensor(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": tensor.datatype.config_name, "dims": [int(dim) for dim in tensor.shape]}
