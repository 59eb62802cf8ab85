"""Encodes infer replies: v2 JSON with flat data, or JSON and binary outputs (H15, H16, H23). Pure.

Binary replies with equal outputs have the same JSON part, which is cached. Also: the heads of HTTP/1.1 responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson

from charonia.catalog.served import ServedVersion
from charonia.inference import InferenceResponse, Parameters
from charonia.tensors import Buffer, Tensor
from gateway.requests.classification import classified

from .error_replies import JSON_CONTENT_TYPE, Headers
from .jsondata import render_elements
from .jsontext import quote

OCTET_CONTENT_TYPE = (b"content-type", b"application/octet-stream")
HEADER_LENGTH = b"inference-header-content-length"

_UNCOPIED_BYTES = 65_536
"""Up to this size copying a tensor costs less than sending it by itself."""

_CACHE_LIMIT = 1024
"""Cached JSON parts; a full cache is emptied."""


@dataclass(slots=True)
class ReplyForm:
    """How a request wants its outputs written (H12, H13, H19).

    `listed` maps each output named in the request to whether it is binary, `binary_by_default` holds for the others.
    `classes` maps outputs to the number of best classes wanted. Of outputs `in_regions` only shape and type are written
    (H49). `all_binary` is set by `settle`. `delivery` are the parameters of `gateway.requests.preferences`.
    """

    binary_by_default: bool = False
    listed: dict[str, bool] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    in_regions: set[str] = field(default_factory=set)
    all_binary: bool = False
    delivery: Parameters = field(default_factory=dict)

    def settle(self) -> None:
        """Set `all_binary`: the whole answer is binary, the form with a fast path."""
        binary = all(self.listed.values()) if self.listed else self.binary_by_default
        self.all_binary = binary and not self.classes and not self.in_regions

    def is_binary(self, name: str) -> bool:
        return self.listed.get(name, self.binary_by_default)

    def note(self, *, batching: bool) -> dict[str, Any]:
        """The form as plain values, for a job's record (`DeliveryOptions.form`). `batching` is the model's."""
        note: dict[str, Any] = {}
        if self.binary_by_default:
            note["binary"] = True
        if self.listed:
            note["listed"] = dict(self.listed)
        if self.classes:
            note["classes"] = dict(self.classes)
            note["batching"] = batching
        return note

    @staticmethod
    def of_note(note: Mapping[str, Any], binary: bool | None) -> ReplyForm:
        """The form of a `note` that either front wrote; `binary` overrides how outputs are written, unless None."""
        form = ReplyForm(bool(note.get("binary", False)), dict(note.get("listed", {})), dict(note.get("classes", {})))
        if binary is not None:
            form.binary_by_default = binary
            form.listed = dict.fromkeys(form.listed, binary)
        form.settle()
        return form


ALL_BINARY = ReplyForm(binary_by_default=True, all_binary=True)
"""The form of a raw request's answer (H17)."""


