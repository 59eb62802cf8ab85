"""Decompresses bodies and messages within a bound: small ones in the event loop, others in a worker process.

The bound holds while decompressing, so a decompression bomb never becomes a large buffer. In a thread of the gateway,
joining and freeing tens of megabytes would hold the interpreter's lock. `gateway.http.codec.compression` and
`gateway.grpc.native.codec.grpc_messages` say in the words of their protocol what was wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from charonia.offload.pool import OFF_LOOP_BYTES, SECOND_WORKER_BYTES, Offload, Task
from charonia.tensors import Buffer

GZIP = "gzip"
DEFLATE = "deflate"
"""The zlib format."""

WINDOW_BITS = {GZIP: 31, DEFLATE: 15}

INFLATED_IN_LOOP_BYTES = 2 * 1024
"""Data may grow a thousandfold."""

AFTER_END = "data after the end"
TRUNCATED = "truncated"
TOO_LARGE = "too large"

_STEP_BYTES = 1 << 20
"""Output of one decompression step."""
_PIECE_BYTES = 1 << 18
"""Input of one decompression step: zlib copies the unused rest with every step."""
_FIRST_TRY_BYTES = SECOND_WORKER_BYTES // 2
"""What grows beyond this is for the worker of large messages: the other one is done with it in some milliseconds."""


class DecompressionFault(Exception):
    """Data that cannot be decompressed. `fault` is AFTER_END, TRUNCATED, TOO_LARGE, or zlib's text."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.fault = fault


def inflated(encoding: str, data: Buffer, limit_bytes: int, *, several: bool) -> bytes:
    """The data without `encoding`, at most `limit_bytes`; with `several`, that of all compressed streams in it.

    Raises `DecompressionFault`.
    """
    parts: list[bytes] = []
    total = 0
    decoder = zlib.decompressobj(WINDOW_BITS[encoding])
    for at in range(0, len(data), _PIECE_BYTES):
        rest: bytes | memoryview = memoryview(data)[at : at + _PIECE_BYTES]
        part = b""
        while rest or len(part) == _STEP_BYTES:
            if decoder.eof and rest:
                if not several:
                    raise DecompressionFault(AFTER_END)
                decoder = zlib.decompressobj(WINDOW_BITS[encoding])
            try:
                part = decoder.decompress(rest, min(_STEP_BYTES, limit_bytes - total + 1))
            except zlib.error as error:
                raise DecompressionFault(str(error)) from None
            total += len(part)
            if total > limit_bytes:
                raise DecompressionFault(TOO_LARGE)
            parts.append(part)
            rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
    if not decoder.eof:
        raise DecompressionFault(TRUNCATED)
    return b"".join(parts)


async def inflate(
    offload: Offload, encoding: str, data: Buffer, limit_bytes: int, *, several: bool
) -> bytes | memoryview:
    """As `inflated`, in a worker process unless the data is small. Raises as `inflated` and `Offload.run`."""
    if len(data) <= INFLATED_IN_LOOP_BYTES:
        return inflated(encoding, data, limit_bytes, several=several)
    bounds = [limit_bytes]
    if len(data) < _FIRST_TRY_BYTES < limit_bytes:
        bounds.insert(0, _FIRST_TRY_BYTES)
    fault = ""
    for bound in bounds:
        task = Task(f"{__name__}:inflate_in_worker", [encoding, bound, several], (data,), bound)
        fault, buffers = await offload.run(task)
        if not fault:
            return buffers[0] if len(buffers[0]) > OFF_LOOP_BYTES else bytes(buffers[0])
        if fault != TOO_LARGE:
            break
    raise DecompressionFault(fault)


def inflate_in_worker(note: Any, buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    """The fault, "" for none, and the decompressed data."""
    encoding, limit_bytes, several = note
    try:
        return "", (inflated(encoding, buffers[0], limit_bytes, several=several),)
    except DecompressionFault as error:
        return error.fault, ()
