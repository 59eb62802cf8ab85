"""The contract suite of `charonia.backend`: what the executor relies on, checked on a backend with an identity model.

For authors of backends; needs no test framework. Write a model in the backend's own format that hands inputs back as
outputs, describe it with an `IdentityModel`, and await `check_backend`, or each of `CHECKS` as a test of its own:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_my_backend(check: Check, tmp_path: Path) -> None:
        await check(MyBackend(), identity(tmp_path))

A broken promise is an `AssertionError` whose text says which. Every check creates and closes instances of its own. How
instances are driven is `driven_instance`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np

from charonia.backend import Array, Backend, GraphSignature, InstanceSpec, ModelSource
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor, shape_text
from protos.model_config_pb2 import ModelConfig

from .driven_instance import Answer, DrivenInstance, Inputs, require

UNKNOWN_OUTPUT = "charonia_contract_no_such_output"


@dataclass(frozen=True, slots=True)
class IdentityModel:
    """A model that hands inputs back, and what to ask of it.

    `pairs` maps every output to the input it equals. `requests` are two or more different requests, arrays by input
    name: of [rows, ...] for a batching model (together at most `max_batch_size` rows, equal shapes but for the rows),
    of the exact shape otherwise. `failing` is one more request, one the model cannot run: of a wrong shape, or with a
    value the model refuses. BYTES are object arrays of bytes. `copies`: a decoupled model answers each request so
    often, each time the same.
    """

    source: ModelSource
    interface: ModelInterface
    pairs: Mapping[str, str]
    requests: Sequence[Inputs]
    failing: Inputs
    kind: str = "CPU"
    device_id: int = -1
    copies: int = 1

    def spec(self, index: int = 0) -> InstanceSpec:
        """The instance to create as number `index` of the model."""
        return InstanceSpec(f"{self.source.name}_0_{index}", self.kind, self.device_id, self.source, self.interface)


Check = Callable[[Backend, IdentityModel], Awaitable[None]]


async def check_backend(backend: Backend, model: IdentityModel) -> None:
    """Run all of `CHECKS`. Raises `AssertionError` at the first promise the backend breaks."""
    for check in CHECKS:
        await check(backend, model)


async def check_probe(backend: Backend, model: IdentityModel) -> None:
    """`probe` gives a signature, a configuration or None, with the model's tensors, and leaves its source alone."""
    require(isinstance(backend.name, str) and backend.name != "", "a backend has a name: the word of `backend:`")
    before = ModelConfig()
    before.CopyFrom(model.source.config)
    found = await backend.probe(model.source)
    require(model.source.config == before, "probe changed the configuration it was given; it must return a new one")
    if found is None:
        return
    if isinstance(found, GraphSignature):
        for side, tensors, wanted in (
            ("input", found.inputs, model.interface.inputs),
            ("output", found.outputs, model.interface.outputs),
        ):
            for tensor in tensors:
                require(
                    tensor.datatype in DataType.__members__,
                    f"probe gave {side} '{tensor.name}' the datatype '{tensor.datatype}', which is none of the "
                    f"interface's: {', '.join(DataType.__members__)}",
                )
                require(
                    isinstance(tensor.dims, tuple) and all(isinstance(d, int) and d >= -1 for d in tensor.dims),
                    f"probe gave {side} '{tensor.name}' the dims {tensor.dims!r}; a dynamic dimension is -1",
                )
            _check_names(side, [tensor.name for tensor in tensors], list(wanted))
        return
    require(
        isinstance(found, ModelConfig),
        f"probe returned a {type(found).__name__}; it must return a GraphSignature, a ModelConfig or None",
    )
    try:
        completed = ModelInterface.of(found)
    except InvalidArgument as error:
        raise AssertionError(f"the configuration probe returned has a tensor of no datatype: {error}") from None
    _check_names("input", [item.name for item in found.input], list(model.interface.inputs))
    _check_names("output", [item.name for item in found.output], list(model.interface.outputs))
    require(completed.name == model.source.name, f"probe renamed the model to '{completed.name}'")


