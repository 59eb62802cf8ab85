"""Request records: header | endpoint | client id | sequence | lineage | trace context | window | meta | tensor bytes.

Meta is [version, content hash, inputs, outputs, parameters], and for a prompt that was tokenised its route. Where the
tenant is known, [None, tenant] come before the route.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
from msgspec import Struct

from charonia.errors import InvalidRecord
from charonia.generation.prompt_keys import PromptRoute
from charonia.inference import RECEIPT, Parameters
from charonia.tensors import Buffer, Tensor
from charonia.traces.contexts import Context, Traced

from .lineages import Lineage
from .records import (
    FIELD_RECORD,
    FIELD_RECORDS,
    FIELD_WAVE,
    MAX_CACHED_META_BYTES,
    META_CACHE_LIMIT,
    WIRE_VERSION,
    Reference,
    TensorPlace,
    lengths_of,
    parameters_of,
    places_of,
    total_size_bytes,
)
from .sequence_fields import SequenceMark

# version, flags, endpoint length, client id length, sequence length, meta length, rows, id, accepted ns, deadline ns,
# timeout us, level, signature
_REQUEST = struct.Struct("<BBHHHII16sQQQQQ")
_ALIKE_BYTES = 16
"""The part of the header before the rows; the rest differs between requests."""
_NUMBERS = struct.Struct("<QQQQ")
"""The end of the header, from the deadline on."""
_WINDOW = struct.Struct("<I")
_ROUTE_SIZE = struct.Struct("<H")
_SMALL_BYTES = 1024
"""Records of at most this size are copied out of their entry."""

FLAG_JOB = 1
"""The request is a job: it has its own record in the log, which its settlement ends (`charonia.facts.jobs`)."""
FLAG_JOURNALLED = 2
"""The request's events are written to its model's journal (`--journal`)."""
FLAG_REFERENCE = 4
"""A `Reference` replaces the tensor bytes."""
FLAG_REPLY_BY_REFERENCE = 8
"""The caller can read the executors' payload directory: large answers may be passed there."""
FLAG_LINEAGE = 16
"""The record has a `Lineage`."""
FLAG_TIMED = 32
"""The caller wants the duration of the execution (S56)."""
FLAG_TRACED = 64
"""The record has a trace context: the request's events are reported (N1)."""
FLAG_WINDOW = 128
"""The record has a response window: the reader of the responses asks for more of them (S55)."""


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """The common part of requests alike. `packed` is its wire form without `prompt`."""

    version: int
    content_hash: str
    inputs: tuple[TensorPlace, ...]
    outputs: tuple[str, ...]
    parameters: Parameters
    packed: bytes
    prompt: PromptRoute | None = None
    """Of this one request, for placement."""
    tenant: str = ""
    """On whose account it runs (`charonia.facts.usage`), "" for no tenant."""
    size_bytes: int = field(init=False)
    """Tensor bytes of one request."""
    wants_receipt: bool = field(init=False)
    """Whether the answer says what the request has used (ADR 0055)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_bytes", total_size_bytes(self.inputs))
        object.__setattr__(self, "wants_receipt", self.parameters.get(RECEIPT) is True)

    def of_tenant(self, tenant: str) -> RequestMeta:
        """The same meta of a tenant's requests. Equal metas are made once: decoding them again is a look-up."""
        if not tenant or self.tenant:
            return self
        return meta_of(b"".join((_SEVEN, self.packed[1:], _NOTHING, msgpack.packb(tenant))))


class RequestRecord(Struct, gc=False):
    """One decoded request; `data` are all its tensor bytes, `record` is the whole record, for forwarding.

    Both are views of the entry, or copies if they are small.
    """

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
    data: Buffer
    record: Buffer
    flags: int = 0
    reference: Reference | None = None
    """The location of the tensor bytes; `data` is empty until they are fetched."""
    sequence: SequenceMark | None = None
    lineage: Lineage | None = None
    trace: Traced | None = None
    """Collects the report of a traced request."""
    window: int = 0
    """Number of responses wanted before more are requested (`charonia.facts.events.ResponsesWanted`); 0 for all."""

    @property
    def is_job(self) -> bool:
        return bool(self.flags & FLAG_JOB)

    @property
    def journalled(self) -> bool:
        return bool(self.flags & FLAG_JOURNALLED)

    def inputs(self) -> list[Tensor]:
        """The input tensors, parts of `data`."""
        data = self.data
        return [Tensor(p.name, p.datatype, p.shape, data[p.offset : p.offset + p.size_bytes]) for p in self.meta.inputs]


