"""Bytes of everything that travels in the log: request, batch and response records (design page, section 2).

A record is: fixed struct header + short strings + msgpack meta + raw tensor bytes. Meta describes the tensors and
repeats from request to request, so packed and unpacked metas are cached by their content; what differs each time
(ids, times) is in the header. Decoding makes views and copies nothing. Unknown record versions and lengths that do not
add up raise `InvalidRecord`: such an entry is quarantined by its reader, never a crash (faults H27).

    request   header | endpoint | client id | meta [version, content hash, inputs, outputs, parameters] | tensor bytes
    batch     header: msgpack of one dispatch; in the entry the request records follow as they are
    response  header | meta [model, version, outputs, parameters] or error text | tensor bytes

All integers little-endian; times are wall clock ns since the epoch. Fields of an entry are named `h` (batch header),
`r` (one record) and `m` (many: their number, their lengths, then themselves; each field costs the log as much as a
small record). Layout changes need a new `WIRE_VERSION` and keep the old one readable (tests/golden).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from .datatypes import DataType
from .errors import CharoniaError
from .errors import InvalidRecord as InvalidRecord
from .inference import Parameters
from .tensors import Buffer, Tensor

WIRE_VERSION = 1
FIELD_HEADER = b"h"
FIELD_RECORD = b"r"
FIELD_RECORDS = b"m"

# version, flags, endpoint length, client id length, meta length, rows, id, accepted ns, deadline ns, timeout us,
# level, signature
_REQUEST = struct.Struct("<BBHHxxII16sQQQQQ")
# version, flags, error code, reserved, meta length, id
_RESPONSE = struct.Struct("<BBBxI16s")

_LENGTH = struct.Struct("<I")

FLAG_ERROR = 1
FLAG_FINAL = 2

_META_CACHE_LIMIT = 4096
"""Distinct tensor signatures a process remembers; past it the cache starts anew: hostile variety costs only time."""

MAX_CACHED_META_BYTES = 4096
"""Longer metas (large parameters) are decoded each time, so that the caches cannot be filled with megabytes."""

MAX_CLIENT_ID_BYTES = 65535


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor of a record lies: `offset` counts from the start of the record's tensor bytes."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """What requests of one signature share. `packed` is its wire form; `rows` its batch size (1 without batching).

    `signature` is equal for requests that may share a batch: same version, same input names, same shapes beyond the
    batch dimension (S5).
    """

    version: int
    content_hash: str
    inputs: tuple[TensorPlace, ...]
    outputs: tuple[str, ...]
    parameters: Parameters
    packed: bytes


@dataclass(slots=True)
class RequestRecord:
    """One decoded request; `data` is the view of all tensor bytes, `record` the whole, to be handed on as it is."""

    id: bytes
    endpoint: str
    client_id: str
    meta: RequestMeta
    rows: int
    signature: int
    level: int
    accepted_ns: int
    deadline_ns: int
    timeout_us: int
    data: memoryview
    record: Buffer

    def inputs(self) -> list[Tensor]:
        """The input tensors as views of the record."""
        data = self.data
        return [Tensor(p.name, p.datatype, p.shape, data[p.offset : p.offset + p.size_bytes]) for p in self.meta.inputs]


@dataclass(slots=True)
class ResponseRecord:
    """One decoded response to request `id` (16 bytes). `error` set means failed, then `outputs` is empty."""

    id: bytes
    model: str
    version: int
    outputs: list[Tensor]
    parameters: Parameters
    error: CharoniaError | None
    final: bool = True


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """One dispatch decision as an executor receives it. The request records follow in the same entry, in order.

    `attempts[i]` belongs to the i-th record. `report_to` is the stream that gets `BatchFinished`. With `via_owner` the
    executor sends the response records inside that fact instead of to the endpoints (preserve_ordering, S6).
    """

    batch_id: str
    model: str
    version: int
    content_hash: str
    token: int
    attempts: tuple[int, ...]
    report_to: bytes
    via_owner: bool = False

    def pack(self) -> bytes:
        return bytes(
            msgpack.packb(
                [
                    WIRE_VERSION,
                    self.batch_id,
                    self.model,
                    self.version,
                    self.content_hash,
                    self.token,
                    self.attempts,
                    self.report_to,
                    self.via_owner,
                ]
            )
        )

    @staticmethod
    def unpack(data: Buffer) -> BatchHeader:
        """Raises `InvalidRecord`."""
        try:
            version, batch_id, model, model_version, content_hash, token, attempts, report_to, via_owner, *_ = (
                msgpack.unpackb(data, use_list=False)
            )
        except Exception as error:
            raise InvalidRecord(f"batch header cannot be read: {error}") from None
        if version != WIRE_VERSION:
            raise InvalidRecord(f"batch header of version {version!r}, expected {WIRE_VERSION}")
        if not (
            type(batch_id) is type(model) is type(content_hash) is str
            and type(model_version) is type(token) is int
            and type(attempts) is tuple
            and all(type(attempt) is int for attempt in attempts)
            and type(report_to) is bytes
            and type(via_owner) is bool
        ):
            raise InvalidRecord("batch header has a field of another type")
        return BatchHeader(batch_id, model, model_version, content_hash, token, attempts, report_to, via_owner)


# -- entries -----------------------------------------------------------------------------------------------------------


def record_fields(records: Sequence[Buffer]) -> list[Buffer]:
    """The entry fields that carry these records; several share one field."""
    if len(records) == 1:
        return [FIELD_RECORD, records[0]]
    lengths = struct.pack(f"<{len(records) + 1}I", len(records), *map(len, records))
    return [FIELD_RECORDS, b"".join((lengths, *records))]


def records_of(fields: Sequence[Buffer]) -> list[Buffer]:
    """The records an entry carries, in order, as views; other fields are skipped. Raises `InvalidRecord`."""
    records: list[Buffer] = []
    for at in range(0, len(fields) - 1, 2):
        name = fields[at]
        if name == FIELD_RECORD:
            records.append(fields[at + 1])
        elif name == FIELD_RECORDS:
            _split(memoryview(fields[at + 1]), records)
    return records


def _split(view: memoryview, records: list[Buffer]) -> None:
    size = len(view)
    count = _LENGTH.unpack_from(view)[0] if size >= 4 else -1
    start = 4 * (count + 1)
    if not 0 <= start <= size or count < 0:
        raise InvalidRecord(f"{size} bytes cannot hold the lengths of {count} records")
    lengths = struct.unpack_from(f"<{count}I", view, 4)
    if start + sum(lengths) != size:
        raise InvalidRecord(f"{count} records fill {start + sum(lengths)} bytes, the field has {size}")
    for length in lengths:
        records.append(view[start : start + length])
        start += length


# -- requests ----------------------------------------------------------------------------------------------------------


def request_meta(
    version: int,
    content_hash: str,
    inputs: Sequence[Tensor],
    outputs: tuple[str, ...],
    parameters: Parameters,
) -> RequestMeta:
    """The meta of a request with these tensors. Callers cache it by their own key; building it costs microseconds."""
    packed = msgpack.packb(
        [
            version,
            content_hash,
            [[t.name, t.datatype.number, t.shape, len(t.data)] for t in inputs],
            outputs,
            parameters or None,
        ]
    )
    return _unpack_request_meta(bytes(packed))


def batch_signature(version: int, inputs: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """64 bits over version, input names and the shapes given (without batch dimensions and ragged inputs)."""
    text = repr((version, sorted(inputs))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def pack_request(
    request_id: bytes,
    endpoint: bytes,
    client_id: bytes,
    meta: RequestMeta,
    data: Sequence[Buffer],
    *,
    rows: int,
    signature: int,
    level: int,
    accepted_ns: int,
    deadline_ns: int = 0,
    timeout_us: int = 0,
) -> bytes:
    """The record of one request; `data` holds each input's raw bytes in the order of `meta.inputs`."""
    packed = meta.packed
    header = _REQUEST.pack(
        WIRE_VERSION,
        0,
        len(endpoint),
        len(client_id),
        len(packed),
        rows,
        request_id,
        accepted_ns,
        deadline_ns,
        timeout_us,
        level,
        signature,
    )
    return b"".join((header, endpoint, client_id, packed, *data))


