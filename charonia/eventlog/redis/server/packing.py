"""Commands as bytes. Large arguments are handed on as they are, so that they are copied only by the transport."""

from __future__ import annotations

from collections.abc import Sequence

import hiredis

from charonia.tensors import Buffer

Argument = Buffer | str | int

LARGE_BYTES = 32_768
"""From here on an argument is worth a piece of its own; below it, joining all pieces into one write is cheaper."""


def pack(command: Sequence[Argument]) -> bytes:
    """One command of small arguments."""
    try:
        packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]
    except TypeError:  # a bytearray
        return b"".join(pack_pieces(command))
    return packed


def pack_pieces(command: Sequence[Argument]) -> list[Buffer]:
    """One command as pieces to be written one after the other; arguments of `LARGE_BYTES` and more stay uncopied."""
    pieces: list[Buffer] = []
    head = bytearray(b"*%d\r\n" % len(command))
    for argument in command:
        if isinstance(argument, memoryview):
            body: Buffer = argument.cast("B") if argument.nbytes else b""
        elif isinstance(argument, (bytes, bytearray)):
            body = argument
        else:
            body = str(argument).encode()
        head += b"$%d\r\n" % len(body)
        if len(body) >= LARGE_BYTES:
            pieces.append(bytes(head))
            pieces.append(body)
            head = bytearray()
        else:
            head += body
        head += b"\r\n"
    pieces.append(bytes(head))
    return pieces
