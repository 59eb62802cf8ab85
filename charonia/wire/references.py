"""A reference in the place of a record's tensor bytes: where large payloads lie instead.

kind (1 byte: `f` a file of the shared payload directory, `b` a blob of the log) | size (8 bytes) | name
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from charonia.errors import InvalidRecord
from charonia.tensors import Buffer

_REFERENCE = struct.Struct("<cQ")
_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9_-]+)?")

FILE = b"f"
BLOB = b"b"


@dataclass(frozen=True, slots=True)
class Reference:
    """Where the tensor bytes of one record are. `name` is `<incarnation>/<file>` or a blob id; never a path beyond."""

    kind: bytes
    name: str
    size_bytes: int

    def pack(self) -> bytes:
        return _REFERENCE.pack(self.kind, self.size_bytes) + self.name.encode()

    @staticmethod
    def unpack(data: Buffer) -> Reference:
        """Raises `InvalidRecord`, also for a name that could leave the payload directory."""
        view = memoryview(data)
        try:
            kind, size = _REFERENCE.unpack_from(view)
            name = str(view[_REFERENCE.size :], "ascii")
        except (struct.error, UnicodeDecodeError) as error:
            raise InvalidRecord(f"payload reference cannot be read: {error}") from None
        if kind not in (FILE, BLOB) or not _NAME.fullmatch(name) or name.startswith("."):
            raise InvalidRecord("payload reference names no file or blob")
        return Reference(kind, name, size)
