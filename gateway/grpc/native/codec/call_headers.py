"""The headers of a call and of its answer: gRPC over HTTP/2 (its protocol document), HPACK (RFC 7541). Pure.

The server disables the client's dynamic table (SETTINGS_HEADER_TABLE_SIZE of 0). From then on equal header blocks have
equal meaning, so decoded blocks are cached: a client's calls have the same headers. Some clients do not say that they
have disabled it; as long as they never put anything into it, blocks that do not use it have equal meaning, too.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpack import Decoder, HPACKError, OversizedHeaderListError

from gateway.grpc.statuses import Status

from .http2_frames import ConnectionFault, ErrorCode

MAX_HEADER_BYTES = 64 * 1024
"""Names and values of a call in total, and the size of its compressed block."""

_REMEMBERED = 512
_REMEMBERED_BYTES = 1024
_REMEMBERED_FIELDS = 40
"""One byte of a block may be a header, which takes hundreds of bytes in memory."""
_SIZE_UPDATE = 0x20
_CHANGES = 0x60
"""Set in the first byte of what changes the table: a literal that is added to it, or its new size."""
_STATIC_ENTRIES = 61
_LAST_SHIFT = 28
"""Of the fifth further byte of an integer."""
_MAX_SIZE_UPDATES = 2
"""At the beginning of a block (RFC 7541, 4.2): the smallest and the final size since the last block."""

TRACEPARENT = "traceparent"
"""Differs from call to call (W3C Trace Context)."""

_UNIT_NS = {"H": 3_600_000_000_000, "M": 60_000_000_000, "S": 10**9, "m": 10**6, "u": 10**3, "n": 1}
_OURS = frozenset({"content-type", "te", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding", "content-length"})
_OF_CONNECTIONS = frozenset({"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"})
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+")
_PSEUDO = frozenset({":method", ":scheme", ":path", ":authority"})

# A client that allows a table smaller than the initial 4096 bytes must be told so before the next header (RFC 7541,
# 4.2); some end the connection otherwise. This encoder uses no table, and says so in each answer.
_NO_TABLE = bytes((_SIZE_UPDATE,))
_OK = _NO_TABLE + b"\x88"  # ":status: 200", index 8 of the static table
_NAME_STATUS = b"\x08"  # literal, not indexed, with the name of index 8
_NAME_CONTENT_TYPE = b"\x0f\x10"  # the same with the name of index 31
_GRPC = "application/grpc"


@dataclass(frozen=True, slots=True)
class CallHeaders:
    """The decoded headers of a call. `malformed` is the violation of HTTP/2's rules, if any (RFC 9113, section 8.1.1).

    `http_status` is not 200 if the request is not gRPC; `refusal` is a status and its details if the call cannot be
    served whatever its method.
    """

    path: str = ""
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    timeout_ns: int | None = None
    encoding: str = "identity"
    accepts_gzip: bool = False
    malformed: str = ""
    http_status: int = 200
    refusal: tuple[Status, str] | None = None


Fields = list[tuple[bytes, bytes]]
Meaning = Callable[[dict[str, str], list[tuple[str, str]], Fields], CallHeaders]
"""Interprets pseudo-headers, the other headers as text, and all headers as received."""


class HeaderReader:
    """Reads the header blocks of one connection."""

    _known: dict[bytes, CallHeaders]

    def __init__(self, known: dict[bytes, CallHeaders], of: Meaning | None = None) -> None:
        """`known` is shared by the connections of a front; `of` interprets headers that are not gRPC's."""
        self._known = known
        self._of = of or _of_grpc
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self.decoded_fields = 0
        """Number of headers in the last block; 0 if it was cached."""
        self.has_table = bool(self._decoder.header_table_size)
        """Whether the client may still use a table."""
        self.is_free = True
        """Whether blocks do not depend on earlier ones: the table is empty. A block may put something into it, unless
        there is no table or the block `uses_no_table`."""

    def read(self, block: bytes) -> CallHeaders:
        """The headers of a call. Raises `ConnectionFault` if the block, and so any later one, cannot be decoded."""
        is_free = self.is_free and (not self.has_table or uses_no_table(block))
        if is_free and (found := self._known.get(block)) is not None:
            self.decoded_fields = 0
            return found
        fields = self._decode(block)
        headers = call_headers(fields, self._of)
        is_small = len(block) <= _REMEMBERED_BYTES and len(fields) <= _REMEMBERED_FIELDS
        is_unique = any(name == TRACEPARENT.encode() for name, _ in fields)
        if is_free and is_small and not is_unique and block[:1] and block[0] & 0xE0 != _SIZE_UPDATE:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[block] = headers
        return headers

    def skip(self, block: bytes) -> bool:
        """Decode headers that begin no call; returns whether they would be valid. Raises as `read`."""
        return any(name.startswith(b":") for name, _ in self._decode(block))

    def _decode(self, block: bytes) -> Fields:
        if len(block) > MAX_HEADER_BYTES:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"headers of more than {MAX_HEADER_BYTES} bytes")
        if _size_updates(block) > _MAX_SIZE_UPDATES:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "headers begin with too many sizes of the table")
        try:
            fields = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM, f"headers of more than {MAX_HEADER_BYTES} bytes"
            ) from None
        except HPACKError:  # its text may contain a memory address
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "headers cannot be decoded") from None
        self.decoded_fields = len(fields)
        self.has_table = bool(self._decoder.header_table_size)
        self.is_free = not (self.has_table and self._decoder.header_table.dynamic_entries)
        return fields


