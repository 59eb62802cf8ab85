"""Large bodies received past the parser."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from charonia.offload.handed_memory import file_of, handed_memory
from gateway.http.binary_bodies import BinaryBody, BinaryBodyReader, size_of

JSON_HEAD = b"inference-header-content-length"


@pytest.mark.parametrize(
    ("headers", "sizes"),
    [
        ([(b"content-length", b"1048576")], (1 << 20, 0)),
        ([(b"content-length", b"67108864")], (1 << 26, 0)),
        ([(b"content-length", b"67108865")], None),
        ([(b"content-length", b"1048575")], None),
        ([(b"content-length", b"1073741824"), (JSON_HEAD, b"100")], (1 << 30, 100)),
        ([(b"content-length", b"65536"), (JSON_HEAD, b"65537")], None),
        ([(b"content-length", b"1048576"), (b"content-encoding", b"gzip")], None),
        ([(b"content-length", b"1048576"), (b"content-length", b"1048576")], None),
    ],
)
def test_large_bodies_of_known_size_pass_the_parser_by(
    headers: list[tuple[bytes, bytes]], sizes: tuple[int, int] | None
) -> None:
    assert size_of(headers) == sizes


def test_a_reader_that_is_kept_does_not_keep_the_body() -> None:
    view = handed_memory(1 << 20)
    assert view is not None
    descriptor = file_of(view)
    assert descriptor is not None
    received: list[int] = []
    reader = BinaryBodyReader(BinaryBody(view), asyncio.Protocol(), received.append, lambda: None)
    while sum(received) < 1 << 20:
        buffer = reader.get_buffer(0)
        buffer[:] = b"x" * len(buffer)
        reader.buffer_updated(len(buffer))
    assert bytes(view) == b"x" * (1 << 20)
    file = os.fstat(descriptor).st_ino
    del view
    deadline = time.monotonic() + 60
    while _is_open(descriptor, file):  # a thread gives the memory back
        assert time.monotonic() < deadline


def _is_open(descriptor: int, file: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == file
    except OSError:
        return False
