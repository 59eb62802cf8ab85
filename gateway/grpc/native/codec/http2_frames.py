"""HTTP/2 frames as a server reads and writes them (RFC 9113, sections 4, 6 and 7). Pure."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

HEAD_BYTES = 9
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 16_384
LARGEST_FRAME_BYTES = 0xFFFFFF
MAX_FRAME_BYTES = 1 << 17
"""The largest frame that the server accepts."""
LARGEST_WINDOW = 0x7FFFFFFF
LARGEST_ID = 0x7FFFFFFF
_MAX_TEXT_BYTES = 1024

(
    HEADER_TABLE_SIZE,
    ENABLE_PUSH,
    MAX_CONCURRENT_STREAMS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
) = range(1, 7)

HEAD = Struct(">HBBBL")
"""Length (two parts), type, flags, stream."""
_SETTING = Struct(">HL")
_WORD = Struct(">L")
_TWO_WORDS = Struct(">LL")


class ErrorCode(IntEnum):
    """Error codes (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ConnectionFault(Exception):
    """The peer broke the protocol: the connection ends with this code."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFault(Exception):
    """The peer broke the protocol within one stream, which is reset with this code."""

    def __init__(self, stream_id: int, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.stream_id = stream_id
        self.code = code


def checked_length(length: int) -> int:
    """The length of a received frame. Raises `ConnectionFault` if it is too large."""
    if length > MAX_FRAME_BYTES:
        text = f"frame of {length} bytes, expected at most {MAX_FRAME_BYTES}"
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, text)
    return length


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in values.items()))


def window_update(stream_id: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, _WORD.pack(size))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream_id, _WORD.pack(code))


def goaway(last_stream_id: int, code: ErrorCode, text: str = "") -> bytes:
    """`text` may quote the client and is cut, so that the frame fits every client's limit."""
    return frame(GOAWAY, 0, 0, _TWO_WORDS.pack(last_stream_id, code) + text.encode()[:_MAX_TEXT_BYTES])


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """The checked settings of a frame. Raises `ConnectionFault`."""
    if len(payload) % 6:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a size that is no multiple of six")
    values = list(_SETTING.iter_unpack(payload))
    for name, value in values:
        if name == ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}, expected 0 or 1")
        if name == INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE of {value} is too large")
        if name == MAX_FRAME_SIZE and not DEFAULT_FRAME_BYTES <= value <= LARGEST_FRAME_BYTES:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE of {value} is out of bounds")
    return values


def read_word(payload: bytes, what: str) -> int:
    """The single 32-bit number of a frame. Raises `ConnectionFault`."""
    if len(payload) != 4:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"{what} of {len(payload)} bytes, expected 4")
    word: int = _WORD.unpack(payload)[0]
    return word


def without_padding(flags: int, payload: bytes, what: str) -> bytes:
    """The payload without padding and priority. Raises `ConnectionFault`."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"padded {what} without a length of its padding")
        start, end = 1, end - payload[0]
    if flags & WITH_PRIORITY:
        if len(payload) < start + 5:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"{what} with an incomplete priority")
        start += 5
    if end < start:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{what} with more padding than it is long")
    return payload[start:end]
