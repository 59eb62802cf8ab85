"""Waves: requests of one signature as one record of columns, and their answers likewise.

    wave   header | endpoint | meta of one request | client ids | deadlines | sizes | one column per input
    reply  header | meta [model, version, outputs of one request] | one column per output

A column holds the bytes of all requests, one after the other. In the place of the columns there may be a `Reference`
for each request, to all its tensors, or one to the only column; in a reply, one to all columns. Request `i` of a wave
has the id `prefix + byte(i)`: the ids of a wave are one group of the unsettled requests (docs/adr/0007) should it be
taken apart (docs/adr/0015). A wave can always be written as the requests it holds (`Wave.requests`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar

import msgpack
from msgspec import Struct

from charonia.datatypes import DataType
from charonia.errors import InvalidRecord
from charonia.tensors import Buffer, Tensor

from .records import (
    MAX_CACHED_META_BYTES,
    META_CACHE_LIMIT,
    WIRE_VERSION,
    Reference,
    TensorPlace,
    places_of,
)
from .requests import (
    FLAG_REPLY_BY_REFERENCE,
    RequestMeta,
    RequestRecord,
    carried_in,
    meta_of,
    pack_request,
    request_meta,
    unpack_request,
)

MAX_WAVE_REQUESTS = 64
"""Max requests of a wave. When a wave is burst they become one group of unsettled requests, and a whole group of up to
64 members is settled by one comparison (`docs/adr/0007`)."""
PREFIX_BYTES = 15

# version, flags, endpoint length, requests, rows of each, meta length, accepted ns, timeout us, level, signature,
# prefix
_WAVE = struct.Struct("<BBHHIIQQQQ15sx")
# version, flags, requests, meta length, inference ns, prefix
_REPLY = struct.Struct("<BBHIQ15sx")
_LENGTH = struct.Struct("<H")
_REPLY_REFERENCE = 1
"""In a reply's flags: a reference replaces its columns."""

_FLAG_IDS = 1
_FLAG_DEADLINES = 2
_FLAG_SIZES = 4
_FLAG_REFERENCES = 8
"""References replace the columns."""
_FLAG_REPLY_BY_REFERENCE = 16
"""Large answers may lie in the payload directory: the gateway reads it."""
_FLAG_COLUMN_IN_SLOT = 32
"""One reference, to a slot, replaces the only column."""

WAVE_BYTE = b"\xff"
"""Replaces the last byte of an id in the id of a wave."""

_LAST_BYTES = [bytes((last,)) for last in range(MAX_WAVE_REQUESTS)]
_ID_LENGTHS = [struct.Struct(f"<{count}H") for count in range(MAX_WAVE_REQUESTS + 1)]
"""By number of requests."""
_SMALL_BYTES = 1024
"""Columns of smaller waves are copied: that takes a third of the time of a view, and the copies are aligned."""


