"""Reads the JSON part of an infer request into a `Template` (interface items H11-H13, H19, H20, E4). Pure.

`request_codec` adds the binary tensors that follow it, and caches templates.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from charonia.datatypes import DATATYPES, DataType
from charonia.errors import InternalError, InvalidArgument
from charonia.inference import (
    MAX_DEADLINE_NS,
    NO_DEADLINE,
    RECEIPT,
    Parameters,
    ParameterValue,
    RegionPart,
    RegionUse,
    check_dimensions,
    check_parameter_name,
    check_request_id,
)
from charonia.tensors import MAX_ELEMENTS, Buffer, element_count, expected_size_bytes
from gateway.requests.preferences import PARAMETERS as DELIVERY_PARAMETERS

from .jsondata import NOT_ARRAY, NOT_BOOLEAN, NOT_STRING, NOT_UNSIGNED, encode_elements, encode_strings
from .response_codec import ReplyForm

_ONE_FIELD = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'"
)
_INT64_MIN = -(2**63)
_MEANINGS = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"})


@dataclass(slots=True)
class InputSlot:
    """One input of the JSON part: `data` from JSON, `size_bytes` of binary data, or `part` of shared memory (H49).

    `counted`: `data` are strings, as many as the shape says.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    size_bytes: int
    data: Buffer | None = None
    part: RegionPart | None = None
    counted: bool = False


@dataclass(slots=True)
class Template:
    """The JSON part of a request. `binary_bytes` is the size of the binary part that must follow it."""

    inputs: list[InputSlot] = field(default_factory=list)
    binary_bytes: int = 0
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Parameters = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    deadline_ns: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    reply: ReplyForm = field(default_factory=ReplyForm)
    regions: RegionUse | None = None

    @property
    def repeats(self) -> bool:
        """Whether other requests may have the same text; hardly any with tensors in it."""
        return all(slot.data is None or slot.part is not None for slot in self.inputs)


def parse_template(document: Any, *, max_input_size_bytes: int) -> Template:
    """The template of an infer object. Raises as `RequestDecoder.decode`."""
    template = Template()
    if isinstance(document, dict):
        if "id" in document:
            template.id = _string(document["id"], "id")
            check_request_id(template.id)
        if "parameters" in document:
            read_parameters(template, _members(document["parameters"], "failed to get request params."))
    for item in _array(document, "inputs"):
        slot = _input(item, max_input_size_bytes)
        template.inputs.append(slot)
        if slot.data is None:
            template.binary_bytes += slot.size_bytes
    written = _outputs(template, _array(document, "outputs")) if "outputs" in document else {}
    read = {at: slot.part for at, slot in enumerate(template.inputs) if slot.part is not None}
    if read or written:
        template.regions = RegionUse(read, written)
    return template


def read_parameters(template: Template, members: dict[str, Any]) -> None:
    """Read parameters of the request into `template` (H20). Raises as `RequestDecoder.decode`."""
    for key, value in members.items():
        match key:
            case "sequence_id":
                template.sequence_id = value if _is_unsigned(value) else _string(value, key)
            case "sequence_start":
                template.sequence_start = _boolean(value, key)
            case "sequence_end":
                template.sequence_end = _boolean(value, key)
            case "priority":
                template.priority = _unsigned(value, key)
            case "timeout":
                template.timeout_us = _unsigned(value, key)
            case "charonia_deadline_us":
                template.deadline_ns = min(_deadline_us(value) * 1000, MAX_DEADLINE_NS)
            case "binary_data_output":
                template.reply.binary_by_default = _boolean(value, key)
            case _ if key in DELIVERY_PARAMETERS:
                template.reply.delivery[key] = _delivery_parameter(key, value)
            case _ if key == RECEIPT:
                if type(value) is not bool:
                    raise InvalidArgument(f"parameter '{key}' must be a boolean")
                if value:
                    template.parameters[key] = True
            case _:
                template.parameters[key] = _custom_parameter(key, value)
    template.reply.settle()


def read_generate_parameter(template: Template, key: str, value: Any) -> None:
    """Read one parameter of a generate request (H30). Raises as `RequestDecoder.decode`.

    Triton gives all of them to the model. The names that mean something for an inference (H20) have that meaning here
    as well, where their value is of the right type.
    """
    if key in _MEANINGS:
        with contextlib.suppress(InternalError):
            read_parameters(template, {key: value})
    if key in _MEANINGS or key.startswith("triton_"):
        template.parameters[key] = _plain_parameter(key, value)
    else:
        read_parameters(template, {key: value})


