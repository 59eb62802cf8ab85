"""The contract suite of `charonia.backend`: what the executor relies on, checked on a backend with one of its models.

For authors of backends; needs no test framework. Take any model in the backend's own format whose answers you can
compute in another way, describe it with a `ReferenceModel`, and await `check_backend`, or each of `CHECKS` as a test
of its own:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_my_backend(check: Check, tmp_path: Path) -> None:
        await check(MyBackend(), my_model(tmp_path))

A broken promise is an `AssertionError` whose text says which. Every check creates and closes instances of its own. How
instances are driven is in `driven_instance`; `lasting_checks` has the checks of what shows in use only, `flow_checks`
those of what is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import numpy as np

from charonia.backend import Array, Backend, GraphSignature
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.models.interface import ModelInterface
from protos.model_config_pb2 import ModelConfig

from .driven_instance import DrivenInstance, Inputs, require
from .flow_checks import check_cancellations, check_submissions, check_window
from .lasting_checks import (
    check_close_in_a_call,
    check_late_calls,
    check_lock,
    check_refusals,
    check_repeated_loads,
    check_reused_inputs,
    check_sizes,
)
from .reference_model import (
    ReferenceModel,
    check_material,
    fail,
    instance_of,
    load_model,
    round_trip,
    same_as,
)

UNKNOWN_OUTPUT = "charonia_contract_no_such_output"


Check = Callable[[Backend, ReferenceModel], Awaitable[None]]


async def check_backend(backend: Backend, model: ReferenceModel) -> None:
    """Run all of `CHECKS`. Raises `AssertionError` at the first promise the backend breaks."""
    for check in CHECKS:
        await check(backend, model)


async def check_signature(backend: Backend, model: ReferenceModel) -> None:
    """`signature` gives a signature, a configuration or None, with the model's tensors, and leaves its source alone."""
    require(isinstance(backend.name, str) and backend.name != "", "a backend has a name: the word of `backend:`")
    before = ModelConfig()
    before.CopyFrom(model.source.config)
    async with AsyncExitStack() as stack:
        found = await (await load_model(stack, backend, model)).signature()
    require(model.source.config == before, "signature changed the configuration it was given; it must return a new one")
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
                    f"signature gave {side} '{tensor.name}' the datatype '{tensor.datatype}', which is none of the "
                    f"interface's: {', '.join(DataType.__members__)}",
                )
                require(
                    isinstance(tensor.dims, tuple) and all(isinstance(d, int) and d >= -1 for d in tensor.dims),
                    f"signature gave {side} '{tensor.name}' the dims {tensor.dims!r}; a dynamic dimension is -1",
                )
            _check_names(side, [tensor.name for tensor in tensors], list(wanted))
        return
    require(
        isinstance(found, ModelConfig),
        f"signature returned a {type(found).__name__}; it must return a GraphSignature, a ModelConfig or None",
    )
    try:
        completed = ModelInterface.of(found)
    except InvalidArgument as error:
        raise AssertionError(
            f"the configuration that signature returned has a tensor of no datatype: {error}"
        ) from None
    _check_names("input", [item.name for item in found.input], list(model.interface.inputs))
    _check_names("output", [item.name for item in found.output], list(model.interface.outputs))
    require(completed.name == model.source.name, f"signature renamed the model to '{completed.name}'")


async def check_round_trip(backend: Backend, model: ReferenceModel) -> None:
    """Requests come back equal, alone and together, in their order; inputs may be read-only and stay as they are."""
    check_material(model)
    async with AsyncExitStack() as stack:
        instance = await instance_of(stack, backend, model)
        first = model.requests[:1]
        await round_trip(instance, model, first, "one request")
        await round_trip(instance, model, model.requests, "several requests together")
        await round_trip(instance, model, list(reversed(model.requests)), "the requests in the opposite order")
        # a single request's arrays are views of the bytes it came in
        await round_trip(instance, model, [_read_only(first[0])], "a request with read-only arrays")