def unpack_request(record: Buffer) -> RequestRecord:
    """Decode a request record; tensor bytes stay views. Raises `InvalidRecord`."""
    view = memoryview(record)
    try:
        (
            wire_version,
            _flags,
            endpoint_length,
            client_id_length,
            meta_length,
            rows,
            request_id,
            accepted_ns,
            deadline_ns,
            timeout_us,
            level,
            signature,
        ) = _REQUEST.unpack_from(view)
    except struct.error as error:
        raise InvalidRecord(f"request record of {len(view)} bytes is too short: {error}") from None
    if wire_version != WIRE_VERSION:
        raise InvalidRecord(f"request record of version {wire_version}, expected {WIRE_VERSION}")
    at = _REQUEST.size
    endpoint_end = at + endpoint_length
    client_end = endpoint_end + client_id_length
    meta_end = client_end + meta_length
    if meta_end > len(view):
        raise InvalidRecord(f"request record of {len(view)} bytes is cut short, its header describes {meta_end}")
    # slices of bytes, the usual case, cost less than those of a view
    raw = record if type(record) is bytes else view
    packed = bytes(raw[client_end:meta_end])
    meta = _REQUEST_METAS.get(packed)
    if meta is None:
        meta = _unpack_request_meta(packed)
        if meta_length <= MAX_CACHED_META_BYTES:
            if len(_REQUEST_METAS) >= _META_CACHE_LIMIT:
                _REQUEST_METAS.clear()
            _REQUEST_METAS[packed] = meta
    data = view[meta_end:]
    if _total_size_bytes(meta.inputs) != len(data):
        raise InvalidRecord(f"request record holds {len(data)} tensor bytes, its meta describes another number")
    try:
        endpoint = str(raw[at:endpoint_end], "utf-8")
        client_id = str(raw[endpoint_end:client_end], "utf-8") if client_id_length else ""
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"request record names cannot be read: {error}") from None
    return RequestRecord(
        request_id,
        endpoint,
        client_id,
        meta,
        rows,
        signature,
        level,
        accepted_ns,
        deadline_ns,
        timeout_us,
        data,
        record,
    )


