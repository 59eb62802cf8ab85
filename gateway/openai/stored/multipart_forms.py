"""Reads the body of an upload, `multipart/form-data` (RFC 7578), piece by piece as it comes. Pure.

One part is a file, whose content is passed on and never held; the others are short fields. `file_routes` stores them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from gateway.openai.shapes.api_errors import ApiError

MAX_PARTS = 32
_MAX_HEAD_BYTES = 8192
_MAX_FIELD_BYTES = 4096
_MAX_NAME = 255
_BOUNDARY = re.compile(rb"""[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]""")
_PARAMETER = re.compile(r""";\s*([A-Za-z0-9_*-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))""")


def boundary_of(content_type: bytes) -> bytes:
    """The boundary that a Content-Type declares. Raises `ApiError` for another type, and without a valid one."""
    kind, _, _ = content_type.partition(b";")
    if kind.strip().lower() != b"multipart/form-data":
        raise ApiError("a file is uploaded as multipart/form-data", status=415)
    found = dict(_parameters(content_type.decode("latin-1"))).get("boundary", "").encode("latin-1")
    if not _BOUNDARY.fullmatch(found):
        raise ApiError("the Content-Type names no valid boundary")
    return found


def _parameters(text: str) -> list[tuple[str, str]]:
    """The parameters of a header's value, names in lower case."""
    found = []
    for name, quoted, plain in _PARAMETER.findall(text):
        found.append((name.lower(), re.sub(r"\\(.)", r"\1", quoted) if quoted else plain))
    return found


@dataclass(slots=True)
class UploadForm:
    """The parts read so far. `feed` returns the content of the part `file` that has become certain.

    `fields` are the other parts, by name. A part that was begun and not ended makes `end` fail.
    """

    boundary: bytes
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    """The name of the file, "" if the part has none; None before that part."""
    before: dict[str, str] = field(default_factory=dict)
    """The fields that came before the file."""
    _held: bytearray = field(default_factory=bytearray)
    _parts: int = 0
    _part: str | None = None
    """The part being read; None between parts."""
    _ended: bool = False

    def __post_init__(self) -> None:
        self._held += b"\r\n"  # the first delimiter has no line before it

    def feed(self, data: bytes) -> bytes:
        """Read on; returns content of the file. Raises `ApiError` for a body that is not as RFC 7578 says."""
        if self._ended:
            return b""  # what follows the last delimiter means nothing
        self._held += data
        content: list[bytes] = []
        while self._advance(content):
            pass
        return b"".join(content)

    def _advance(self, content: list[bytes]) -> bool:
        """One step; False when it needs more data or has read the last delimiter."""
        delimiter = b"\r\n--" + self.boundary
        if self._part is None:
            return self._begin_part(delimiter)
        at = self._held.find(delimiter)
        certain = at if at >= 0 else max(0, len(self._held) - len(delimiter) + 1)
        if certain:
            self._take(bytes(self._held[:certain]), content)
            del self._held[:certain]
        if at >= 0:
            self._part = None
        return at >= 0

    def _begin_part(self, delimiter: bytes) -> bool:
        """Read a delimiter and the head behind it."""
        held = self._held
        if len(held) < len(delimiter) + 2:
            return False
        if not held.startswith(delimiter):
            raise ApiError("the body does not begin with the boundary that the Content-Type names")
        if held[len(delimiter) : len(delimiter) + 2] == b"--":
            self._ended = True
            held.clear()
            return False
        end = held.find(b"\r\n\r\n", len(delimiter))
        if end < 0 or end > len(delimiter) + _MAX_HEAD_BYTES:
            if len(held) > len(delimiter) + _MAX_HEAD_BYTES:
                raise ApiError("the head of a part is too long")
            return False
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise ApiError(f"the form has more than {MAX_PARTS} parts")
        self._name_part(bytes(held[len(delimiter) : end]).decode("utf-8", "replace"))
        del held[: end + 4]
        return True

    def _name_part(self, head: str) -> None:
        words: dict[str, str] = {}
        for line in head.split("\r\n"):
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-disposition":
                words = dict(_parameters(value))
        name = words.get("name", "")
        if not name or len(name) > _MAX_NAME:
            raise ApiError("a part of the form has no name")
        if name in self.fields or (name == "file" and self.filename is not None):
            raise ApiError(f"the form has two parts named '{name[:64]}'", param=name)
        if name == "file":
            self.filename = words.get("filename", "")[:_MAX_NAME]
            self.before = dict(self.fields)
        else:
            self.fields[name] = ""
        self._part = name

    def _take(self, data: bytes, content: list[bytes]) -> None:
        if self._part == "file":
            content.append(data)
            return
        assert self._part is not None
        value = self.fields[self._part] + data.decode("latin-1")
        if len(value) > _MAX_FIELD_BYTES:
            raise ApiError(f"the field '{self._part[:64]}' of the form is too long", param=self._part)
        self.fields[self._part] = value

    def end(self) -> None:
        """The body is complete. Raises `ApiError` when it is not, or has no file."""
        if not self._ended:
            raise ApiError("the body ends before the form does")
        if self.filename is None:
            raise ApiError("'file' is a required property", param="file")