def uses_no_table(block: bytes) -> bool:
    """Whether a block neither reads nor changes the table: it has only indices of the static one, and literals that are
    not added (RFC 7541, 6.1 to 6.3). False for a block that cannot be decoded."""
    at, size = 0, len(block)
    if size > _REMEMBERED_BYTES:
        return False  # it would not be remembered: not worth the time
    while at < size:
        if block[at] & 0x80:
            index, at = _integer(block, at, 0x7F)
            strings = 0
        elif block[at] & _CHANGES:
            return False
        else:
            index, at = _integer(block, at, 0x0F)
            strings = 1 if index else 2
        if index > _STATIC_ENTRIES:
            return False
        for _ in range(strings):
            if at >= size:
                return False
            length, at = _integer(block, at, 0x7F)
            at += length
    return at == size


def _integer(block: bytes, at: int, prefix: int) -> tuple[int, int]:
    """An integer with a prefix of these bits (RFC 7541, 5.1), and its end. One that is cut off, or longer than any that
    has a use, ends behind the block."""
    value = block[at] & prefix
    at += 1
    if value < prefix:
        return value, at
    shift = 0
    while at < len(block) and shift <= _LAST_SHIFT:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
    return value, len(block) + 1


def _size_updates(block: bytes) -> int:
    """Number of table size updates that a block begins with: each costs decoding time."""
    count = at = 0
    while at < len(block) and block[at] & 0xE0 == _SIZE_UPDATE and count <= _MAX_SIZE_UPDATES:
        count += 1
        goes_on = block[at] & 0x1F == 0x1F
        at += 1
        while goes_on and at < len(block):
            goes_on = bool(block[at] & 0x80)
            at += 1
    return count


def call_headers(fields: Fields, of: Meaning | None = None) -> CallHeaders:
    """The meaning of decoded headers."""
    pseudo: dict[str, str] = {}
    words: list[tuple[str, str]] = []
    for raw_name, raw_value in fields:
        name, value = raw_name.decode("latin-1"), raw_value.decode("utf-8", "replace")
        if name.startswith(":"):
            if words or name in pseudo or name not in _PSEUDO:
                return CallHeaders(malformed=f"pseudo-header '{name}' is unknown, repeated or late")
            pseudo[name] = value
        elif name in _OF_CONNECTIONS or not _NAME.fullmatch(name) or (name == "te" and value != "trailers"):
            return CallHeaders(malformed=f"header '{name}' is not one of HTTP/2")
        elif "\n" in value or "\r" in value or "\0" in value:
            return CallHeaders(malformed=f"header '{name}' has a value of more than one line")
        else:
            words.append((name, value))
    if not pseudo.get(":path") or not pseudo.get(":scheme") or ":method" not in pseudo:
        return CallHeaders(malformed="':method', ':scheme' or ':path' is missing")
    return (of or _of_grpc)(pseudo, words, fields)


