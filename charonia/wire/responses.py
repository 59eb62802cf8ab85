"""Response records: header | place | times | report | meta [model, version, outputs or error text, parameters] | bytes.

All responses of models that answer several times have a place (attempt, index), failures and final ones included:
readers drop what they have seen, and never mix two attempts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InvalidRecord
from charonia.inference import RECEIPT, Parameters
from charonia.tensors import Buffer, Tensor
from charonia.traces.reports import Report

from .records import (
    MAX_CACHED_META_BYTES,
    META_CACHE_LIMIT,
    WIRE_VERSION,
    Reference,
    TensorPlace,
    parameters_of,
    places_of,
    total_size_bytes,
)

# version, flags, error code, reserved, meta length, id
_RESPONSE = struct.Struct("<BBBxI16s")
_PLACE = struct.Struct("<II")
# compute input, infer and output ns
_TIMES = struct.Struct("<QQQ")
_LENGTH = struct.Struct("<I")
_AT, _PLACED_AT = _RESPONSE.size, _RESPONSE.size + _PLACE.size
"""Where the meta begins of a response without report and times."""

FLAG_ERROR = 1
FLAG_FINAL = 2
FLAG_REFERRED = 4
"""A `Reference` replaces the tensor bytes."""
FLAG_PLACED = 8
"""The response is one of several: it has an attempt and an index."""
FLAG_TIMES = 16
"""The response holds the duration of its execution, because the caller asked for it (`FLAG_TIMED`)."""
FLAG_REPORTED = 32
"""The response holds its request's trace report, preceded by its length (`FLAG_TRACED`)."""
FLAG_BARE = 64
"""The last one of several responses has no outputs, but is a response of the model. Without this flag it only says that
there are no more (G24), which is how older releases read both."""

_MORE = FLAG_PLACED | FLAG_TIMES | FLAG_REPORTED
_MORE_THAN_PLACE = FLAG_TIMES | FLAG_REPORTED
"""Flags of parts between header and meta."""

Times = tuple[int, int, int]
"""Compute input, infer and output durations in ns, of the whole execution (X3)."""


@dataclass(slots=True)
class ResponseRecord:
    """One decoded response to request `id` (16 bytes). If `error` is set it has failed, and `outputs` is empty.
    A failure has no parameters but its receipt.

    `place` is (attempt, index from 0) for one of several. The last one is `final`. If it has neither outputs nor error,
    it is `bare` where the model sent a response, and otherwise only a flag (G24: an empty final response); either
    counts as a response with the next index.
    """

    id: bytes
    model: str
    version: int
    outputs: list[Tensor]
    parameters: Parameters
    error: CharoniaError | None
    final: bool = True
    place: tuple[int, int] | None = None
    times: Times | None = None
    report: Report | None = None
    reference: Reference | None = None
    """The location of its tensor bytes, if they are not in the record."""
    bare: bool = False

    @property
    def is_flag(self) -> bool:
        """Whether it says only that there are no more responses (G24)."""
        return self.final and not (self.bare or self.outputs or self.parameters or self.error is not None)