@dataclass(frozen=True, slots=True)
class LargeReply:
    """A reply's body in parts, some of them large tensors: joining would copy them."""

    parts: tuple[Buffer, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def joined(self) -> bytes:
        return b"".join(self.parts)


@dataclass(slots=True)
class _Signature:
    json: bytes
    headers: Headers


class ResponseEncoder:
    """Encodes infer replies; one per front, with its cache of JSON parts."""

    def __init__(self) -> None:
        self._signatures: dict[tuple[object, ...], _Signature] = {}

    def encode(
        self, response: InferenceResponse, form: ReplyForm, served: ServedVersion | None = None
    ) -> tuple[Headers, bytes]:
        """Headers, without Content-Length, and body of a successful reply with all of `response.outputs`.

        The headers are shared: do not change them. Raises `InvalidArgument` for outputs that JSON cannot carry (T4) and
        for classification of an output that does not allow it (H19).
        """
        if form.all_binary and not response.parameters:
            headers, binary = self._binary_parts(response)
            return headers, b"".join(binary)
        outputs = response.outputs
        if form.classes and served is not None:
            outputs = classified(outputs, form.classes, served.interface.batching, served.labels)
        parts: list[bytes] = []
        rendered: list[bytes] = []
        for tensor in outputs:
            if tensor.name in form.in_regions:
                rendered.append(_describe(tensor))
            elif form.is_binary(tensor.name):
                rendered.append(_describe(tensor, b',"parameters":{"binary_data_size":%d}' % len(tensor.data)))
                parts.append(bytes(tensor.data))
            else:
                rendered.append(_describe(tensor, b',"data":' + render_elements(tensor)))
        # a raw request's answer is binary even without outputs
        is_binary = bool(parts) or form.all_binary
        text = _document(response, rendered)
        if not is_binary:
            return [JSON_CONTENT_TYPE], text
        return [OCTET_CONTENT_TYPE, (HEADER_LENGTH, b"%d" % len(text))], b"".join((text, *parts))

    def reply(
        self, response: InferenceResponse, form: ReplyForm, served: ServedVersion
    ) -> tuple[Headers, bytes | LargeReply]:
        """As `encode`, without copying large tensors."""
        if not form.all_binary or response.parameters:
            return self.encode(response, form, served)
        headers, parts = self._binary_parts(response)
        if max(map(len, parts)) < _UNCOPIED_BYTES:
            return headers, b"".join(parts)
        return headers, LargeReply(parts)

    def _binary_parts(self, response: InferenceResponse) -> tuple[Headers, tuple[Buffer, ...]]:
        outputs = response.outputs
        if len(outputs) == 1:
            tensor = outputs[0]
            data: tuple[Buffer, ...] = (tensor.data,)
            key: tuple[object, ...] = (
                *(response.model, response.version, tensor.name, tensor.datatype.number, tensor.shape),
                len(tensor.data),
            )
        else:
            data = tuple([t.data for t in outputs])
            described = [(t.name, t.datatype.number, t.shape, len(t.data)) for t in outputs]
            key = (response.model, response.version, *described)
        known = self._signatures.get(key) or self._remember(key, response)
        if not response.id:
            return known.headers, (known.json, *data)
        text = b'{"id":%b,%b' % (quote(response.id), known.json[1:])
        return [OCTET_CONTENT_TYPE, (HEADER_LENGTH, b"%d" % len(text))], (text, *data)

    def _remember(self, key: tuple[object, ...], response: InferenceResponse) -> _Signature:
        rendered = [_describe(t, b',"parameters":{"binary_data_size":%d}' % len(t.data)) for t in response.outputs]
        anonymous = InferenceResponse(response.model, response.version, [])
        text = _document(anonymous, rendered)
        known = _Signature(text, [OCTET_CONTENT_TYPE, (HEADER_LENGTH, b"%d" % len(text))])
        if len(self._signatures) >= _CACHE_LIMIT:
            self._signatures.clear()
        self._signatures[key] = known
        return known


def _document(response: InferenceResponse, rendered: list[bytes]) -> bytes:
    members = [b'"id":' + quote(response.id)] if response.id else []
    members.append(b'"model_name":%b,"model_version":"%d"' % (quote(response.model), response.version))
    if response.parameters:
        members.append(b'"parameters":' + orjson.dumps(response.parameters))
    members.append(b'"outputs":[%b]' % b",".join(rendered))
    return b"{%b}" % b",".join(members)


def _describe(tensor: Tensor, rest: bytes = b"") -> bytes:
    shape = ",".join(map(str, tensor.shape)).encode()
    return b'{"name":%b,"datatype":"%b","shape":[%b]%b}' % (
        quote(tensor.name),
        tensor.datatype.name.encode(),
        shape,
        rest,
    )


_PHRASES = {status.value: status.phrase for status in HTTPStatus} | {
    413: "Request Entity Too Large",
    414: "Request-URI Too Long",
    416: "Requested Range Not Satisfiable",
    422: "Unprocessable Entity",
}
"""By status. Python 3.13 has other words for these four; a response is the same with every Python."""
_STATUS_LINES = {status: b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode()) for status, phrase in _PHRASES.items()}


def status_line(status: int) -> bytes:
    """The first line of a response."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def response_head(headers: Headers, size_bytes: int, status: int = 200) -> bytes:
    """Status line and headers of a response with a body of this size."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"%b%bcontent-length: %d\r\n\r\n" % (_STATUS_LINES[status], lines, size_bytes)