class Wave(Struct, gc=False):
    """One decoded wave of `count` requests; `columns` are views of `record`, copies if it is small, one for each input.

    With `references`, one for each request, there are no columns: `payloads` holds the tensors of each request once
    they are read. With `column_at` the only column lies in a slot, and is in `columns` once it is read.

    `meta` describes one request. `sizes` is set if the requests' BYTES inputs differ in length: for each input, the
    size for each request; `meta` is then the first request's. `deadlines` (wall clock ns, 0 for none) and `client_ids`
    are empty if no request has any.
    """

    prefix: bytes
    count: int
    endpoint: str
    meta: RequestMeta
    rows: int
    signature: int
    level: int
    accepted_ns: int
    timeout_us: int
    columns: tuple[Buffer, ...]
    record: Buffer
    client_ids: tuple[str, ...] = ()
    deadlines: tuple[int, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    references: tuple[Reference, ...] = ()
    payloads: tuple[Buffer, ...] = ()
    reply_by_reference: bool = False
    column_at: Reference | None = None

    flags: ClassVar[int] = 0
    """The flags of its requests: none is a job, journalled, traced, or made by a model."""
    is_job: ClassVar[bool] = False
    lineage: ClassVar[None] = None

    @property
    def id(self) -> bytes:
        """The key of the wave among requests, which are identified by their ids; no request has it."""
        return self.prefix + WAVE_BYTE

    def ids(self) -> list[bytes]:
        """The ids of its requests, in order."""
        prefix = self.prefix
        return [prefix + last for last in _LAST_BYTES[: self.count]]

    def request_bytes(self) -> list[int]:
        """The tensor bytes of each request."""
        if not self.sizes:
            return [self.meta.size_bytes] * self.count
        return [sum(sizes) for sizes in zip(*self.sizes, strict=True)]

    @property
    def size_bytes(self) -> int:
        """The tensor bytes of all its requests."""
        return sum(map(sum, self.sizes)) if self.sizes else self.meta.size_bytes * self.count

    @property
    def lacks_tensors(self) -> bool:
        """Whether its tensors lie elsewhere, and were not read or are gone."""
        if self.column_at is not None:
            return not self.columns
        return bool(self.references) and not (self.payloads and all(self.payloads))

    def release(self) -> None:
        """Drop the views of tensors that lie elsewhere: their owner needs the memory."""
        self.payloads = ()
        if self.column_at is not None:
            self.columns = ()

    def parts(self, number: int) -> list[Buffer]:
        """The bytes of one input for all requests, in order, in one part or several."""
        if not self.references:
            return [self.columns[number]]
        place = self.meta.inputs[number]
        return [payload[place.offset : place.offset + place.size_bytes] for payload in self.payloads]

    def requests(self) -> list[RequestRecord]:
        """The requests as records of their own."""
        endpoint = self.endpoint.encode()
        flags = FLAG_REPLY_BY_REFERENCE if self.reply_by_reference else 0
        found: list[RequestRecord] = []
        for index, (request_id, parts) in enumerate(zip(self.ids(), self._parts_of_requests(), strict=True)):
            reference = self._reference_of(index)
            record = pack_request(
                request_id,
                endpoint,
                self.client_ids[index].encode() if self.client_ids else b"",
                self.meta_at(index),
                parts if reference is None else (),
                rows=self.rows,
                signature=self.signature,
                level=self.level,
                accepted_ns=self.accepted_ns,
                deadline_ns=self.deadlines[index] if self.deadlines else 0,
                timeout_us=self.timeout_us,
                flags=flags,
                reference=reference,
            )
            request = unpack_request(record)
            if reference is not None and any(parts):
                (request.data,) = parts
            found.append(request)
        return found

    def _reference_of(self, index: int) -> Reference | None:
        """The reference to the tensors of one request; None if they are in the wave's record."""
        if self.references:
            return self.references[index]
        if self.column_at is None:
            return None
        size = self.meta.size_bytes
        return self.column_at.part(index * size, size)

    def _parts_of_requests(self) -> list[list[Buffer]]:
        """For each request the bytes of its inputs; of tensors that lie elsewhere all in one part, none if not read."""
        if self.references:
            return [[payload] for payload in self.payloads] or [[] for _ in range(self.count)]
        is_read = self.column_at is None or bool(self.columns)
        columns = [self._cut(number) for number in range(len(self.meta.inputs) if is_read else 0)]
        return [[column[index] for column in columns] for index in range(self.count)]

    def _cut(self, number: int) -> list[Buffer]:
        """The part of each request in the column of an input."""
        column, start = memoryview(self.columns[number]), 0
        sizes = self.sizes[number] if self.sizes else (self.meta.inputs[number].size_bytes,) * self.count
        found: list[Buffer] = []
        for size in sizes:
            found.append(column[start : start + size])
            start += size
        return found

    def meta_at(self, index: int) -> RequestMeta:
        """The meta of one request."""
        meta = self.meta
        if not self.sizes:
            return meta
        sizes = [sizes[index] for sizes in self.sizes]
        if all(place.size_bytes == size for place, size in zip(meta.inputs, sizes, strict=True)):
            return meta
        tensors = [
            Tensor(place.name, place.datatype, place.shape, bytes(size))
            for place, size in zip(meta.inputs, sizes, strict=True)
        ]
        own = request_meta(meta.version, meta.content_hash, tensors, meta.outputs, meta.parameters)
        return own.of_tenant(meta.tenant)


def wave_head(
    prefix: bytes,
    count: int,
    endpoint: bytes,
    meta: RequestMeta,
    *,
    rows: int,
    signature: int,
    level: int,
    accepted_ns: int,
    timeout_us: int = 0,
    client_ids: Sequence[bytes] = (),
    deadlines: Sequence[int] = (),
    sizes: Sequence[Sequence[int]] = (),
    references: Sequence[Reference] = (),
    reply_by_reference: bool = False,
    column_at: Reference | None = None,
) -> bytes:
    """The part of a wave before its columns, which follow: for each input the bytes of all requests.

    With `references` to the tensors of each request, or the slot of the only column in `column_at`, this is the whole
    wave.
    """
    flags = _FLAG_REPLY_BY_REFERENCE if reply_by_reference else 0
    more = b""
    if client_ids:
        flags |= _FLAG_IDS
        more = b"".join((_ID_LENGTHS[count].pack(*map(len, client_ids)), *client_ids))
    if deadlines:
        flags |= _FLAG_DEADLINES
        more += struct.pack(f"<{count}Q", *deadlines)
    if sizes:
        flags |= _FLAG_SIZES
        more += b"".join([struct.pack(f"<{count}I", *of_input) for of_input in sizes])
    if references or column_at is not None:
        flags |= _FLAG_REFERENCES if column_at is None else _FLAG_COLUMN_IN_SLOT
        for reference in references if column_at is None else [column_at]:
            where = reference.pack()
            more += _LENGTH.pack(len(where)) + where
    packed = meta.packed
    sizes_of_parts = len(endpoint), count, rows, len(packed)
    header = _WAVE.pack(WIRE_VERSION, flags, *sizes_of_parts, accepted_ns, timeout_us, level, signature, prefix)
    return b"".join((header, endpoint, packed, more))


def unpack_wave(record: Buffer) -> Wave:
    """Decode a wave; the columns stay views unless it is small. A record that is not `bytes` is copied once. Raises
    `InvalidRecord`.
    """
    text = record if type(record) is bytes else bytes(record)
    size = len(text)
    try:
        (
            wire_version,
            flags,
            endpoint_length,
            count,
            rows,
            meta_length,
            accepted_ns,
            timeout_us,
            level,
            signature,
            prefix,
        ) = _WAVE.unpack_from(text)
    except struct.error as error:
        raise InvalidRecord(f"wave of {size} bytes is too short: {error}") from None
    if wire_version != WIRE_VERSION:
        raise InvalidRecord(f"wave of version {wire_version}, expected {WIRE_VERSION}")
    if not 0 < count <= MAX_WAVE_REQUESTS:
        raise InvalidRecord(f"wave of {count} requests, expected 1 to {MAX_WAVE_REQUESTS}")
    endpoint_end = _WAVE.size + endpoint_length
    at = endpoint_end + meta_length
    if at > size:
        raise InvalidRecord(f"wave of {size} bytes is cut short, its header describes {at}")
    meta = meta_of(text[endpoint_end:at])
    client_ids: tuple[str, ...] = ()
    deadlines: tuple[int, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    try:
        endpoint = text[_WAVE.size : endpoint_end].decode()
        if flags & _FLAG_IDS:
            lengths = _ID_LENGTHS[count].unpack_from(text, at)
            at += 2 * count
            names = []
            for length in lengths:
                names.append(text[at : at + length].decode())
                at += length
            client_ids = tuple(names)
        if flags & _FLAG_DEADLINES:
            deadlines = struct.unpack_from(f"<{count}Q", text, at)
            at += 8 * count
        if flags & _FLAG_SIZES:
            every = []
            for _ in meta.inputs:
                every.append(struct.unpack_from(f"<{count}I", text, at))
                at += 4 * count
            sizes = tuple(every)
    except (UnicodeDecodeError, struct.error) as error:
        raise InvalidRecord(f"wave cannot be read: {error}") from None
    reply_by_reference = bool(flags & _FLAG_REPLY_BY_REFERENCE)
    if flags & _FLAG_REFERENCES:
        return Wave(
            *(prefix, count, endpoint, meta, rows, signature, level, accepted_ns, timeout_us),
            *((), record, client_ids, deadlines, (), _references_in(memoryview(text), at, count, meta.size_bytes), ()),
            reply_by_reference,
        )
    if flags & _FLAG_COLUMN_IN_SLOT:
        (column_at,) = _references_in(memoryview(text), at, 1, count * meta.size_bytes)
        if len(meta.inputs) != 1 or sizes or not meta.size_bytes or not column_at.is_in_slot:
            raise InvalidRecord(f"a wave of {len(meta.inputs)} inputs refers to '{column_at.name}', expected a slot")
        return Wave(
            *(prefix, count, endpoint, meta, rows, signature, level, accepted_ns, timeout_us),
            *((), record, client_ids, deadlines, (), (), (), reply_by_reference, column_at),
        )
    source: Buffer = text if size <= _SMALL_BYTES else memoryview(record)
    columns: list[Buffer] = []
    for number, place in enumerate(meta.inputs):
        end = at + (sum(sizes[number]) if sizes else count * place.size_bytes)
        columns.append(source[at:end])
        at = end
    if at != size:
        raise InvalidRecord(f"wave holds {size} bytes, its header describes {at}")
    return Wave(
        prefix, count, endpoint, meta, rows, signature, level, accepted_ns, timeout_us,
        tuple(columns), record, client_ids, deadlines, sizes, (), (), reply_by_reference,
    )  # fmt: skip


def _references_in(view: memoryview, at: int, count: int, size_bytes: int) -> tuple[Reference, ...]:
    """References to `count` payloads of equal size, which end a record. Raises `InvalidRecord`."""
    found = []
    for _ in range(count):
        start = at + _LENGTH.size
        if start > len(view):
            raise InvalidRecord(f"wave of {len(view)} bytes is cut short in its references")
        at = start + _LENGTH.unpack_from(view, at)[0]
        reference = Reference.unpack(view[start:at])
        if reference.size_bytes != size_bytes:
            raise InvalidRecord(f"a wave refers to {reference.size_bytes} bytes, expected {size_bytes}")
        found.append(reference)
    if at != len(view):
        raise InvalidRecord(f"wave holds {len(view)} bytes, its references end at {at}")
    return tuple(found)


def _requests_of(record: Buffer | Wave) -> list[RequestRecord]:
    return _whole(record)[0].requests()


def _whole(record: Buffer | Wave) -> tuple[Wave]:
    # a sender in the same process passes decoded waves
    return (record if isinstance(record, Wave) else unpack_wave(record),)


requests_in: Callable[[Sequence[Buffer]], list[RequestRecord]] = partial(carried_in, wave=_requests_of)
"""The requests in an entry, those of waves included, in order. Raises `InvalidRecord` for any of them."""

work_in: Callable[[Sequence[Buffer]], list[RequestRecord | Wave]] = partial(carried_in, wave=_whole)
"""The content of an entry, in order, waves as such. Raises `InvalidRecord` for any part."""


OutputPlaces = tuple[tuple[str, DataType, tuple[int, ...], int], ...]
"""Outputs of one request: name, datatype, shape, bytes."""


class WaveReply(Struct, gc=False):
    """The answers to all requests of a wave: `columns[k]` holds output `outputs[k]` of every request, in order.

    With a `reference` the columns are there, and `columns` is empty until they are read (`read_columns`). `infer_ns`
    is the model's time for the execution of the wave.
    """

    prefix: bytes
    count: int
    model: str
    version: int
    outputs: tuple[TensorPlace, ...]
    columns: tuple[Buffer, ...]
    infer_ns: int
    reference: Reference | None = None

    def read_columns(self, data: Buffer) -> None:
        """Set the columns from the bytes at `reference`, whose size `unpack_wave_reply` has checked."""
        self.columns = _columns_in(data, self.outputs, self.count)


@lru_cache(maxsize=META_CACHE_LIMIT)
def reply_meta(model: str, version: int, outputs: OutputPlaces) -> bytes:
    """The meta of replies whose requests have these outputs."""
    return bytes(msgpack.packb([model, version, [[name, t.number, shape, size] for name, t, shape, size in outputs]]))


def pack_wave_reply(
    prefix: bytes,
    count: int,
    meta: bytes,
    columns: Sequence[Buffer],
    infer_ns: int,
    reference: Reference | None = None,
) -> bytes:
    """The answers to a wave; `meta` is `reply_meta`'s, `columns` the bytes of each output of all requests.

    With a `reference` the bytes are there already, and `columns` is ignored.
    """
    if reference is None:
        return b"".join((_REPLY.pack(WIRE_VERSION, 0, count, len(meta), infer_ns, prefix), meta, *columns))
    head = _REPLY.pack(WIRE_VERSION, _REPLY_REFERENCE, count, len(meta), infer_ns, prefix)
    return b"".join((head, meta, reference.pack()))


def wave_reply_bytes(record: bytes) -> int:
    """The tensor bytes of a wave's answers, of all its requests together."""
    _, flags, _, meta_length, _, _ = _REPLY.unpack_from(record)
    at = _REPLY.size + meta_length
    return Reference.unpack(record[at:]).size_bytes if flags & _REPLY_REFERENCE else len(record) - at


def unpack_wave_reply(record: Buffer) -> WaveReply:
    """Decode a wave's answers. Raises `InvalidRecord`."""
    if type(record) is not bytes:
        record = bytes(record)
    try:
        wire_version, flags, count, meta_length, infer_ns, prefix = _REPLY.unpack_from(record)
    except struct.error as error:
        raise InvalidRecord(f"reply of {len(record)} bytes to a wave is too short: {error}") from None
    if wire_version != WIRE_VERSION or not 0 < count <= MAX_WAVE_REQUESTS:
        raise InvalidRecord(f"reply of version {wire_version} to a wave of {count} requests cannot be read")
    at = _REPLY.size + meta_length
    packed = record[_REPLY.size : at]
    known = _REPLY_METAS.get(packed)
    if known is None:
        known = _read_reply_meta(packed)
        if len(packed) <= MAX_CACHED_META_BYTES:
            if len(_REPLY_METAS) >= META_CACHE_LIMIT:
                _REPLY_METAS.clear()
            _REPLY_METAS[packed] = known
    model, version, outputs, size_bytes = known
    if flags & _REPLY_REFERENCE:
        reference = Reference.unpack(record[at:])
        if reference.size_bytes != count * size_bytes:
            raise InvalidRecord(f"reply refers to {reference.size_bytes} bytes, expected {count} times {size_bytes}")
        return WaveReply(prefix, count, model, version, outputs, (), infer_ns, reference)
    if len(record) - at != count * size_bytes:
        raise InvalidRecord(f"reply holds {len(record) - at} tensor bytes, expected {count} times {size_bytes}")
    columns = (record[at:],) if len(outputs) == 1 else _columns_in(record[at:], outputs, count)
    return WaveReply(prefix, count, model, version, outputs, columns, infer_ns)


def _columns_in(data: Buffer, outputs: tuple[TensorPlace, ...], count: int) -> tuple[Buffer, ...]:
    """Split consecutive columns into one for each output."""
    if len(outputs) == 1:
        return (data,)
    parts = []
    at = 0
    for place in outputs:
        end = at + count * place.size_bytes
        parts.append(data[at:end])
        at = end
    return tuple(parts)


_REPLY_METAS: dict[bytes, tuple[str, int, tuple[TensorPlace, ...], int]] = {}


def _read_reply_meta(packed: bytes) -> tuple[str, int, tuple[TensorPlace, ...], int]:
    try:
        found: tuple[Any, ...] = msgpack.unpackb(packed, use_list=False)
        model, version, tensors, *_ = found
        if not (type(model) is str and type(version) is int):
            raise InvalidRecord("the meta of a wave's reply has a field of another type")
        outputs = places_of(tensors)
        return model, version, outputs, sum(place.size_bytes for place in outputs)
    except InvalidRecord:
        raise
    except Exception as error:
        raise InvalidRecord(f"the meta of a wave's reply cannot be read: {error}") from None
