"""Decodes infer bodies: the v2 JSON, its binary extension and the raw form (H10-H14, H17, H20). Pure.

A client's binary requests repeat their JSON part byte for byte, except for the id. So parsed templates are cached by
their text, without an id that stands first, as clients write it. `bodies` bounds and decompresses bodies;
`charonia.calls.admission` checks whether tensors fit the model.
"""

from __future__ import annotations

import re
from math import prod

from charonia.catalog.served import ServedVersion
from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument
from charonia.inference import InferenceRequest, check_request_id
from charonia.tensors import Buffer, Tensor, join_bytes_elements

from .jsontext import parse_json
from .request_json import Template, parse_template
from .response_codec import ALL_BINARY, ReplyForm

_CACHE_LIMIT = 1024
_CACHED_HEADER_LIMIT = 4096
"""At most 4 MiB are cached. A full cache is emptied, so that hostile variety costs only time."""

_COPIED_BYTES = 1024
"""Up to this size a copy of the tensor is cheaper than a view, which would keep the body in memory."""

_HEADER_LENGTH = re.compile(rb"\s*([+-]?[0-9]+)")
_INT32 = (-(2**31), 2**31 - 1)
_LEADING_ID = re.compile(rb'\{"id":\s?"([^"\\\x00-\x1f]*)",\s?')


class RequestDecoder:
    """Decodes infer bodies; one per front, with its cache of JSON parts."""

    def __init__(self, max_input_size_bytes: int) -> None:
        self._max_input_size_bytes = max_input_size_bytes
        self._templates: dict[bytes, Template] = {}

    def decode(
        self, model: str, version: int, body: bytes | memoryview, header_length: bytes | None, served: ServedVersion
    ) -> tuple[InferenceRequest, ReplyForm]:
        """The request in `body` and the form of its answer. If `body` is a view, tensors are views of it.

        `version` is that of the URL (`LATEST_VERSION` for none), `header_length` the raw value of
        Inference-Header-Content-Length. Raises `InvalidArgument`, `InternalError` (E4) or `Unsupported`.
        """
        size = len(body)
        json_size = size if header_length is None else parse_header_length(header_length)
        if json_size == 0:
            return decode_raw(model, version, bytes(body), served, self._max_input_size_bytes), ALL_BINARY
        if not 0 < json_size <= size:
            raise InvalidArgument(f"inference header size should be in range (0, {size}), got: {json_size}")
        if header_length is None:
            template = self._parse(bytes(body))
            return assemble(template, template.id, model, version, body, json_size), template.reply
        text = bytes(body[:json_size])
        found = self._templates.get(text)
        if found is not None:
            return assemble(found, found.id, model, version, body, json_size), found.reply
        return self._decode_new(text, model, version, body, json_size)

    def _decode_new(
        self, text: bytes, model: str, version: int, body: bytes | memoryview, json_size: int
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
            return assemble(template, template.id, model, version, body, json_size), template.reply
        without_id = b"{" + text[leading.end() :]
        found = self._templates.get(without_id)
        if found is None:
            try:
                found = self._remember(without_id)
            except InternalError:  # parse the text as sent, so that the error's offset is right
                found = self._parse(text)
        # of a repeated "id" the last one counts
        request_id = found.id or request_id
        check_request_id(request_id)
        return assemble(found, request_id, model, version, body, json_size), found.reply

    def _remember(self, text: bytes) -> Template:
        template = self._parse(text)
        if len(text) <= _CACHED_HEADER_LIMIT and template.repeats:
            if len(self._templates) >= _CACHE_LIMIT:
                self._templates.clear()
            self._templates[text] = template
        return template

    def _parse(self, text: bytes) -> Template:
        if len(text) > self._max_input_size_bytes:
            raise InvalidArgument(json_too_large(len(text), self._max_input_size_bytes))
        return parse_template(parse_json(text), max_input_size_bytes=self._max_input_size_bytes)


def json_too_large(size_bytes: int, limit_bytes: int) -> str:
    """Triton's text for a JSON part over the limit (H24)."""
    return (
        f"request JSON size of {size_bytes} bytes exceeds the maximum allowed input size of {limit_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def raw_too_large(size_bytes: int, limit_bytes: int) -> str:
    """Triton's text for a raw body over the limit (H24)."""
    return (
        f"Raw input has a byte_size ({size_bytes} bytes) that exceeds the maximum allowed value of {limit_bytes} bytes."
        " Use --http-max-input-size to increase the limit."
    )


def parse_header_length(value: bytes) -> int:
    """The number in Inference-Header-Content-Length, of either sign (H14); as in Triton, text behind it is ignored.

    Raises `InvalidArgument` for text that does not begin with a number, and for numbers of more than 32 bits.
    """
    if value.isdigit() and len(value) < 10:
        return int(value)
    found = _HEADER_LENGTH.match(value)
    unable, got = "Unable to parse Inference-Header-Content-Length", f"got: {value.decode('latin-1')}"
    if found is None:
        raise InvalidArgument(f"{unable}, {got}")
    least, most = _INT32
    # `int` refuses thousands of digits
    number = int(found.group(1)) if len(found.group(1)) < 20 else most + 1
    if not least <= number <= most:
        raise InvalidArgument(f"{unable}, value is out of range [ {least}, {most} ], {got}")
    return number


def assemble(
    template: Template, request_id: str, model: str, version: int, body: bytes | memoryview, at: int
) -> InferenceRequest:
    """The request of a template and of the bytes of `body` from `at` on; tensors are views of `body`, or copies."""
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
        regions=template.regions,
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
    model: str, version: int, body: bytes, served: ServedVersion, max_input_size_bytes: int
) -> InferenceRequest:
    """The request of a body that is the tensor alone (H17). Raises `InvalidArgument`.

    Admission refuses a length that does not fit the derived shape (T8).
    """
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
