"""What a plan says of its tensors and optimization profiles, and the configuration that is made from it. Pure.

`trt` in this module is the module `tensorrt` or `tensorrt_rtx`, which have the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.backend import GraphSignature, TensorSignature
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument, Unsupported
from charonia.models.config_errors import InstanceError
from executors.configuration.autofill import check_against_graph, from_graph
from protos import model_config_pb2 as pb

Shape = tuple[int, ...]

_DATATYPES = {
    "FLOAT": DataType.FP32,
    "HALF": DataType.FP16,
    "BF16": DataType.BF16,
    "INT8": DataType.INT8,
    "UINT8": DataType.UINT8,
    "INT32": DataType.INT32,
    "INT64": DataType.INT64,
    "BOOL": DataType.BOOL,
}


@dataclass(frozen=True, slots=True)
class Range:
    """The least, the usual and the largest dims of an input in a profile; of a shape tensor, its values."""

    least: Shape
    usual: Shape
    largest: Shape

    def holds(self, found: Shape) -> bool:
        return len(found) == len(self.least) and all(
            low <= one <= high for low, one, high in zip(self.least, found, self.largest, strict=True)
        )

    def distance(self, found: Shape) -> int:
        """How far this is from the usual dims: the sum of the differences, as Triton counts it."""
        return sum(abs(one - usual) for one, usual in zip(found, self.usual, strict=True))


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """An input or output of a plan. The values of a `shape` tensor decide shapes of others; it lies on the host."""

    name: str
    datatype: DataType
    dims: Shape
    is_input: bool
    is_shape: bool
    is_on_host: bool
    is_linear: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """An optimization profile: what dims the inputs may have, and values the shape tensors."""

    index: int
    dims: Mapping[str, Range]
    values: Mapping[str, Range]

    def refusal(self, dims: Mapping[str, Shape], values: Mapping[str, Shape]) -> str:
        """Why the shapes of a batch do not fit, in Triton's words; "" when they do."""
        for name, found in dims.items():
            if not self.dims[name].holds(found):
                reason = _outside(self.dims[name], found)
                return f"request specifies invalid shape for input '{name}'. Error details: {reason}"
        for name, found in values.items():
            if name in self.values and not self.values[name].holds(found):
                reason = _outside(self.values[name], found, "shape value")
                return f"invalid shape values encountered for shape input '{name}': {reason}"
        return ""

    def distance(self, dims: Mapping[str, Shape], values: Mapping[str, Shape]) -> int:
        return sum(self.dims[name].distance(found) for name, found in dims.items()) + sum(
            self.values[name].distance(found) for name, found in values.items() if name in self.values
        )


@dataclass(frozen=True, slots=True)
class EngineTensors:
    """All tensors and profiles of a plan."""

    tensors: Mapping[str, EngineTensor]
    profiles: tuple[Profile, ...]

    @property
    def inputs(self) -> list[EngineTensor]:
        return [tensor for tensor in self.tensors.values() if tensor.is_input]

    @property
    def outputs(self) -> list[EngineTensor]:
        return [tensor for tensor in self.tensors.values() if not tensor.is_input]

    @property
    def has_shape_tensors(self) -> bool:
        return any(tensor.is_shape for tensor in self.tensors.values())

    def max_rows(self, profiles: Sequence[int]) -> int:
        """The largest batch that one of these profiles takes."""
        return max(
            min((r.largest[0] for r in self.profiles[at].dims.values() if r.largest), default=0) for at in profiles
        )


def closest_profile(profiles: Sequence[Profile], dims: Mapping[str, Shape], values: Mapping[str, Shape]) -> Profile:
    """The profile whose usual dims are nearest to those of a batch. Raises `InvalidArgument` when none takes them."""
    fitting = [profile for profile in profiles if not profile.refusal(dims, values)]
    if not fitting:
        refusal = profiles[0].refusal(dims, values)
        if len(profiles) > 1:
            refusal += f" (in profile {profiles[0].index}, and {len(profiles) - 1} others fit as little)"
        raise InvalidArgument(refusal)
    return min(fitting, key=lambda profile: profile.distance(dims, values))


def read_tensors(trt: Any, engine: Any, model: str) -> EngineTensors:
    """Read an engine's tensors and profiles. Raises `Unsupported` for a tensor that requests cannot carry."""
    tensors: dict[str, EngineTensor] = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        tensors[name] = _tensor(trt, engine, name, model)
    profiles = tuple(_profile(engine, index, tensors) for index in range(engine.num_optimization_profiles))
    return EngineTensors(tensors, profiles)


