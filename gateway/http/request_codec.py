"""An infer body to an `InferenceRequest`: the v2 JSON, its binary extension and the raw form (H10-H14, H17, H20). Pure.

Binary requests of one signature repeat their JSON part byte for byte, so what it says is kept by its bytes (without the
id, when it stands first as clients write it) and a repeated request costs a lookup and slices of the body. Body size
and compression are the fast path's; whether tensors fit the model is `gateway.admission`'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument, Unsupported
from charonia.inference import LATEST_VERSION, InferenceRequest, Parameters
from charonia.tensors import MAX_ELEMENTS, Buffer, Tensor, element_count, join_bytes_elements, shape_text
from charonia.wire import MAX_CLIENT_ID_BYTES
from gateway.handler import ServedModel

from .jsondata import NOT_ARRAY, NOT_BOOLEAN, NOT_STRING, NOT_UNSIGNED, encode_elements
from .jsontext import parse_json
from .response_codec import ALL_BINARY, ReplyForm

SHARED_MEMORY_DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
"""H51."""

NEEDS_HEADER_LENGTH = (
    "must specify valid 'Infer-Header-Content-Length' in request header and 'binary_data_size' when passing inputs in "
    "binary data format"
)

MAX_DIMENSIONS = 64
"""No array library takes more; bounding it keeps the product of a hostile shape cheap (faults H5)."""

_CACHE_LIMIT = 1024
_CACHED_HEADER_LIMIT = 4096
"""At most 4 MiB of remembered headers; past the count the cache starts anew: hostile variety costs only time."""

_COPIED_BYTES = 1024
"""Up to here a copy of the tensor is cheaper than a view of the body, and lets go of it."""

_HEADER_LENGTH = re.compile(rb"[+-]?[0-9]{1,19}")
_LEADING_ID = re.compile(rb'\{"id":\s?"([^"\\\x00-\x1f]*)",\s?')

_INT64_MIN = -(2**63)


@dataclass(slots=True)
class InputSlot:
    """One input as the JSON part describes it: `data` from JSON, or `size_bytes` of the bytes that follow."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    size_bytes: int
    data: bytes | None = None


@dataclass(slots=True)
class Template:
    """Everything the JSON part of a request says. `binary_bytes` is what must follow it."""

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

    @property
    def repeats(self) -> bool:
        """Whether the text may come again: tensors written out in it hardly do."""
        return all(slot.data is None for slot in self.inputs)


class RequestDecoder:
    """Decodes infer bodies; one per front, it holds the remembered JSON parts."""

    def __init__(self, max_input_size_bytes: int) -> None:
        self._max_input_size_bytes = max_input_size_bytes
        self._templates: dict[bytes, Template] = {}

    def decode(
        self, model: str, version: int, body: bytes, header_length: bytes | None, served: ServedModel
    ) -> tuple[InferenceRequest, ReplyForm]:
        """The request in `body` and how its answer is to be written.

        `version` is that of the URL (`LATEST_VERSION` for none), `header_length` the raw value of
        Inference-Header-Content-Length. Raises `InvalidArgument`, `InternalError` (E4) or `Unsupported`.
        """
        size = len(body)
        json_size = size if header_length is None else parse_header_length(header_length)
        if json_size == 0:
            return decode_raw(model, version, body, served, self._max_input_size_bytes), ALL_BINARY
        if not 0 < json_size <= size:
            raise InvalidArgument(f"inference header size should be in range (0, {size}), got: {json_size}")
        if header_length is None:
            template = self._parse(body, binary=False)
            return _assemble(template, template.id, model, version, body, json_size), template.reply
        text = body[:json_size]
        found = self._templates.get(text)
        if found is not None:
            return _assemble(found, found.id, model, version, body, json_size), found.reply
        return self._decode_new(text, model, version, body, json_size)

    def _decode_new(
        self, text: bytes, model: str, version: int, body: bytes, json_size: int
    ) -> tuple[InferenceRequest, ReplyForm]:
        request_id = ""
        leading = _LEADING_ID.match(text)
        if leading is not None:
            try:
                request_id = leading.group(1).decode()
            except UnicodeDecodeError:
                leading = None
        if leading is None:
            template = self._remember(text)
            return _assemble(template, template.id, model, version, body, json_size), template.reply
        without_id = b"{" + text[leading.end() :]
        found = self._templates.get(without_id)
        if found is None:
            try:
                found = self._remember(without_id)
            except InternalError:  # so that offsets count in the text that was sent
                found = self._parse(text, binary=True)
        # a second "id" in the rest is a repeated key: the last one counts
        request_id = found.id or request_id
        _check_id(request_id)
        return _assemble(found, request_id, model, version, body, json_size), found.reply

    def _remember(self, text: bytes) -> Template:
        template = self._parse(text, binary=True)
        if len(text) <= _CACHED_HEADER_LIMIT and template.repeats:
            if len(self._templates) >= _CACHE_LIMIT:
                self._templates.clear()
            self._templates[text] = template
        return template

    def _parse(self, text: bytes, *, binary: bool) -> Template:
        if len(text) > self._max_input_size_bytes:
            raise InvalidArgument(json_too_large(len(text), self._max_input_size_bytes))
        return parse_template(parse_json(text), binary=binary, max_input_size_bytes=self._max_input_size_bytes)


