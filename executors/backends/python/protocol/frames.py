"""Encodes and decodes frames between an executor and a model process: header, msgpack meta, tensor bytes. No I/O.

    header   magic u16 | kind u8 | zero u8 | call u32 | meta bytes u32 | data bytes u64      little-endian
    meta     msgpack, its form depends on the kind (`frame_content`)
    data     tensor bytes; each tensor starts at a multiple of `ALIGNMENT`

Both ends decode with `FrameReader`: the blocking end passes its buffers to `recv_into`, the asyncio end is a
`BufferedProtocol` over it. Large data is received directly into its final buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack
import numpy as np

Buffer = bytes | bytearray | memoryview

_HEADER = struct.Struct("<HBxIIQ")
_MAGIC = 0xC4A5

HEADER_BYTES = _HEADER.size
ALIGNMENT = 16
"""Tensors start at multiples of this many bytes, so that NumPy arrays are aligned."""

MAX_META_BYTES = 64 << 20
MAX_DATA_BYTES = 64 << 30
"""Sanity limits: beyond them, the peer is not sending frames."""

UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
"""What taking a content apart that has another form than it should leads to."""

_SCRATCH_BYTES = 64 << 10
_JOIN_BYTES = 128 << 10


class Kind(IntEnum):
    """The kind of a frame. The executor sends verbs; the model process replies with READY, DONE, FAILED, and sends LOG.

    CANCEL and WINDOW carry the number of their EXECUTE and get no reply; a model process sends CANCEL too,
    in place of the DONE of an EXECUTE that it interrupted. RESPONSE answers one request of an EXECUTE,
    before or after its DONE. EXECUTE_COLUMNS is an EXECUTE in another form; its reply is COLUMNS when all answers have
    one form. LOAD, CREATE, EXECUTE_STREAM, RESPONSES, SLOT, STORED, PREFERS_GPU, MEMORY and TEXT_ASSETS are of isolated
    native models (`executors.isolation.forms`). RESPONSES are small responses of any calls, in order.
    The model process numbers its own requests (CALL, CONTROL), which are answered by ANSWERs and one
    LAST_ANSWER with that number.
    """

    AUTO_COMPLETE = 1
    INITIALIZE = 2
    EXECUTE = 3
    FINALIZE = 4
    CANCEL = 5
    HEALTH = 6
    WINDOW = 7
    ANSWER = 8
    LAST_ANSWER = 9
    EXECUTE_COLUMNS = 10
    LOAD = 11
    CREATE = 12
    EXECUTE_STREAM = 13
    SLOT = 14
    STORED = 15
    PREFERS_GPU = 27
    MEMORY = 28
    TEXT_ASSETS = 30
    READY = 16
    DONE = 17
    FAILED = 18
    LOG = 19
    RESPONSE = 20
    COLUMNS = 21
    RESPONSES = 22
    CALL = 24
    GIVE_UP = 25
    CONTROL = 26


class FrameError(Exception):
    """The bytes are no valid frame: a bug at one end, or the model wrote to the socket itself."""


@dataclass(slots=True)
class Frame:
    """One decoded frame. `data` is writable and not shared. `call` matches a reply with its request."""

    kind: Kind
    call: int
    meta: bytes
    data: memoryview

    def content(self) -> Any:
        """Unpack the meta. Raises `FrameError`."""
        try:
            return msgpack.unpackb(self.meta, use_list=True, strict_map_key=False)
        except Exception as error:
            raise FrameError(f"frame meta cannot be read: {error}") from None


def padding(size_bytes: int) -> int:
    """The number of bytes to add after a tensor of this size, so that the next one is aligned."""
    return -size_bytes % ALIGNMENT


def pack(kind: Kind, call: int, content: Any, data: Iterable[Buffer] = ()) -> list[Buffer]:
    """Return the buffers of one frame, to write in order; each item of `data` is padded to `ALIGNMENT`.

    A small frame is a single buffer, because the copy is cheaper than a second write.
    """
    return pack_described(kind, call, msgpack.packb(content), data)


def pack_described(kind: Kind, call: int, meta: bytes, data: Iterable[Buffer] = ()) -> list[Buffer]:
    """The same with a content that is packed already (msgpack)."""
    buffers: list[Buffer] = []
    total = 0
    for buffer in data:
        size = len(buffer)
        buffers.append(buffer)
        gap = -size % ALIGNMENT  # `padding`, a call less
        if gap:
            buffers.append(_ZEROS[:gap])
        total += size + gap
    head = _HEADER.pack(_MAGIC, kind, call, len(meta), total) + meta
    if total <= _JOIN_BYTES:
        return [b"".join((head, *buffers))]
    return [head, *buffers]


def packed_list(items: Sequence[bytes]) -> bytes:
    """The packed content that is a list of these, each of which is packed."""
    return b"".join((msgpack.Packer().pack_array_header(len(items)), *items))


_ZEROS = bytes(ALIGNMENT)
_KINDS = {int(kind): kind for kind in Kind}


def tensor_offsets(sizes: Sequence[int]) -> list[int]:
    """The offsets in a frame's data of tensors with these sizes."""
    offsets = []
    at = 0
    for size in sizes:
        offsets.append(at)
        at += size + padding(size)
    return offsets