def profile_indices(names: Sequence[str], count: int, model: str) -> list[int]:
    """The profiles that an instance group names; the first one without names. Raises `InstanceError`."""
    found: list[int] = []
    for name in names:
        if not (name.isascii() and name.isdecimal()):
            raise InstanceError(f"unable to parse '{name}': a profile of model '{model}' is named by its number")
        if int(name) >= count:
            raise InstanceError(
                f"unable to autofill for '{model}', configuration specified invalid profile {name} . Number of "
                f"profiles supported by TensorRT engine: {count}"
            )
        if int(name) not in found:
            found.append(int(name))
    return found or [0]


def completed(config: pb.ModelConfig, engine: EngineTensors) -> pb.ModelConfig:
    """Return the configuration completed from a plan: tensors, and the largest batch of its profiles.

    Raises `InstanceError` for a contradiction, `Unsupported` for a batching model with shape tensors.
    """
    rows = engine.max_rows(_all_profiles(config, engine))
    plain = _without_shape_tensors(config, engine)
    if engine.has_shape_tensors:
        _refuse_batching(config)
        _write_all_dims(plain, engine)
    done = from_graph(plain, _signature(engine), default_max_batch=rows)
    _add_shape_tensors(done, config, engine)
    items: list[Any] = [*done.input, *done.output]
    for item in items:
        item.is_non_linear_format_io = not engine.tensors[item.name].is_linear
    _check_rows(done, rows)
    return done


def check_config(config: pb.ModelConfig, engine: EngineTensors) -> None:
    """Check a complete configuration against a plan. Raises `InstanceError` for a contradiction."""
    plain = _without_shape_tensors(config, engine)
    if engine.has_shape_tensors:
        _refuse_batching(config)
    check_against_graph(plain, _signature(engine))
    for item, side in [(item, "input") for item in config.input] + [(item, "output") for item in config.output]:
        tensor = engine.tensors.get(item.name)
        if tensor is None:
            continue
        if item.is_shape_tensor != tensor.is_shape:
            said = (
                "is a shape tensor but the model configuration doesn't mark it as a shape tensor."
                if tensor.is_shape
                else "is incorrectly marked as a shape tensor in the model configuration."
            )
            raise InstanceError(f"{side} '{item.name}' for model '{config.name}' {said}")
        if item.is_non_linear_format_io == tensor.is_linear:
            form, word = ("a linear", "true") if tensor.is_linear else ("a non-linear", "false")
            raise InstanceError(
                f"{side} '{item.name}' for model '{config.name}' uses {form} IO format, but 'is_non_linear_format_io' "
                f"is incorrectly set to {word} in the model configuration."
            )
    _check_rows(config, engine.max_rows(_all_profiles(config, engine)))


def _tensor(trt: Any, engine: Any, name: str, model: str) -> EngineTensor:
    word = engine.get_tensor_dtype(name).name
    datatype = _DATATYPES.get(word)
    if datatype is None:
        raise Unsupported(f"model '{model}': tensor '{name}' has the datatype {word}, which requests cannot carry")
    dims = tuple(engine.get_tensor_shape(name))
    linear = engine.get_tensor_format(name) == trt.TensorFormat.LINEAR
    if not linear:
        _check_format(engine, name, dims, model)
    return EngineTensor(
        name,
        datatype,
        dims,
        engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
        engine.is_shape_inference_io(name),
        engine.get_tensor_location(name) == trt.TensorLocation.HOST,
        linear,
    )


def _check_format(engine: Any, name: str, dims: Shape, model: str) -> None:
    """Raises `Unsupported` for a format that adds padding: then a tensor has other bytes than its dims say."""
    at, together = engine.get_tensor_vectorized_dim(name), engine.get_tensor_components_per_element(name)
    if at >= 0 and together > 1 and (dims[at] < 0 or dims[at] % together):
        raise Unsupported(
            f"model '{model}': the format {engine.get_tensor_format(name).name} of tensor '{name}' pads its dimension "
            f"{at} of {dims[at]} to a multiple of {together}: tensors with padding are not supported. Build the plan "
            f"with a linear format, or with a multiple of {together}"
        )


