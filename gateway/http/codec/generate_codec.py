"""The generate extension's JSON: members of a request to tensors and parameters, a response to one object. Pure.

Interface items H30-H33 and H39. `generate` answers requests, with one response or several.
"""

from __future__ import annotations

from typing import Any

import orjson

from charonia.calls.admission import request_prefix
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from charonia.inference import InferenceRequest, InferenceResponse, check_request_id
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor, element_count

from .jsondata import NOT_STRING, encode_elements, render_elements
from .jsontext import Members, parse_members, quote
from .request_json import Template, read_generate_parameter

PARAMETERS = "parameters"


def decode_generate(
    model: str, version: int, body: bytes, interface: ModelInterface, max_input_size_bytes: int
) -> tuple[InferenceRequest, Template]:
    """The request of a generate body, and the template that its parameters were read into.

    Raises `InvalidArgument`, and `InternalError` for broken JSON and values of the wrong type (E4).
    """
    document = parse_members(body)
    if not isinstance(document, Members):
        raise InternalError("attempt to get members for non-object")
    reader = _Reader(interface, len(body), max_input_size_bytes)
    reader.read(document, nested=False)
    template = reader.template
    request = InferenceRequest(
        model,
        version,
        reader.tensors,
        template.id,
        parameters=template.parameters,
        priority=template.priority,
        timeout_us=template.timeout_us,
        deadline_ns=template.deadline_ns,
        sequence_id=template.sequence_id,
        sequence_start=template.sequence_start,
        sequence_end=template.sequence_end,
    )
    return request, template


class _Reader:
    def __init__(self, interface: ModelInterface, body_bytes: int, max_input_size_bytes: int) -> None:
        self._interface = interface
        self._size_bytes = body_bytes
        self._max_input_size_bytes = max_input_size_bytes
        self.template = Template()
        self.tensors: list[Tensor] = []

    def read(self, document: Members, *, nested: bool) -> None:
        """Read members in the order of the text. An input that occurs twice is kept twice: admission refuses it."""
        inputs = self._interface.inputs
        for key, value in document.pairs:
            if key == PARAMETERS and not nested:
                self._read_nested(value)
            elif key in inputs:
                if nested and any(tensor.name == key for tensor in self.tensors):
                    raise InvalidArgument(f"{request_prefix(self.template.id)}input '{key}' already exists in request")
                self.tensors.append(self._tensor(key, value))
            elif key == "id" and not nested:
                if not isinstance(value, str):
                    raise InternalError(f"Unable to parse 'id': {NOT_STRING}")
                check_request_id(value)
                self.template.id = value
            else:
                read_generate_parameter(self.template, key, value)

    def _read_nested(self, value: Any) -> None:
        if PARAMETERS in self._interface.inputs:
            raise InvalidArgument(f"Keyword '{PARAMETERS}' for nested schema also given as input tensor name")
        if not isinstance(value, Members):
            raise InternalError(
                f"Expected JSON object for keyword: '{PARAMETERS}': attempt to access JSON non-object as object"
            )
        try:
            self.read(value, nested=True)
        except CharoniaError as error:
            raise type(error)(f"Converting keyword: '{PARAMETERS}': {error.message}") from None

    def _tensor(self, name: str, value: Any) -> Tensor:
        spec = self._interface.inputs[name]
        elements = value if isinstance(value, list) else [value]
        count = len(elements)
        dims = self._interface.client_shape(spec)
        if spec.datatype is DataType.BYTES:
            data = encode_elements(name, spec.datatype, elements, count)
            self._check_size(name, len(data))
            return Tensor(name, spec.datatype, shape_of(name, dims, count), data)
        self._check_size(name, count * spec.datatype.size_bytes)
        shape = shape_of(name, dims, count)
        return Tensor(name, spec.datatype, shape, encode_elements(name, spec.datatype, elements, count))

    def _check_size(self, name: str, size_bytes: int) -> None:
        if size_bytes > self._max_input_size_bytes:
            raise InvalidArgument(
                f"request size of {self._size_bytes} bytes with input '{name}' of size {size_bytes} bytes exceeds the "
                f"maximum allowed input size of {self._max_input_size_bytes}. Use --http-max-input-size to increase "
                "the limit."
            )


def shape_of(name: str, dims: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The shape of `count` elements: the innermost dynamic dim of `dims` is count divided by the fixed dims (H31).

    `dims` have the leading -1 of a batching model. Raises `InvalidArgument` if no shape fits.
    """
    impossible = InvalidArgument(f"The schema can not convert input '{name}' to tensor with proper shape")
    rest = count
    for dim in dims:
        if dim >= 0:
            if dim == 0 or rest % dim:
                raise impossible
            rest //= dim
    shape = list(dims)
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] < 0:
            shape[axis], rest = rest, 1
    if rest != 1:
        raise impossible
    return tuple(shape)


_FRAMES: dict[tuple[str, int, str], tuple[bytes, bytes]] = {}
"""What an object has before and behind the element of its output, by model, version and the output's name."""
_MAX_FRAMES = 1000
_LENGTH_BYTES = 4
"""Of the length before each element of BYTES."""
_ONE = ((1,), (1, 1))
_OWN_MEMBERS = frozenset(("id", "model_name", "model_version"))


def _encode_element(response: InferenceResponse) -> bytes | None:
    """The object of a response that is one element of BYTES and nothing else, as each token of a text is; else None."""
    if len(response.outputs) != 1 or response.id or response.parameters:
        return None
    tensor = response.outputs[0]
    if tensor.datatype is not DataType.BYTES or tensor.shape not in _ONE:
        return None
    data = bytes(tensor.data)
    if int.from_bytes(data[:_LENGTH_BYTES], "little") != len(data) - _LENGTH_BYTES:
        return None
    key = (response.model, response.version, tensor.name)
    frame = _FRAMES.get(key)
    if frame is None:
        if tensor.name in _OWN_MEMBERS:
            return None
        if len(_FRAMES) >= _MAX_FRAMES:
            _FRAMES.clear()
        before, _, behind = _object({**_own_members(response), tensor.name: b"\0"}).partition(b"\0")
        frame = _FRAMES[key] = before, behind
    try:
        return b"%b%b%b" % (frame[0], orjson.dumps(data[_LENGTH_BYTES:].decode()), frame[1])
    except UnicodeDecodeError:
        return None  # `render_elements` has the error


def encode_generate(response: InferenceResponse) -> bytes:
    """One response as an object (H33). Raises `InvalidArgument` for what JSON cannot carry (T4)."""
    encoded = _encode_element(response)
    if encoded is not None:
        return encoded
    members = _own_members(response)
    for key, value in response.parameters.items():
        members.setdefault(key, orjson.dumps(value))
    for tensor in response.outputs:
        text = render_elements(tensor)
        members.setdefault(tensor.name, text[1:-1] if element_count(tensor.name, tensor.shape) == 1 else text)
    return _object(members)


def _own_members(response: InferenceResponse) -> dict[str, bytes]:
    members = {"model_name": quote(response.model), "model_version": b'"%d"' % response.version}
    if response.id:
        members["id"] = quote(response.id)
    return members


def _object(members: dict[str, bytes]) -> bytes:
    """The members in the order of their names' bytes, as Triton writes them."""
    return b"{%b}" % b",".join([b"%b:%b" % (quote(name), members[name]) for name in sorted(members)])