def pack_response(
    request_id: bytes,
    model: str,
    version: int,
    outputs: Sequence[Tensor],
    parameters: Parameters,
    *,
    final: bool = True,
    place: tuple[int, int] | None = None,
    is_flag: bool = False,
) -> bytes:
    """The record of one successful response; `place` is (attempt, index) for one of several.

    `is_flag`: it is no response of the model, but only says that there are no more.
    """
    key = (model, version, tuple([(t.name, t.datatype, t.shape, len(t.data)) for t in outputs]))
    packed = _PACKED_RESPONSE_METAS.get(key) if not parameters else None
    if packed is None:
        packed = bytes(
            msgpack.packb(
                [
                    model,
                    version,
                    [[t.name, t.datatype.number, t.shape, len(t.data)] for t in outputs],
                    parameters or None,
                ]
            )
        )
        if not parameters and len(packed) <= MAX_CACHED_META_BYTES:
            if len(_PACKED_RESPONSE_METAS) >= META_CACHE_LIMIT:
                _PACKED_RESPONSE_METAS.clear()
            _PACKED_RESPONSE_METAS[key] = packed
    flags = FLAG_FINAL if final else 0
    if place is None:
        header = _RESPONSE.pack(WIRE_VERSION, flags, 0, len(packed), request_id)
    else:
        flags |= FLAG_PLACED
        if final and not outputs and not is_flag:
            flags |= FLAG_BARE
        header = _RESPONSE.pack(WIRE_VERSION, flags, 0, len(packed), request_id) + _PLACE.pack(*place)
    return b"".join((header, packed, *[t.data for t in outputs]))


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """The common part of answers with equal outputs but for the data: a record is `head + id + meta + tensor bytes`."""

    head: bytes
    meta: bytes


def response_template(
    model: str, version: int, outputs: tuple[tuple[str, DataType, tuple[int, ...], int], ...]
) -> ResponseTemplate:
    """The template of final responses without parameters; `outputs` are (name, datatype, shape, size_bytes)."""
    key = (model, version, outputs)
    template = _RESPONSE_TEMPLATES.get(key)
    if template is None:
        packed = bytes(
            msgpack.packb([model, version, [[name, t.number, shape, size] for name, t, shape, size in outputs], None])
        )
        header = _RESPONSE.pack(WIRE_VERSION, FLAG_FINAL, 0, len(packed), bytes(16))
        template = ResponseTemplate(header[:-16], packed)
        if len(_RESPONSE_TEMPLATES) >= META_CACHE_LIMIT:
            _RESPONSE_TEMPLATES.clear()
        _RESPONSE_TEMPLATES[key] = template
    return template


_RESPONSE_TEMPLATES: dict[Any, ResponseTemplate] = {}


def pack_failure(
    request_id: bytes,
    model: str,
    version: int,
    error: CharoniaError,
    *,
    final: bool = True,
    place: tuple[int, int] | None = None,
) -> bytes:
    """The record of a failed request, or of one failed response of several; the error keeps code and message."""
    packed = bytes(msgpack.packb([model, version, error.message, None]))
    flags = FLAG_ERROR | (FLAG_FINAL if final else 0) | (0 if place is None else FLAG_PLACED)
    header = _RESPONSE.pack(WIRE_VERSION, flags, int(error.code), len(packed), request_id)
    return header + (b"" if place is None else _PLACE.pack(*place)) + packed


def failed_response(record: Buffer, error: CharoniaError) -> bytes:
    """The failure that takes the place of a response, which comes from this process."""
    view = memoryview(record)
    _, flags, _, meta_length, request_id = _RESPONSE.unpack_from(view)
    at = _meta_at(view, flags)
    model, version, *_ = msgpack.unpackb(view[at : at + meta_length])
    place = _PLACE.unpack_from(view, _RESPONSE.size) if flags & FLAG_PLACED else None
    return pack_failure(request_id, model, version, error, final=bool(flags & FLAG_FINAL), place=place)


_PACKED_RESPONSE_METAS: dict[Any, bytes] = {}
_RESPONSE_METAS: dict[bytes, tuple[str, int, tuple[TensorPlace, ...], Parameters]] = {}


def response_data(record: Buffer) -> memoryview:
    """The tensor bytes of a response record, as a view."""
    view = memoryview(record)
    _, flags, _, meta_length, _ = _RESPONSE.unpack_from(view)
    return view[_meta_at(view, flags) + meta_length :]


def _meta_at(view: memoryview, flags: int) -> int:
    """The start of the meta. Raises `struct.error` for a truncated record."""
    size = _report_at(flags)
    return size + _LENGTH.size + _LENGTH.unpack_from(view, size)[0] if flags & FLAG_REPORTED else size