def request_meta(
    version: int,
    content_hash: str,
    inputs: Sequence[Tensor],
    outputs: tuple[str, ...],
    parameters: Parameters,
) -> RequestMeta:
    """The meta of a request with these tensors. Callers cache it by their own key: building it takes microseconds."""
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
    """64 bits over version, input names and the given shapes (without batch dimensions and ragged inputs): equal for
    requests that can share a batch (S5).
    """
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
    flags: int = 0,
    reference: Reference | None = None,
    sequence: SequenceMark | None = None,
    lineage: Lineage | None = None,
    trace: Context | None = None,
    window: int = 0,
    prompt: PromptRoute | None = None,
    join: Callable[[Sequence[Buffer]], Buffer] = b"".join,
) -> Buffer:
    """The record of one request; `data` holds each input's raw bytes in the order of `meta.inputs`.

    With a `reference` the bytes are there already, and `data` is ignored. What `join` makes is returned: for what is
    large, in a thread, `charonia.tensors.joined`, whose memoryview the log takes as well.
    """
    packed = meta.packed if prompt is None else _with_prompt(meta.packed, prompt)
    if reference is not None:
        flags |= FLAG_REFERENCE
        data = (reference.pack(),)
    mark = b"" if sequence is None else sequence.pack()
    descent = b""
    if lineage is not None:
        flags |= FLAG_LINEAGE
        descent = lineage.pack()
    if trace is not None:
        flags |= FLAG_TRACED
        descent += trace.pack()
    if window:
        flags |= FLAG_WINDOW
        descent += _WINDOW.pack(window)
    header = _REQUEST.pack(
        WIRE_VERSION,
        flags,
        len(endpoint),
        len(client_id),
        len(mark),
        len(packed),
        rows,
        request_id,
        accepted_ns,
        deadline_ns,
        timeout_us,
        level,
        signature,
    )
    return join((header, endpoint, client_id, mark, descent, packed, *data))


def unpack_request(record: Buffer) -> RequestRecord:
    """Decode a request record; tensor bytes stay views. Raises `InvalidRecord`."""
    # a long function, because calls cost more than lines, and every request outside waves passes it
    view = record if type(record) is memoryview else memoryview(record)
    try:
        (
            wire_version,
            flags,
            endpoint_length,
            client_id_length,
            mark_length,
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
    mark_end = meta_at = client_end + mark_length
    lineage, trace, window = None, None, 0
    if flags & _MORE:
        lineage, trace, window, meta_at = _more(view, flags, mark_end)
    meta_end = meta_at + meta_length
    if meta_end > len(view):
        raise InvalidRecord(f"request record of {len(view)} bytes is cut short, its header describes {meta_end}")
    # slices of bytes, the usual case, cost less than slices of a view
    raw = record if type(record) is bytes else view
    packed = bytes(raw[meta_at:meta_end])
    meta = _REQUEST_METAS.get(packed) or _new_meta(packed)
    data, reference = view[meta_end:], None
    if flags & FLAG_REFERENCE:
        reference, data = Reference.unpack(data), data[:0]
    if meta.size_bytes != (len(data) if reference is None else reference.size_bytes):
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
        flags,
        reference,
        SequenceMark.unpack(bytes(raw[client_end:mark_end])) if mark_length else None,
        lineage,
        trace,
        window,
    )


def at_level(record: Buffer, level: int) -> bytes:
    """The same request record at another priority level."""
    header = list(_REQUEST.unpack_from(record))
    header[-2] = level
    return _REQUEST.pack(*header) + bytes(record[_REQUEST.size :])


_MORE = FLAG_LINEAGE | FLAG_TRACED | FLAG_WINDOW
"""Flags of records with rare parts."""


def _more(view: memoryview, flags: int, at: int) -> tuple[Lineage | None, Traced | None, int, int]:
    """Lineage, trace and window of a record, which begin at `at`, and their end. Raises `InvalidRecord`."""
    lineage, trace, window = None, None, 0
    if flags & FLAG_LINEAGE:
        lineage, at = Lineage.unpack(view, at)
    if flags & FLAG_TRACED:
        context, at = Context.unpack(view, at)
        trace = Traced(context)
    if flags & FLAG_WINDOW:
        window, at = _window(view, at)
    return lineage, trace, window, at


def carried_in(fields: Sequence[Buffer], wave: Callable[[Buffer], Iterable[Any]]) -> list[Any]:
    """The content of an entry, in order; other fields are skipped. Raises `InvalidRecord` for any part.

    `wave` decodes a wave: as such, or as its requests (`waves`).
    """
    found: list[Any] = []
    for at in range(0, len(fields) - 1, 2):
        if fields[at] == FIELD_WAVE:
            found += wave(fields[at + 1])
        elif fields[at] == FIELD_RECORD:
            record = fields[at + 1]
            # a sender in the same process passes decoded records
            found.append(unpack_request(record) if isinstance(record, bytes | memoryview | bytearray) else record)
        elif fields[at] == FIELD_RECORDS:
            view = memoryview(fields[at + 1])
            start, lengths = lengths_of(view)
            if lengths and lengths.count(lengths[0]) == len(lengths):
                found += _unpack_alike(view[start:], lengths[0])
            else:
                for length in lengths:
                    found.append(unpack_request(view[start : start + length]))
                    start += length
    return found


