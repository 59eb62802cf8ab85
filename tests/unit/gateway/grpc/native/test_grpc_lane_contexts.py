"""Header blocks whose trace context is left out when they are compared."""

from __future__ import annotations

import pytest
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from http2_client import block, call_fields

from gateway.grpc.native.codec.call_headers import TRACEPARENT, HeaderReader
from gateway.grpc.native.grpc_lane import without_context
from gateway.lane.layout import NO_CONTEXT

CONTEXT = "00-" + "1" * 32 + "-" + "2" * 16 + "-00"
WRITTEN = f"\x0b{TRACEPARENT}7{CONTEXT}".encode()


def compressed(name: str, code: bytes) -> bytes:
    """A header whose value has this Huffman code."""
    return b"".join((b"\0", bytes((len(name),)), name.encode(), bytes((0x80 | len(code),)), code))


def huffman(text: str) -> bytes:
    bits = "".join(format(REQUEST_CODES[byte], f"0{REQUEST_CODES_LENGTH[byte]}b") for byte in text.encode())
    bits += "1" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8)


def test_only_the_context_is_left_out() -> None:
    whole = block(call_fields("ModelInfer", (TRACEPARENT, CONTEXT), ("x-more", "1")))
    found = without_context(whole, HeaderReader({}).read(whole))
    assert found is not None
    assert found[0] == whole.replace(CONTEXT.encode(), NO_CONTEXT)
    assert dict(found[1].metadata) == {TRACEPARENT: NO_CONTEXT.decode(), "x-more": "1"}


@pytest.mark.parametrize(
    "more",
    [
        compressed("x-foo", WRITTEN + b"\x0f") + compressed(TRACEPARENT, huffman(CONTEXT)),
        block([("x-foo", WRITTEN.decode())]) + compressed(TRACEPARENT, huffman(CONTEXT)),
        compressed(TRACEPARENT, huffman(CONTEXT)),
        block([(TRACEPARENT, CONTEXT)] * 2),
        block([(TRACEPARENT, CONTEXT.upper().replace("0", "A"))]),
    ],
    ids=["in a compressed value", "in another value", "compressed", "twice", "not one"],
)
def test_what_may_be_something_else_is_not(more: bytes) -> None:
    whole = block(call_fields("ModelInfer")) + more
    assert without_context(whole, HeaderReader({}).read(whole)) is None