async def check_requested_outputs(backend: Backend, model: ReferenceModel) -> None:
    """Each output can be asked for alone; an output the model does not have is never answered, and breaks nothing."""
    check_material(model)
    async with AsyncExitStack() as stack:
        instance = await instance_of(stack, backend, model)
        for name in model.interface.outputs:
            await round_trip(instance, model, model.requests, f"requests for output '{name}' alone", (name,))
        for answer in await instance.run(model.requests[:1], (UNKNOWN_OUTPUT,)):
            require(
                isinstance(answer, Exception) or UNKNOWN_OUTPUT not in answer,
                f"the instance answered the output '{UNKNOWN_OUTPUT}', which its model does not have",
            )
            require(
                not instance.is_batch or isinstance(answer, Exception),
                "a BatchInstance asked for an output its model does not have must raise a CharoniaError",
            )
        await round_trip(instance, model, model.requests, "requests after one for an unknown output")


async def check_failure(backend: Backend, model: ReferenceModel) -> None:
    """A request the model cannot run is an error, every time, and the instance goes on working."""
    check_material(model)
    async with AsyncExitStack() as stack:
        instance = await instance_of(stack, backend, model)
        for _ in range(2):
            await fail(instance, model)
            await round_trip(instance, model, model.requests, "requests after one that failed")


async def check_independence(backend: Backend, model: ReferenceModel) -> None:
    """Two instances run at the same time without mixing; neither's failure nor its close reaches the other."""
    check_material(model)
    async with AsyncExitStack() as stack:
        specs, loaded = (model.spec(0), model.spec(1)), await load_model(stack, backend, model)
        # the executor creates the instances of a version at the same time
        one, other = await asyncio.gather(*(DrivenInstance.create(loaded, spec, model.copies) for spec in specs))
        stack.push_async_callback(one.release)
        stack.push_async_callback(other.release)
        require(one.instance is not other.instance, "create_instance returned the same instance twice")
        backwards = list(reversed(model.requests))
        await asyncio.gather(
            *(round_trip(one, model, model.requests, "requests of two instances at once") for _ in range(3)),
            *(round_trip(other, model, backwards, "requests of two instances at once") for _ in range(3)),
        )
        await fail(one, model)
        await round_trip(other, model, model.requests, "requests after another instance failed")
        await one.close()
        await round_trip(other, model, model.requests, "requests after another instance was closed")


async def check_close(backend: Backend, model: ReferenceModel) -> None:
    """Instances and models may be closed twice, used or not; the model makes others, and can be loaded again."""
    check_material(model)
    for what in ("a model", "a model that was loaded before"):
        async with AsyncExitStack() as stack:
            loaded = await load_model(stack, backend, model)
            for used in (False, True):
                instance = await DrivenInstance.create(loaded, model.spec(), model.copies)
                stack.push_async_callback(instance.release)
                if used:
                    said = f"requests of an instance of {what}, created after another was closed"
                    await round_trip(instance, model, model.requests, said)
                await instance.close()
                await instance.close()


CHECKS: tuple[Check, ...] = (
    check_signature,
    check_round_trip,
    check_requested_outputs,
    check_failure,
    check_independence,
    check_close,
    check_sizes,
    check_reused_inputs,
    check_lock,
    check_repeated_loads,
    check_late_calls,
    check_close_in_a_call,
    check_refusals,
    check_window,
    check_submissions,
    check_cancellations,
)


def _check_names(side: str, names: list[str], wanted: list[str]) -> None:
    require(len(set(names)) == len(names), f"signature gave two {side}s one name: {', '.join(names)}")
    missing = [name for name in wanted if name not in names]
    require(
        not missing, f"signature did not find the model's {side}s {', '.join(missing)}; it found {', '.join(names)}"
    )


def _read_only(inputs: Inputs) -> dict[str, Array]:
    arrays = {name: np.array(array) for name, array in inputs.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


__all__ = [
    "CHECKS",
    "Check",
    "ReferenceModel",
    "check_backend",
    "check_cancellations",
    "check_close",
    "check_close_in_a_call",
    "check_failure",
    "check_independence",
    "check_late_calls",
    "check_lock",
    "check_refusals",
    "check_repeated_loads",
    "check_requested_outputs",
    "check_reused_inputs",
    "check_round_trip",
    "check_signature",
    "check_sizes",
    "check_submissions",
    "check_window",
    "same_as",
]