def _unpack_alike(records: memoryview, size: int) -> list[RequestRecord]:
    """Consecutive records of `size` bytes each.

    Records that a gateway joins in an entry mostly differ only in ids, times and tensor bytes: then the other parts,
    at the same offsets, are compared with the first record's instead of being decoded.
    """
    first = unpack_request(records[:size])
    found = [first]
    if first.flags & (_MORE | FLAG_REFERENCE) or first.sequence is not None:
        found += [unpack_request(records[at : at + size]) for at in range(size, len(records), size)]
        return found
    endpoint, client_id, meta, flags, rows = first.endpoint, first.client_id, first.meta, first.flags, first.rows
    deadline_ns, timeout_us, level, signature = first.deadline_ns, first.timeout_us, first.level, first.signature
    data_size = first.meta.size_bytes
    # copying a few bytes costs a third of a view of them
    source, own_data = (bytes(records), f"{data_size}s") if size <= _SMALL_BYTES else (records, f"0s{data_size}x")
    names_size = size - _REQUEST.size - data_size
    columns = struct.iter_unpack(f"<{_ALIKE_BYTES}s16sQ{_NUMBERS.size}s{names_size}s{own_data}", records)
    alike, _, _, numbers, names, _ = next(columns)
    start = size
    for same, request_id, accepted_ns, own, name, data in columns:
        end = start + size
        if same == alike and name == names:
            if own != numbers:
                numbers = own
                deadline_ns, timeout_us, level, signature = _NUMBERS.unpack(own)
            record = RequestRecord(
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
                data or source[end - data_size : end],
                source[start:end],
                flags,
            )
        else:
            record = unpack_request(records[start:end])
        found.append(record)
        start = end
    return found


def _window(view: memoryview, at: int) -> tuple[int, int]:
    try:
        return _WINDOW.unpack_from(view, at)[0], at + _WINDOW.size
    except struct.error as error:
        raise InvalidRecord(f"request record of {len(view)} bytes is cut short: {error}") from None


_REQUEST_METAS: dict[bytes, RequestMeta] = {}


def meta_of(packed: bytes) -> RequestMeta:
    """The meta with these bytes. Raises `InvalidRecord`."""
    return _REQUEST_METAS.get(packed) or _new_meta(packed)


_FIVE, _SIX, _SEVEN, _EIGHT = b"\x95", b"\x96", b"\x97", b"\x98"
"""How an array of so many values begins in msgpack."""
_ROUTED = {_SIX: _FIVE, _EIGHT: _SEVEN}
"""The beginnings of metas whose last value is the route of a prompt: how they begin without it."""
_WITH_ROUTE = {plain: routed for routed, plain in _ROUTED.items()}
_NOTHING = b"\xc0"


def _with_prompt(packed: bytes, prompt: PromptRoute) -> bytes:
    """The wire form of a meta with one more value: the route of its prompt, and before its end the size of that."""
    route = prompt.pack()
    return b"".join(
        (_WITH_ROUTE[packed[:1]], packed[1:], msgpack.packb(route + _ROUTE_SIZE.pack(len(route) + _ROUTE_SIZE.size)))
    )


def _routed_meta(packed: bytes) -> RequestMeta | None:
    """A meta with a prompt. Requests alike share the part before, which is cached; None for another last value."""
    size = _ROUTE_SIZE.unpack_from(packed, len(packed) - _ROUTE_SIZE.size)[0]
    value = packed[-size:]
    extra = msgpack.packb(value)
    if len(value) != size or size <= _ROUTE_SIZE.size or not packed.endswith(extra):
        return None
    prompt = PromptRoute.unpack(value[: -_ROUTE_SIZE.size])
    if prompt is None:
        return None
    return replace(meta_of(_ROUTED[packed[:1]] + packed[1 : -len(extra)]), prompt=prompt)


def _new_meta(packed: bytes) -> RequestMeta:
    """Decode a meta that is not cached."""
    if packed[:1] in _ROUTED and len(packed) > _ROUTE_SIZE.size and (routed := _routed_meta(packed)) is not None:
        return routed
    meta = _unpack_request_meta(packed)
    if len(packed) <= MAX_CACHED_META_BYTES:
        if len(_REQUEST_METAS) >= META_CACHE_LIMIT:
            _REQUEST_METAS.clear()
        _REQUEST_METAS[packed] = meta
    return meta


def _unpack_request_meta(packed: bytes) -> RequestMeta:
    try:
        version, content_hash, inputs, outputs, parameters, *more = msgpack.unpackb(packed, use_list=False)
        tenant = more[1] if len(more) > 1 and type(more[1]) is str else ""
        if not (
            type(version) is int
            and type(content_hash) is str
            and type(outputs) is tuple
            and all(type(name) is str for name in outputs)
        ):
            raise InvalidRecord("request meta has a field of another type")
        known = parameters_of(parameters)
        return RequestMeta(version, content_hash, places_of(inputs), outputs, known, packed, None, tenant)
    except InvalidRecord:
        raise
    except Exception as error:
        raise InvalidRecord(f"request meta cannot be read: {error}") from None