_REQUEST_METAS: dict[bytes, RequestMeta] = {}


def _unpack_request_meta(packed: bytes) -> RequestMeta:
    try:
        version, content_hash, inputs, outputs, parameters, *_ = msgpack.unpackb(packed, use_list=False)
        if not (
            type(version) is int
            and type(content_hash) is str
            and type(outputs) is tuple
            and all(type(name) is str for name in outputs)
        ):
            raise InvalidRecord("request meta has a field of another type")
        return RequestMeta(version, content_hash, _places(inputs), outputs, _parameters(parameters), packed)
    except InvalidRecord:
        raise
    except Exception as error:
        raise InvalidRecord(f"request meta cannot be read: {error}") from None


def _places(tensors: Any) -> tuple[TensorPlace, ...]:
    places = []
    offset = 0
    for name, number, shape, size in tensors:
        if not (
            type(name) is str
            and type(shape) is tuple
            and all(type(dim) is int and dim >= 0 for dim in shape)
            and type(size) is int
            and size >= 0
        ):
            raise InvalidRecord("a tensor's description has a field of another type")
        places.append(TensorPlace(name, DataType.of_number(number), shape, offset, size))
        offset += size
    return tuple(places)


def _total_size_bytes(places: tuple[TensorPlace, ...]) -> int:
    return places[-1].offset + places[-1].size_bytes if places else 0


def _parameters(parameters: Any) -> Parameters:
    if parameters is None:
        return {}
    if type(parameters) is not dict or not all(
        type(key) is str and type(value) in (str, int, bool, float) for key, value in parameters.items()
    ):
        raise InvalidRecord("parameters have a key or value of another type")
    return parameters


# -- responses ---------------------------------------------------------------------------------------------------------