def _of_grpc(pseudo: dict[str, str], words: list[tuple[str, str]], _fields: Fields) -> CallHeaders:
    ours = {name: value for name, value in words if name in _OURS}
    kind = ours.get("content-type", "")
    if pseudo[":method"] != "POST":
        return CallHeaders(http_status=405)
    if kind != _GRPC and not kind.startswith((_GRPC + "+", _GRPC + ";")):
        return CallHeaders(http_status=415)
    encoding = ours.get("grpc-encoding", "identity").strip()
    refusal: tuple[Status, str] | None = None
    if encoding not in ("identity", "gzip", "deflate"):
        refusal = Status.UNIMPLEMENTED, f"Compression algorithm '{encoding[:80]}' is not supported."
    timeout_ns: int | None = None
    if "grpc-timeout" in ours:
        timeout_ns = timeout_of(ours["grpc-timeout"])
        if timeout_ns is None:
            refusal = Status.INTERNAL, f"malformed grpc-timeout '{ours['grpc-timeout'][:80]}'"
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in words:
        if name in _OURS:
            continue
        if not name.endswith("-bin"):
            metadata.append((name, value))
            continue
        for part in value.split(","):
            binary = _binary(part.strip())
            if binary is None:
                refusal = Status.INTERNAL, f"metadata '{name[:80]}' is not in base64"
            else:
                metadata.append((name, binary))
    return CallHeaders(
        path=pseudo[":path"],
        metadata=tuple(metadata),
        timeout_ns=timeout_ns,
        encoding=encoding,
        accepts_gzip="gzip" in (word.strip() for word in ours.get("grpc-accept-encoding", "").split(",")),
        refusal=refusal,
    )


def timeout_of(word: str) -> int | None:
    """A `grpc-timeout` in ns: at most eight digits and a unit; None for anything else."""
    digits, unit = word[:-1], word[-1:]
    if unit not in _UNIT_NS or not 0 < len(digits) <= 8 or not digits.isascii() or not digits.isdigit():
        return None
    return int(digits) * _UNIT_NS[unit]


def _binary(word: str) -> bytes | None:
    try:
        return base64.b64decode(word + "=" * (-len(word) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def _length(size: int) -> bytes:
    """The length of a string that is not Huffman-coded: an integer with a seven-bit prefix (RFC 7541, 5.1)."""
    if size < 127:
        return bytes((size,))
    rest, parts = size - 127, bytearray((127,))
    while rest >= 128:
        parts.append(rest & 127 | 128)
        rest >>= 7
    parts.append(rest)
    return bytes(parts)


def literal(name: bytes, value: bytes) -> bytes:
    """A header as a literal without indexing (RFC 7541, 6.2.2)."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


_CONTENT_TYPE = _NAME_CONTENT_TYPE + _length(len(_GRPC)) + _GRPC.encode()


def answer_block(encoding: str = "") -> bytes:
    """The headers of an answer; `encoding` of its messages if they are compressed."""
    block = _OK + _CONTENT_TYPE + literal(b"grpc-accept-encoding", b"identity, deflate, gzip")
    return block + literal(b"grpc-encoding", encoding.encode()) if encoding else block


def status_block(status: Status, details: str, metadata: Iterable[tuple[str, str]] = (), *, alone: bool) -> bytes:
    """The trailers of a call; `alone` if there were no headers before."""
    block = _OK + _CONTENT_TYPE if alone else b""
    block += literal(b"grpc-status", str(int(status)).encode())
    if details:
        block += literal(b"grpc-message", percent_encoded(details))
    for name, value in metadata:
        block += literal(name.encode("latin-1"), value.encode("latin-1", "replace"))
    return block


def http_block(status: int) -> bytes:
    """The status of an HTTP answer to a request that is not gRPC."""
    return _NO_TABLE + _NAME_STATUS + _length(3) + str(status).encode()


def percent_encoded(text: str) -> bytes:
    """A status message on the wire: percent-encoded UTF-8, except printable ASCII without '%'."""
    if text.isascii() and text.isprintable() and "%" not in text:
        return text.encode()
    return b"".join(
        bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        for byte in text.encode("utf-8", "replace")
    )