def _report_at(flags: int) -> int:
    """The start of the report's length, if there is a report."""
    size = _RESPONSE.size
    if flags & FLAG_PLACED:
        size += _PLACE.size
    return size + _TIMES.size if flags & FLAG_TIMES else size


def response_sizes(records: Iterable[Buffer]) -> list[int]:
    """The tensor bytes of each response record, those out of band included; 0 for an empty record and for a failure.

    Records come from this process: nothing is checked.
    """
    sizes: list[int] = []
    for record in records:
        if not record:
            sizes.append(0)
            continue
        _, flags, _, meta_length, _ = _RESPONSE.unpack_from(record)
        at = _RESPONSE.size if not flags & _MORE else _meta_at(memoryview(record), flags)
        left = len(record) - at - meta_length
        if flags & FLAG_REFERRED:
            left = Reference.unpack(memoryview(record)[at + meta_length :]).size_bytes
        sizes.append(left)
    return sizes


def with_parameters(record: Buffer, added: Parameters) -> bytes:
    """The response with these parameters added. Raises `InvalidRecord`."""
    view = memoryview(record)
    wire_version, flags, code, meta_length, request_id = _RESPONSE.unpack_from(view)
    at = _meta_at(view, flags)
    try:
        model, version, tensors, parameters, *more = msgpack.unpackb(bytes(view[at : at + meta_length]))
    except Exception as error:
        raise InvalidRecord(f"response meta cannot be read: {error}") from None
    packed = bytes(msgpack.packb([model, version, tensors, {**(parameters or {}), **added}, *more]))
    header = _RESPONSE.pack(wire_version, flags, code, len(packed), request_id)
    return b"".join((header, view[_RESPONSE.size : at], packed, view[at + meta_length :]))


def response_id(record: Buffer) -> bytes:
    """The id of the request that a response record answers. Raises `InvalidRecord`."""
    try:
        return bytes(_RESPONSE.unpack_from(record)[4])
    except struct.error as error:
        raise InvalidRecord(f"response record of {len(record)} bytes is too short: {error}") from None


def time_response(record: Buffer, times: Times) -> bytes:
    """The response with its times added; it must not have any."""
    view = memoryview(record)
    wire_version, flags, code, meta_length, request_id = _RESPONSE.unpack_from(view)
    header = _RESPONSE.pack(wire_version, flags | FLAG_TIMES, code, meta_length, request_id)
    at = _report_at(flags)
    return b"".join((header, view[_RESPONSE.size : at], _TIMES.pack(*times), view[at:]))


def report_response(record: Buffer, report: Report) -> bytes:
    """The response with a report added; it must not have one."""
    view = memoryview(record)
    wire_version, flags, code, meta_length, request_id = _RESPONSE.unpack_from(view)
    header = _RESPONSE.pack(wire_version, flags | FLAG_REPORTED, code, meta_length, request_id)
    at, packed = _report_at(flags), report.pack()
    return b"".join((header, view[_RESPONSE.size : at], _LENGTH.pack(len(packed)), packed, view[at:]))


def refer_response(record: Buffer, reference: Reference) -> bytes:
    """The response with `reference` in place of its tensor bytes."""
    view = memoryview(record)
    wire_version, flags, code, meta_length, request_id = _RESPONSE.unpack_from(view)
    header = _RESPONSE.pack(wire_version, flags | FLAG_REFERRED, code, meta_length, request_id)
    meta_end = _meta_at(view, flags) + meta_length
    return b"".join((header, view[_RESPONSE.size : meta_end], reference.pack()))