def pack_response(
    request_id: bytes,
    model: str,
    version: int,
    outputs: Sequence[Tensor],
    parameters: Parameters,
    *,
    final: bool = True,
) -> bytes:
    """The record of one successful response."""
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
            if len(_PACKED_RESPONSE_METAS) >= _META_CACHE_LIMIT:
                _PACKED_RESPONSE_METAS.clear()
            _PACKED_RESPONSE_METAS[key] = packed
    header = _RESPONSE.pack(WIRE_VERSION, FLAG_FINAL if final else 0, 0, len(packed), request_id)
    return b"".join((header, packed, *[t.data for t in outputs]))


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """What answers of equal names, types and shapes share: a record is `head + request id + meta + tensor bytes`."""

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
        if len(_RESPONSE_TEMPLATES) >= _META_CACHE_LIMIT:
            _RESPONSE_TEMPLATES.clear()
        _RESPONSE_TEMPLATES[key] = template
    return template


_RESPONSE_TEMPLATES: dict[Any, ResponseTemplate] = {}


def pack_failure(request_id: bytes, model: str, version: int, error: CharoniaError) -> bytes:
    """The record of a failed request; its error keeps code and message."""
    packed = bytes(msgpack.packb([model, version, error.message, None]))
    return _RESPONSE.pack(WIRE_VERSION, FLAG_FINAL | FLAG_ERROR, int(error.code), len(packed), request_id) + packed


_PACKED_RESPONSE_METAS: dict[Any, bytes] = {}
_RESPONSE_METAS: dict[bytes, tuple[str, int, tuple[TensorPlace, ...], Parameters]] = {}


def unpack_response(record: Buffer) -> ResponseRecord:
    """Decode a response record; tensor bytes stay views. Raises `InvalidRecord`."""
    view = memoryview(record)
    try:
        wire_version, flags, code, meta_length, request_id = _RESPONSE.unpack_from(view)
    except struct.error as error:
        raise InvalidRecord(f"response record of {len(view)} bytes is too short: {error}") from None
    if wire_version != WIRE_VERSION:
        raise InvalidRecord(f"response record of version {wire_version}, expected {WIRE_VERSION}")
    meta_end = _RESPONSE.size + meta_length
    if meta_end > len(view):
        raise InvalidRecord(f"response record of {len(view)} bytes is cut short, its header describes {meta_end}")
    packed = bytes(view[_RESPONSE.size : meta_end])
    if flags & FLAG_ERROR:
        try:
            model, version, message, *_ = msgpack.unpackb(packed)
        except Exception as error:
            raise InvalidRecord(f"response error cannot be read: {error}") from None
        if not (type(model) is type(message) is str and type(version) is int):
            raise InvalidRecord("response error has a field of another type")
        return ResponseRecord(request_id, model, version, [], {}, CharoniaError.of(code, message))
    meta = _RESPONSE_METAS.get(packed)
    if meta is None:
        try:
            model, version, tensors, parameters, *_ = msgpack.unpackb(packed, use_list=False)
            if not (type(model) is str and type(version) is int):
                raise InvalidRecord("response meta has a field of another type")
            meta = (model, version, _places(tensors), _parameters(parameters))
        except InvalidRecord:
            raise
        except Exception as error:
            raise InvalidRecord(f"response meta cannot be read: {error}") from None
        if meta_length <= MAX_CACHED_META_BYTES:
            if len(_RESPONSE_METAS) >= _META_CACHE_LIMIT:
                _RESPONSE_METAS.clear()
            _RESPONSE_METAS[packed] = meta
    model, version, places, parameters = meta
    data = view[meta_end:]
    if _total_size_bytes(places) != len(data):
        raise InvalidRecord(f"response record holds {len(data)} tensor bytes, its meta describes another number")
    outputs = [Tensor(p.name, p.datatype, p.shape, data[p.offset : p.offset + p.size_bytes]) for p in places]
    # a copy: the meta is shared by all responses that look the same
    return ResponseRecord(request_id, model, version, outputs, {**parameters}, None, bool(flags & FLAG_FINAL))