class FrameReader:
    """Splits a byte stream into frames: fill `get_buffer()`, then call `received(n)`.

    A frame with more than `limit_bytes` of data is an error.
    """

    def __init__(self, limit_bytes: int = MAX_DATA_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._begin = 0
        self._end = 0
        # set while the data of a large frame is received directly
        self._head: tuple[Kind, int, bytes] | None = None
        self._data = memoryview(b"")
        self._filled = 0

    @property
    def idle(self) -> bool:
        """Whether no frame is partly received, so that the stream may end here."""
        return self._head is None and self._begin == self._end

    def get_buffer(self) -> memoryview:
        """Return the buffer for the next bytes; never empty."""
        if self._head is not None:
            return self._data[self._filled :]
        if self._end == len(self._scratch):
            self._make_room()
        return memoryview(self._scratch)[self._end :]

    def received(self, count: int) -> list[Frame]:
        """Process `count` new bytes; return the completed frames. After a `FrameError` the reader is unusable."""
        if self._head is not None:
            self._filled += count
            if self._filled < len(self._data):
                return []
            frame = Frame(*self._head, self._data)
            self._head, self._data, self._filled = None, memoryview(b""), 0
            return [frame]
        self._end += count
        frames = []
        while self._begin < self._end and (frame_or_none := self._next()) is not None:
            frames.append(frame_or_none)
        if self._begin == self._end:
            self._begin = self._end = 0
        return frames

    def _next(self) -> Frame | None:
        have = self._end - self._begin
        if have < HEADER_BYTES:
            return None
        magic, kind_number, call, meta_bytes, data_bytes = _HEADER.unpack_from(self._scratch, self._begin)
        if magic != _MAGIC or meta_bytes > MAX_META_BYTES or data_bytes > self._limit_bytes:
            raise FrameError("bytes between executor and model process are no frame")
        kind = _KINDS.get(kind_number)
        if kind is None:
            raise FrameError(f"frame of unknown kind {kind_number}")
        meta_begin = self._begin + HEADER_BYTES
        data_begin = meta_begin + meta_bytes
        if data_begin > self._end:
            return None
        meta = bytes(self._scratch[meta_begin:data_begin])
        data_end = data_begin + data_bytes
        if data_end <= self._end:
            self._begin = data_end
            return Frame(kind, call, meta, memoryview(self._scratch[data_begin:data_end]))
        # np.empty, unlike bytearray, does not zero the memory first
        try:
            data = np.empty(data_bytes, dtype=np.uint8).data
        except MemoryError:
            raise FrameError(f"there is no memory for the {data_bytes} bytes of a frame") from None
        here = self._end - data_begin
        data[:here] = self._scratch[data_begin : self._end]
        self._head, self._data, self._filled = (kind, call, meta), data, here
        self._begin = self._end = 0
        return None

    def _make_room(self) -> None:
        # a header whose meta does not fit yet; small frames never get here with begin at 0
        left = self._scratch[self._begin : self._end]
        size = len(self._scratch) if self._begin else 2 * len(self._scratch)
        self._scratch = left + bytearray(size - len(left))
        self._begin, self._end = 0, len(left)


__all__ = [
    "ALIGNMENT",
    "HEADER_BYTES",
    "MAX_DATA_BYTES",
    "UNREADABLE",
    "Buffer",
    "Frame",
    "FrameError",
    "FrameReader",
    "Kind",
    "pack",
    "pack_described",
    "packed_list",
    "padding",
    "tensor_offsets",
]