def _deadline_us(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise InvalidArgument(NO_DEADLINE)
    return value


def _delivery_parameter(key: str, value: Any) -> ParameterValue:
    if isinstance(value, (str, bool, float, int)):
        return value
    raise InvalidArgument(f"parameter '{key}' must be a string or a number")


def _custom_parameter(key: str, value: Any) -> ParameterValue:
    check_parameter_name(key)
    return _plain_parameter(key, value)


def _plain_parameter(key: str, value: Any) -> ParameterValue:
    if isinstance(value, (str, bool, float)) or (isinstance(value, int) and _INT64_MIN <= value <= MAX_ELEMENTS):
        return value
    if isinstance(value, int):  # past 64 bits it is a double
        return float(value)
    raise InvalidArgument(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _input(item: Any, max_input_size_bytes: int) -> InputSlot:
    _check_fields(item)
    name = _member_string(item, "name")
    word = _member_string(item, "datatype")
    shape = _shape(name, _array(item, "shape"))
    datatype = DATATYPES.get(word)
    if datatype is None:
        raise InvalidArgument(f"invalid datatype for input {name}")
    parameters = _parameters_of(item)
    if "shared_memory_region" in parameters:
        return InputSlot(name, datatype, shape, 0, b"", _region_part(parameters))
    if "binary_data_size" in parameters:
        size = _unsigned(parameters["binary_data_size"], "binary_data_size")
        return InputSlot(name, datatype, shape, size)
    count = element_count(name, shape) if shape else 0  # no dimensions are no elements here: no model takes them
    if count == 0:
        return InputSlot(name, datatype, shape, 0, b"")
    if datatype is DataType.BYTES:
        data, found = encode_strings(item["data"])
        _check_json_size(name, len(data), max_input_size_bytes)
        return InputSlot(name, datatype, shape, len(data), data, counted=found == count)
    _check_json_size(name, expected_size_bytes(name, datatype, shape), max_input_size_bytes)
    data = encode_elements(name, datatype, item["data"], count)
    _check_json_size(name, len(data), max_input_size_bytes)
    return InputSlot(name, datatype, shape, len(data), data)


def _check_fields(item: Any) -> None:
    """Raises unless an input names exactly one place of its data (H13)."""
    found: list[str] = []
    if isinstance(item, dict):
        parameters = _parameters_of(item)
        found = ["data"] if "data" in item else []
        found += [name for name in ("binary_data_size", "shared_memory_region") if name in parameters]
    if len(found) != 1:
        which = " set" + "".join(f" '{name}'" for name in found) if found else " no field is set"
        raise InvalidArgument(f"{_ONE_FIELD}. But{which}")


def _region_part(parameters: dict[str, Any]) -> RegionPart:
    return RegionPart(
        _string(parameters["shared_memory_region"], "shared_memory_region"),
        _unsigned(parameters.get("shared_memory_offset", 0), "shared_memory_offset"),
        _unsigned(parameters.get("shared_memory_byte_size", 0), "shared_memory_byte_size"),
    )


def _check_json_size(name: str, size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise InvalidArgument(
            f"JSON input '{name}' has a byte_size ({size_bytes} bytes) that exceeds the maximum allowed value of "
            f"{limit_bytes} bytes. Use --http-max-input-size to increase the limit."
        )


def _shape(name: str, dims: list[Any]) -> tuple[int, ...]:
    check_dimensions(name, len(dims))
    shape = tuple(_unsigned(dim, "shape") for dim in dims)
    # as Triton, which keeps them as signed numbers: they become negative, which no shape may be
    return tuple(dim - 2**64 if dim > MAX_ELEMENTS else dim for dim in shape)


def _outputs(template: Template, items: list[Any]) -> dict[str, RegionPart]:
    """Read the requested outputs into `template`; returns the parts of shared memory to write to, by output."""
    written: dict[str, RegionPart] = {}
    names: list[str] = []  # admission refuses those that occur twice
    reply = template.reply
    for item in items:
        name = _member_string(item, "name")
        names.append(name)
        parameters = _parameters_of(item)
        classes = parameters.get("classification", 0)
        if not _is_unsigned(classes):
            raise InternalError(f"Unable to set 'classification': {NOT_UNSIGNED}")
        if "shared_memory_region" in parameters:
            if "classification" in parameters:
                raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
            if parameters.get("binary_data") is True:
                raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")
            written[name] = _region_part(parameters)
            reply.in_regions.add(name)
        reply.listed[name] = _boolean(parameters.get("binary_data", False), "binary_data")
        if classes:
            reply.classes[name] = classes
    template.outputs = tuple(names)
    reply.settle()
    return written


# -- typed access, with E4's texts -------------------------------------------------------------------------------------


def _missing(key: str) -> InternalError:
    return InternalError(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")


def _array(document: Any, key: str) -> list[Any]:
    if not isinstance(document, dict) or key not in document:
        raise _missing(key)
    value = document[key]
    if not isinstance(value, list):
        raise InternalError(f"Unable to parse '{key}': {NOT_ARRAY}")
    return value


def _member_string(document: Any, key: str) -> str:
    if not isinstance(document, dict) or key not in document:
        raise _missing(key)
    return _string(document[key], key)


def _members(value: Any, unable: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InternalError(f"{unable}: attempt to get members for non-object")
    return value


def _parameters_of(item: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an input or output; what is no object has none."""
    parameters = item.get("parameters")
    return parameters if isinstance(parameters, dict) else {}


def _string(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise InternalError(f"Unable to parse '{key}': {NOT_STRING}")
    return value


def _boolean(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise InternalError(f"Unable to parse '{key}': {NOT_BOOLEAN}")
    return value


def _is_unsigned(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _unsigned(value: Any, key: str) -> int:
    if not _is_unsigned(value):
        raise InternalError(f"Unable to parse '{key}': {NOT_UNSIGNED}")
    number: int = value
    return number
