"""A task and its result between a process and its worker: a note and buffers in memory that is handed over.

Each message on the socket is a `_HEAD` and the descriptor of a memory file: first the note, as msgpack with the sizes
of the buffers, then the buffers one behind the other. Who takes it maps it, so nothing is copied on that side. A buffer
that is a memory file already (`handed_memory`) is not copied at all: its descriptor comes second. Every call that is
long lets go of the interpreter's lock: these functions are for threads beside an event loop.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from struct import Struct
from typing import Any

import msgpack

from .handed_memory import file_of, received_memory
from .reclaimed import ReclaimedMap

Buffer = bytes | bytearray | memoryview

_HEAD = Struct("<QQ")
"""Bytes of the note, and of all."""
SENT_FROM_FILE_BYTES = 4 << 20
"""From this size on the memory of a result keeps its file's descriptor, so that it can be sent from there."""
_WRITE_AT_ONCE = 64 * 1024 * 1024


def send(connection: socket.socket, note: Any, buffers: Sequence[Buffer], kept: list[int] | None = None) -> None:
    """Raises `OSError` when the other side has gone, or there is no memory. Descriptors of the memory go to `kept`
    instead of being closed: the pages are freed by the process that closes the last one.
    """
    views = [view.cast("B") if isinstance(view, memoryview) else memoryview(view) for view in buffers]
    files = [file_of(view) for view in views]
    given = next((number for number, file in enumerate(files) if file is not None), -1)
    packed = msgpack.packb([note, [len(view) for view in views], given])
    copied = [memoryview(packed), *(view for number, view in enumerate(views) if number != given)]
    descriptor = os.memfd_create("charonia-offload", os.MFD_CLOEXEC)
    try:
        for view in copied:
            at = 0
            while at < len(view):
                at += os.write(descriptor, view[at : at + _WRITE_AT_ONCE])
        head = _HEAD.pack(len(packed), sum(map(len, copied)))
        second = files[given] if given >= 0 else None
        socket.send_fds(connection, [head], [descriptor] if second is None else [descriptor, second])
    finally:
        _close_or_keep([descriptor], kept)


def _close_or_keep(descriptors: list[int], kept: list[int] | None) -> None:
    if kept is not None:
        kept += descriptors
        return
    for descriptor in descriptors:
        os.close(descriptor)


def receive(connection: socket.socket, kept: list[int] | None = None) -> tuple[Any, list[memoryview]]:
    """The next note and its buffers, whose memory is free with the last view of them. Raises `EOFError`, `OSError`.
    `kept` as for `send`.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, 2)
    if not descriptors:
        raise EOFError("the other side has gone")
    try:
        while len(head) < _HEAD.size:
            more = connection.recv(_HEAD.size - len(head))
            if not more:
                raise EOFError("the other side has gone")
            head += more
        note_bytes, size_bytes = _HEAD.unpack(head)
        if kept is None and size_bytes >= SENT_FROM_FILE_BYTES:
            whole = received_memory(descriptors.pop(0), size_bytes)
        else:
            whole = memoryview(ReclaimedMap(descriptors[0], size_bytes, prot=mmap.PROT_READ))
        note, sizes, given = msgpack.unpackb(whole[:note_bytes])
        buffers: list[memoryview] = []
        at = note_bytes
        for number, size in enumerate(sizes):
            if number == given:
                buffers.append(memoryview(ReclaimedMap(descriptors[-1], size, prot=mmap.PROT_READ)))
                continue
            buffers.append(whole[at : at + size])
            at += size
    finally:
        _close_or_keep(descriptors, kept)
    return note, buffers