def _profile(engine: Any, index: int, tensors: Mapping[str, EngineTensor]) -> Profile:
    dims: dict[str, Range] = {}
    values: dict[str, Range] = {}
    for tensor in tensors.values():
        if not tensor.is_input:
            continue
        dims[tensor.name] = Range(*(tuple(one) for one in engine.get_tensor_profile_shape(tensor.name, index)))
        # a plan may leave the values of a shape tensor open: then it is given an empty list
        if tensor.is_shape and (found := engine.get_tensor_profile_values(index, tensor.name)):
            values[tensor.name] = Range(*(tuple(one) for one in found))
    return Profile(index, dims, values)


def _outside(allowed: Range, found: Shape, what: str = "shape of dimension") -> str:
    if len(found) != len(allowed.least):
        return f"model expected {len(allowed.least)} dimensions but received {len(found)} dimensions"
    at = next(i for i, n in enumerate(found) if not allowed.least[i] <= n <= allowed.largest[i])
    return (
        f"model expected the {what} {at} to be between {allowed.least[at]} and {allowed.largest[at]} but received "
        f"{found[at]}"
    )


def _all_profiles(config: pb.ModelConfig, engine: EngineTensors) -> list[int]:
    names = [name for group in config.instance_group for name in group.profile]
    return profile_indices(names, len(engine.profiles), config.name)


def _signature(engine: EngineTensors) -> GraphSignature:
    def of(tensors: Sequence[EngineTensor]) -> tuple[TensorSignature, ...]:
        return tuple(TensorSignature(t.name, t.datatype.value, t.dims) for t in tensors if not t.is_shape)

    return GraphSignature(of(engine.inputs), of(engine.outputs))


def _without_shape_tensors(config: pb.ModelConfig, engine: EngineTensors) -> pb.ModelConfig:
    plain = pb.ModelConfig()
    plain.CopyFrom(config)
    for items in (plain.input, plain.output):
        for at in reversed(range(len(items))):
            tensor = engine.tensors.get(items[at].name)
            if tensor is not None and tensor.is_shape:
                del items[at]
    return plain


def _add_shape_tensors(done: pb.ModelConfig, written: pb.ModelConfig, engine: EngineTensors) -> None:
    sides: list[tuple[Any, Any, list[EngineTensor]]] = [
        (done.input, written.input, engine.inputs),
        (done.output, written.output, engine.outputs),
    ]
    for items, before, tensors in sides:
        for tensor in tensors:
            if not tensor.is_shape or (items is done.output and before and tensor.name not in {i.name for i in before}):
                continue
            item = items.add(name=tensor.name, is_shape_tensor=True)
            said = next((one for one in before if one.name == tensor.name), None)
            if said is not None:
                item.CopyFrom(said)
                item.is_shape_tensor = True
            wanted = pb.DataType.Value(tensor.datatype.config_name)
            if item.data_type not in (pb.TYPE_INVALID, wanted):
                raise InstanceError(
                    f"unable to load model '{done.name}', configuration expects datatype "
                    f"{pb.DataType.Name(item.data_type)} for shape tensor '{tensor.name}', model provides "
                    f"{tensor.datatype.config_name}"
                )
            item.data_type = wanted
            if not item.dims:
                item.dims.extend(tensor.dims or (1,))
                if not tensor.dims:
                    item.reshape.SetInParent()


def _write_all_dims(config: pb.ModelConfig, engine: EngineTensors) -> None:
    """Write the dims of all tensors, so that none is taken for the batch dimension."""
    for items, tensors in ((config.input, engine.inputs), (config.output, engine.outputs)):
        written = {item.name: item for item in items}
        for tensor in tensors:
            if tensor.is_shape or (written and items is config.output and tensor.name not in written):
                continue
            item = written.get(tensor.name) or items.add(name=tensor.name)
            if not item.dims:
                item.dims.extend(tensor.dims)


def _refuse_batching(config: pb.ModelConfig) -> None:
    if config.max_batch_size > 0:
        raise Unsupported(
            f"model '{config.name}' has shape tensors and max_batch_size {config.max_batch_size}: requests with "
            "different shape values cannot share a batch. Set max_batch_size to 0"
        )


def _check_rows(config: pb.ModelConfig, rows: int) -> None:
    if config.max_batch_size > rows:
        raise InstanceError(
            f"autofill failed for model '{config.name}': configuration specified max-batch {config.max_batch_size} but "
            f"TensorRT engine only supports max-batch {rows}"
        )