async def check_round_trip(backend: Backend, model: IdentityModel) -> None:
    """Requests come back equal, alone and together, in their order; inputs may be read-only and stay as they are."""
    _check_material(model)
    async with AsyncExitStack() as stack:
        instance = await _instance(stack, backend, model)
        first = model.requests[:1]
        await _round_trip(instance, model, first, "one request")
        await _round_trip(instance, model, model.requests, "several requests together")
        await _round_trip(instance, model, list(reversed(model.requests)), "the requests in the opposite order")
        # a single request's arrays are views of the bytes it came in
        await _round_trip(instance, model, [_read_only(first[0])], "a request with read-only arrays")


async def check_requested_outputs(backend: Backend, model: IdentityModel) -> None:
    """Each output can be asked for alone; an output the model does not have is never answered, and breaks nothing."""
    _check_material(model)
    async with AsyncExitStack() as stack:
        instance = await _instance(stack, backend, model)
        for name in model.pairs:
            await _round_trip(instance, model, model.requests, f"requests for output '{name}' alone", (name,))
        for answer in await instance.run(model.requests[:1], (UNKNOWN_OUTPUT,)):
            require(
                isinstance(answer, Exception) or UNKNOWN_OUTPUT not in answer,
                f"the instance answered the output '{UNKNOWN_OUTPUT}', which its model does not have",
            )
            require(
                not instance.is_batch or isinstance(answer, Exception),
                "a BatchInstance asked for an output its model does not have must raise a CharoniaError",
            )
        await _round_trip(instance, model, model.requests, "requests after one for an unknown output")


async def check_failure(backend: Backend, model: IdentityModel) -> None:
    """A request the model cannot run is an error, every time, and the instance goes on working."""
    _check_material(model)
    async with AsyncExitStack() as stack:
        instance = await _instance(stack, backend, model)
        for _ in range(2):
            await _fail(instance, model)
            await _round_trip(instance, model, model.requests, "requests after one that failed")


async def check_independence(backend: Backend, model: IdentityModel) -> None:
    """Two instances run at the same time without mixing; neither's failure nor its close reaches the other."""
    _check_material(model)
    async with AsyncExitStack() as stack:
        specs = (model.spec(0), model.spec(1))
        # the executor creates the instances of a version at the same time
        one, other = await asyncio.gather(*(DrivenInstance.create(backend, spec, model.copies) for spec in specs))
        stack.push_async_callback(one.release)
        stack.push_async_callback(other.release)
        require(one.instance is not other.instance, "create_instance returned the same instance twice")
        backwards = list(reversed(model.requests))
        await asyncio.gather(
            *(_round_trip(one, model, model.requests, "requests of two instances at once") for _ in range(3)),
            *(_round_trip(other, model, backwards, "requests of two instances at once") for _ in range(3)),
        )
        await _fail(one, model)
        await _round_trip(other, model, model.requests, "requests after another instance failed")
        await one.close()
        await _round_trip(other, model, model.requests, "requests after another instance was closed")


async def check_close(backend: Backend, model: IdentityModel) -> None:
    """Close may be called twice, used or not; the model can be created again afterwards."""
    _check_material(model)
    for used in (False, True):
        async with AsyncExitStack() as stack:
            instance = await _instance(stack, backend, model)
            if used:
                await _round_trip(instance, model, model.requests, "requests of an instance created after a close")
            await instance.close()
            await instance.close()


CHECKS: tuple[Check, ...] = (
    check_probe,
    check_round_trip,
    check_requested_outputs,
    check_failure,
    check_independence,
    check_close,
)


async def _instance(stack: AsyncExitStack, backend: Backend, model: IdentityModel) -> DrivenInstance:
    instance = await DrivenInstance.create(backend, model.spec(), model.copies)
    stack.push_async_callback(instance.release)
    return instance