def json_too_large(size_bytes: int, limit_bytes: int) -> str:
    """H24."""
    return (
        f"request JSON size of {size_bytes} bytes exceeds the maximum allowed input size of {limit_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def raw_too_large(size_bytes: int, limit_bytes: int) -> str:
    """H24."""
    return (
        f"Raw input has a byte_size ({size_bytes} bytes) that exceeds the maximum allowed value of {limit_bytes} bytes."
        " Use --http-max-input-size to increase the limit."
    )


def parse_header_length(value: bytes) -> int:
    """The number in Inference-Header-Content-Length, of either sign. Raises H14's `InvalidArgument` for no number."""
    if (not value.isdigit() or len(value) > 19) and _HEADER_LENGTH.fullmatch(value) is None:
        raise InvalidArgument(f"Unable to parse Inference-Header-Content-Length, got: {value.decode('latin-1')}")
    return int(value)


def _assemble(template: Template, request_id: str, model: str, version: int, body: bytes, at: int) -> InferenceRequest:
    """The request of a template and the bytes behind its JSON part; tensors are views of `body`, or copies."""
    if len(body) - at != template.binary_bytes:
        _refuse_binary_size(template, model, len(body) - at)
    slots = template.inputs
    tensors: list[Tensor] = []
    if len(slots) == 1 and 0 < template.binary_bytes <= _COPIED_BYTES:
        slot = slots[0]
        tensors.append(Tensor(slot.name, slot.datatype, slot.shape, body[at:]))
    elif template.binary_bytes:
        view = memoryview(body)
        for slot in slots:
            data: Buffer
            if slot.data is None:
                end = at + slot.size_bytes
                data = view[at:end]
                at = end
            else:
                data = slot.data
            tensors.append(Tensor(slot.name, slot.datatype, slot.shape, data))
    else:
        for slot in slots:
            tensors.append(Tensor(slot.name, slot.datatype, slot.shape, slot.data or b""))
    parameters = template.parameters
    return InferenceRequest(
        model,
        version,
        tensors,
        request_id,
        template.outputs,
        dict(parameters) if parameters else {},
        template.priority,
        template.timeout_us,
        template.deadline_ns,
        template.sequence_id,
        template.sequence_start,
        template.sequence_end,
    )


def _refuse_binary_size(template: Template, model: str, available: int) -> None:
    for slot in template.inputs:
        if slot.data is None:
            if slot.size_bytes > available:
                raise InvalidArgument(
                    f"unexpected size for input '{slot.name}', expecting {slot.size_bytes - available} additional "
                    f"bytes for model '{model}'"
                )
            available -= slot.size_bytes
    raise InvalidArgument(f"unexpected additional input data for model '{model}'")


def decode_raw(
    model: str, version: int, body: bytes, served: ServedModel, max_input_size_bytes: int
) -> InferenceRequest:
    """The request of a body that is the tensor alone (H17). Raises `InvalidArgument`; a length that does not fit the
    derived shape is left to the length check of admission (T8)."""
    prefix = "[request id: <id_unknown>] "
    inputs = list(served.interface.inputs.values())
    if len(body) > max_input_size_bytes:
        raise InvalidArgument(raw_too_large(len(body), max_input_size_bytes))
    if len(inputs) != 1:
        raise InvalidArgument(
            f"{prefix}Raw request must only have 1 input (found 1) to be deduced but got {len(inputs)} inputs in "
            f"'{model}' model configuration"
        )
    spec = inputs[0]
    shape = list(spec.dims)
    dynamic = [axis for axis, dim in enumerate(shape) if dim < 0]
    if len(dynamic) > 1:
        raise InvalidArgument(
            f"{prefix}The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    fixed = prod(dim for dim in shape if dim >= 0)
    data: bytes = body
    if spec.datatype is DataType.BYTES:
        if dynamic or fixed != 1:
            raise InvalidArgument(
                f"{prefix}For BYTE datatype raw input '{spec.name}', the model must have input shape [1]"
            )
        data = join_bytes_elements((body,))
    elif dynamic:
        row_bytes = fixed * spec.datatype.size_bytes
        shape[dynamic[0]] = len(body) // row_bytes if row_bytes else 0
    if served.interface.batching:
        shape.insert(0, 1)
    return InferenceRequest(model, version, [Tensor(spec.name, spec.datatype, tuple(shape), data)])


# -- the JSON part -----------------------------------------------------------------------------------------------------


def parse_template(document: Any, *, binary: bool, max_input_size_bytes: int) -> Template:
    """What an infer object says. `binary`: bytes may follow it (H14). Raises as `RequestDecoder.decode`."""
    template = Template()
    if isinstance(document, dict):
        if "id" in document:
            template.id = _string(document["id"], "id")
            _check_id(template.id)
        if "parameters" in document:
            _request_parameters(template, _members(document["parameters"]))
    for item in _array(document, "inputs"):
        slot = _input(item, binary, max_input_size_bytes)
        template.inputs.append(slot)
        if slot.data is None:
            template.binary_bytes += slot.size_bytes
    if "outputs" in document:
        _outputs(template, _array(document, "outputs"))
    return template


def _request_parameters(template: Template, members: dict[str, Any]) -> None:
    for key, value in members.items():
        match key:
            case "sequence_id":
                template.sequence_id = value if isinstance(value, str) else _unsigned(value, key)
            case "sequence_start":
                template.sequence_start = _boolean(value, key)
            case "sequence_end":
                template.sequence_end = _boolean(value, key)
            case "priority":
                template.priority = _unsigned(value, key)
            case "timeout":
                template.timeout_us = _unsigned(value, key)
            case "charonia_deadline_us":
                template.deadline_ns = min(_unsigned(value, key) * 1000, 2**63 - 1)
            case "binary_data_output":
                template.reply.binary_by_default = _boolean(value, key)
            case _:
                template.parameters[key] = _custom_parameter(key, value)
    template.reply.settle()


def _custom_parameter(key: str, value: Any) -> str | int | bool | float:
    if key.startswith("triton_"):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    if key == "headers":
        raise InvalidArgument("parameter 'headers' is reserved for Triton usage and should not be specified.")
    if isinstance(value, (str, bool, float)) or (isinstance(value, int) and _INT64_MIN <= value <= MAX_ELEMENTS):
        return value
    raise InvalidArgument(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _input(item: Any, binary: bool, max_input_size_bytes: int) -> InputSlot:
    name = _member_string(item, "name")
    shape = _shape(name, _array(item, "shape"))
    datatype = DataType.of(_member_string(item, "datatype"))
    count = element_count(name, shape)
    parameters = _members(item["parameters"]) if "parameters" in item else {}
    if "shared_memory_region" in parameters:
        raise Unsupported(SHARED_MEMORY_DISABLED)
    if "binary_data_size" in parameters:
        size = _unsigned(parameters["binary_data_size"], "binary_data_size")
        if not binary and size:
            raise InvalidArgument(NEEDS_HEADER_LENGTH)
        return InputSlot(name, datatype, shape, size)
    if count == 0:
        return InputSlot(name, datatype, shape, 0, b"")
    _check_json_size(name, count * datatype.size_bytes, max_input_size_bytes)
    data = encode_elements(name, datatype, item.get("data", []), count)
    _check_json_size(name, len(data), max_input_size_bytes)
    return InputSlot(name, datatype, shape, len(data), data)


def _check_json_size(name: str, size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise InvalidArgument(
            f"JSON input '{name}' has a byte_size ({size_bytes} bytes) that exceeds the maximum allowed value of "
            f"{limit_bytes} bytes. Use --http-max-input-size to increase the limit."
        )


def _shape(name: str, dims: list[Any]) -> tuple[int, ...]:
    if len(dims) > MAX_DIMENSIONS:
        raise InvalidArgument(
            f"invalid shape for input '{name}': {len(dims)} dimensions, at most {MAX_DIMENSIONS} are supported"
        )
    shape = tuple(_unsigned(dim, "shape") for dim in dims)
    if any(dim > MAX_ELEMENTS for dim in shape):
        raise InvalidArgument(
            f"shape {shape_text(shape)} for input '{name}' causes total element count to exceed maximum size of "
            f"{MAX_ELEMENTS}"
        )
    return shape


def _outputs(template: Template, items: list[Any]) -> None:
    names: dict[str, None] = {}
    reply = template.reply
    for item in items:
        name = _member_string(item, "name")
        if name in names:
            raise InvalidArgument(f"output '{name}' already exists in request")
        names[name] = None
        parameters = _members(item["parameters"]) if "parameters" in item else {}
        classes = _unsigned(parameters.get("classification", 0), "classification")
        if "shared_memory_region" in parameters:
            if classes:
                raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
            raise Unsupported(SHARED_MEMORY_DISABLED)
        reply.listed[name] = _boolean(parameters.get("binary_data", False), "binary_data")
        if classes:
            reply.classes[name] = classes
    template.outputs = tuple(names)
    reply.settle()


def _check_id(request_id: str) -> None:
    size = len(request_id.encode())
    if size > MAX_CLIENT_ID_BYTES:
        raise InvalidArgument(f"request id of {size} bytes exceeds the maximum of {MAX_CLIENT_ID_BYTES} bytes")


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


def _members(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InternalError("Unable to parse 'parameters': attempt to get members for non-object")
    return value


def _string(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise InternalError(f"Unable to parse '{key}': {NOT_STRING}")
    return value


def _boolean(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise InternalError(f"Unable to parse '{key}': {NOT_BOOLEAN}")
    return value


def _unsigned(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise InternalError(f"Unable to parse '{key}': {NOT_UNSIGNED}")
    return value


__all__ = [
    "LATEST_VERSION",
    "SHARED_MEMORY_DISABLED",
    "InputSlot",
    "RequestDecoder",
    "Template",
    "decode_raw",
    "json_too_large",
    "parse_header_length",
    "parse_template",
    "raw_too_large",
]