def unpack_response(record: Buffer, fetch: Callable[[Reference], Buffer] | None = None) -> ResponseRecord:
    """Decode a response record; tensor bytes stay views. Raises `InvalidRecord`.

    `fetch` returns the tensor bytes of a reference; without it a response by reference is an `InvalidRecord`.
    """
    view = memoryview(record)
    try:
        wire_version, flags, code, meta_length, request_id = _RESPONSE.unpack_from(view)
    except struct.error as error:
        raise InvalidRecord(f"response record of {len(view)} bytes is too short: {error}") from None
    if wire_version != WIRE_VERSION:
        raise InvalidRecord(f"response record of version {wire_version}, expected {WIRE_VERSION}")
    # most have at most a place
    meta_at = report_at = _report_at(flags) if flags & _MORE_THAN_PLACE else _PLACED_AT if flags & FLAG_PLACED else _AT
    report = None
    if flags & FLAG_REPORTED:
        report, meta_at = _read_report(view, report_at)
    meta_end = meta_at + meta_length
    if meta_end > len(view):
        raise InvalidRecord(f"response record of {len(view)} bytes is cut short, its header describes {meta_end}")
    place = _PLACE.unpack_from(view, _RESPONSE.size) if flags & FLAG_PLACED else None
    times = _TIMES.unpack_from(view, report_at - _TIMES.size) if flags & FLAG_TIMES else None
    final = bool(flags & FLAG_FINAL)
    packed = bytes(view[meta_at:meta_end])
    if flags & FLAG_ERROR:
        try:
            model, version, message, *more = msgpack.unpackb(packed)
        except Exception as error:
            raise InvalidRecord(f"response error cannot be read: {error}") from None
        if not (type(model) is type(message) is str and type(version) is int):
            raise InvalidRecord("response error has a field of another type")
        failure = CharoniaError.of(code, message)
        parameters = parameters_of(more[0]) if more and more[0] else {}
        receipt = parameters.get(RECEIPT)
        # it becomes a header
        failure.receipt = receipt if isinstance(receipt, str) and receipt.isascii() and receipt.isprintable() else ""
        return ResponseRecord(request_id, model, version, [], parameters, failure, final, place, times, report)
    meta = _RESPONSE_METAS.get(packed)
    if meta is None:
        try:
            model, version, tensors, parameters, *_ = msgpack.unpackb(packed, use_list=False)
            if not (type(model) is str and type(version) is int):
                raise InvalidRecord("response meta has a field of another type")
            meta = (model, version, places_of(tensors), parameters_of(parameters))
        except InvalidRecord:
            raise
        except Exception as error:
            raise InvalidRecord(f"response meta cannot be read: {error}") from None
        if meta_length <= MAX_CACHED_META_BYTES:
            if len(_RESPONSE_METAS) >= META_CACHE_LIMIT:
                _RESPONSE_METAS.clear()
            _RESPONSE_METAS[packed] = meta
    model, version, places, parameters = meta
    data, reference = view[meta_end:], None
    if flags & FLAG_REFERRED:
        if fetch is None:
            raise InvalidRecord("response record by reference, where none was expected")
        reference = Reference.unpack(data)
        data = memoryview(fetch(reference))
    if total_size_bytes(places) != len(data):
        raise InvalidRecord(f"response record holds {len(data)} tensor bytes, its meta describes another number")
    outputs = [Tensor(p.name, p.datatype, p.shape, data[p.offset : p.offset + p.size_bytes]) for p in places]
    bare = bool(flags & FLAG_BARE)
    # a copy: equal responses share the meta
    return ResponseRecord(
        request_id, model, version, outputs, {**parameters}, None, final, place, times, report, reference, bare
    )


def _read_report(view: memoryview, at: int) -> tuple[Report | None, int]:
    """The report at `at`, and its end."""
    try:
        begin = at + _LENGTH.size
        end = begin + int(_LENGTH.unpack_from(view, at)[0])
    except struct.error as error:
        raise InvalidRecord(f"response record of {len(view)} bytes is cut short: {error}") from None
    try:
        return Report.unpack(view[begin:end]), end
    except InvalidRecord:
        return None, end  # the answer is valid without the trace
