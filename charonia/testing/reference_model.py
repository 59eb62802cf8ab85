"""A model whose answers are known, and what every check of `backend_contract` does with it: load, run, compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format

from charonia.backend import Array, Backend, InstanceSpec, Model, ModelSource
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor, shape_text
from protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

from .driven_instance import Answer, DrivenInstance, Inputs, require


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A model, what to ask of it, and what it is to answer.

    `expected` gives all outputs for the inputs of one request; the model's may differ by `atol` and `rtol` as in
    NumPy's `allclose`; with neither they are equal to the bit. `requests` are two or more with different answers,
    arrays by input name: of [rows, ...] for a batching model (together at most `max_batch_size` rows, equal shapes but
    for the rows), of the exact shape otherwise. `failing` is one more request, one the model cannot run: of a wrong
    shape, or with a value the model refuses. BYTES are object arrays of bytes. `copies`: a decoupled model answers each
    request so often, each time the same. `strict`: the backend itself refuses inputs of another rank, width or
    datatype, though the server checks every request before. `loads`: so often the model is loaded and unloaded to see
    whether anything of it stays; memory is looked at from 40 on. Fewer for models that take long to load.
    """

    source: ModelSource
    interface: ModelInterface
    expected: Callable[[Inputs], Mapping[str, Array]]
    requests: Sequence[Inputs]
    failing: Inputs
    kind: str = "CPU"
    device_id: int = -1
    copies: int = 1
    strict: bool = False
    loads: int = 200
    atol: float = 0.0
    rtol: float = 0.0

    @staticmethod
    def of(directory: Path, config: str, **fields: Any) -> ReferenceModel:
        """The model in a directory, in its version 1; `config` is a complete `config.pbtxt`, tensors included.

        `fields` are the others of this class.
        """
        written = ModelConfig(name=directory.name)
        text_format.Parse(config, written)
        if not written.instance_group:
            written.instance_group.add()
        for group in written.instance_group:
            group.name, group.count = group.name or written.name, max(1, group.count)
            group.kind = group.kind or ModelInstanceGroup.KIND_CPU
        return ReferenceModel(ModelSource(written.name, 1, directory, written), ModelInterface.of(written), **fields)

    def spec(self, index: int = 0) -> InstanceSpec:
        """The instance to create as number `index` of the model."""
        return InstanceSpec(f"{self.source.name}_0_{index}", self.kind, self.device_id, self.source, self.interface)


def same_as(pairs: Mapping[str, str]) -> Callable[[Inputs], Mapping[str, Array]]:
    """What is expected of a model that hands inputs back: `pairs` maps every output to the input it equals."""
    return lambda inputs: {output: inputs[given] for output, given in pairs.items()}


async def load_model(stack: AsyncExitStack, backend: Backend, model: ReferenceModel) -> Model:
    """The model, which is closed twice in the end."""
    loaded = await backend.load(model.source)

    async def close() -> None:
        for which in ("first", "second"):
            try:
                await loaded.close()
            except Exception as error:
                text = f"the {which} close of a model raised {type(error).__name__}: {error}"
                raise AssertionError(text) from error

    stack.push_async_callback(close)
    return loaded


async def instance_of(stack: AsyncExitStack, backend: Backend, model: ReferenceModel) -> DrivenInstance:
    instance = await DrivenInstance.create(await load_model(stack, backend, model), model.spec(), model.copies)
    stack.push_async_callback(instance.release)
    return instance


async def round_trip(
    instance: DrivenInstance,
    model: ReferenceModel,
    requests: Sequence[Inputs],
    what: str,
    outputs: tuple[str, ...] = (),
) -> None:
    """Run copies of `requests`, see that they stay as they are and come back. No `outputs` asks for all."""
    given = [{name: _copy(array) for name, array in inputs.items()} for inputs in requests]
    answers = await instance.run(given, outputs)
    for sent, original in zip(given, requests, strict=True):
        for name, array in sent.items():
            require(_equal(array, original[name]), f"{what}: the instance changed its input '{name}'")
    for number, (original, answer) in enumerate(zip(requests, answers, strict=True), start=1):
        check_answer(model, original, answer, outputs or tuple(model.interface.outputs), f"{what}: request {number}")


def check_answer(model: ReferenceModel, request: Inputs, answer: Answer, outputs: Sequence[str], what: str) -> None:
    if isinstance(answer, Exception):
        raise AssertionError(f"{what} failed with {type(answer).__name__}: {answer}") from answer
    reference = model.expected(request)
    for name in outputs:
        require(name in answer, f"{what} has no output '{name}', though it was asked for")
        got, expected = answer[name], reference[name]
        wanted = DataType.of_numpy(expected.dtype)
        try:
            datatype = DataType.of_numpy(got.dtype)
        except InvalidArgument as error:
            raise AssertionError(f"{what}, output '{name}': {error}") from None
        require(datatype is wanted, f"{what}: output '{name}' is {datatype.value}, {wanted.value} was expected")
        require(
            got.shape == expected.shape,
            f"{what}: output '{name}' has shape {shape_text(got.shape)}, {shape_text(expected.shape)} was expected",
        )
        require(
            _is_near(got, expected, model),
            f"{what}: output '{name}' holds other values than expected; is the order of requests kept?",
        )


async def fail(instance: DrivenInstance, model: ReferenceModel) -> None:
    (answer,) = await instance.run([model.failing], ())
    require(
        isinstance(answer, Exception),
        "a request the model cannot run was answered as if it had succeeded; it must be a CharoniaError",
    )


def check_material(model: ReferenceModel) -> None:
    """What the author gave must be able to show a fault. Raises `ValueError` when it cannot."""
    interface = model.interface
    answers = [model.expected(inputs) for inputs in model.requests]
    if any(set(answer) != set(interface.outputs) for answer in answers):
        raise ValueError("`expected` must give every output of the model, and no other")
    if len(answers) < 2 or all(_is_near(answers[0][name], one[name], model) for one in answers[1:] for name in one):
        raise ValueError("give two or more requests with different answers, or a wrong order could not be seen")
    if interface.batching:
        rows = sum(next(iter(inputs.values())).shape[0] for inputs in model.requests)
        if rows > interface.max_batch_size:
            raise ValueError(f"the requests have {rows} rows together, the model takes {interface.max_batch_size}")


def _is_near(got: Array, expected: Array, model: ReferenceModel) -> bool:
    """Whether an output is what was expected of it."""
    if not (model.atol or model.rtol) or expected.dtype.kind not in "fc":
        return _equal(got, expected)
    near = np.allclose(got, expected, atol=model.atol, rtol=model.rtol, equal_nan=True)
    return got.shape == expected.shape and bool(near)


def _equal(one: Array, other: Array) -> bool:
    """Whether two arrays are one tensor: NaN equals itself, text its UTF-8."""
    return one.shape == other.shape and bytes(Tensor.of("", one).data) == bytes(Tensor.of("", other).data)


def _copy(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = array.flags.writeable
    return copy