async def _round_trip(
    instance: DrivenInstance, model: IdentityModel, requests: Sequence[Inputs], what: str, outputs: tuple[str, ...] = ()
) -> None:
    """Run copies of `requests`, see that they stay as they are and come back. No `outputs` asks for all."""
    given = [{name: _copy(array) for name, array in inputs.items()} for inputs in requests]
    answers = await instance.run(given, outputs)
    for sent, original in zip(given, requests, strict=True):
        for name, array in sent.items():
            require(_equal(array, original[name]), f"{what}: the instance changed its input '{name}'")
    for number, (original, answer) in enumerate(zip(requests, answers, strict=True), start=1):
        _check_answer(model, original, answer, outputs or tuple(model.pairs), f"{what}: request {number}")


def _check_answer(model: IdentityModel, request: Inputs, answer: Answer, outputs: Sequence[str], what: str) -> None:
    if isinstance(answer, Exception):
        raise AssertionError(f"{what} failed with {type(answer).__name__}: {answer}") from answer
    for name in outputs:
        require(name in answer, f"{what} has no output '{name}', though it was asked for")
        got, expected = answer[name], request[model.pairs[name]]
        wanted = DataType.of_numpy(expected.dtype)
        try:
            datatype = DataType.of_numpy(got.dtype)
        except InvalidArgument as error:
            raise AssertionError(f"{what}, output '{name}': {error}") from None
        require(datatype is wanted, f"{what}: output '{name}' is {datatype.value}, its input was {wanted.value}")
        require(
            got.shape == expected.shape,
            f"{what}: output '{name}' has shape {shape_text(got.shape)}, its input had {shape_text(expected.shape)}",
        )
        require(
            _equal(got, expected),
            f"{what}: output '{name}' holds other values than its input; is the order of requests kept?",
        )


async def _fail(instance: DrivenInstance, model: IdentityModel) -> None:
    (answer,) = await instance.run([model.failing], ())
    require(
        isinstance(answer, Exception),
        "a request the model cannot run was answered as if it had succeeded; it must be a CharoniaError",
    )


def _check_names(side: str, names: list[str], wanted: list[str]) -> None:
    require(len(set(names)) == len(names), f"probe gave two {side}s one name: {', '.join(names)}")
    missing = [name for name in wanted if name not in names]
    require(not missing, f"probe did not find the model's {side}s {', '.join(missing)}; it found {', '.join(names)}")


def _check_material(model: IdentityModel) -> None:
    """What the author gave must be able to show a fault. Raises `ValueError` when it cannot."""
    interface = model.interface
    if set(model.pairs) != set(interface.outputs) or not set(model.pairs.values()) <= set(interface.inputs):
        raise ValueError("pairs must name an input for every output of the model")
    if len(model.requests) < 2 or all(
        _equal(model.requests[0][name], inputs[name]) for inputs in model.requests[1:] for name in model.pairs.values()
    ):
        raise ValueError("give two or more requests that differ, or a wrong order could not be seen")
    if interface.batching:
        rows = sum(next(iter(inputs.values())).shape[0] for inputs in model.requests)
        if rows > interface.max_batch_size:
            raise ValueError(f"the requests have {rows} rows together, the model takes {interface.max_batch_size}")


def _equal(one: Array, other: Array) -> bool:
    """Whether two arrays are one tensor: NaN equals itself, text its UTF-8."""
    return one.shape == other.shape and bytes(Tensor.of("", one).data) == bytes(Tensor.of("", other).data)


def _copy(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = array.flags.writeable
    return copy


def _read_only(inputs: Inputs) -> dict[str, Array]:
    arrays = {name: np.array(array) for name, array in inputs.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


__all__ = [
    "CHECKS",
    "Check",
    "IdentityModel",
    "check_backend",
    "check_close",
    "check_failure",
    "check_independence",
    "check_probe",
    "check_requested_outputs",
    "check_round_trip",
]
