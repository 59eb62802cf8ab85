"""The file of an exported state: frames of msgpack, a checksum at the end, written whole or not at all.

    "CHARONIA STATE\\n", then frames: length (4 bytes, big-endian) and a msgpack value; a length of 0 ends them, and the
    BLAKE2b digest (32 bytes) of all before it follows.

    {"format": 1, ...}                      the first frame: who wrote the file, when and from what
    ["k", key, type, expires_ms, content]   a key; `expires_ms` since the epoch, 0 for never
    ["m", content]                          more of the same key
    ["p", group, pending]                   of a stream: pending entries of a consumer group
    ["s", end]                              of a stream: last id, deleted id, entries added, groups
    ["f", name, bytes]                      a file of the state directory
    ["e", {"keys": n, "files": n}]          the last frame

Content: bytes of a string; names and values of a hash, members of a set, members and scores of a sorted set, items of
a list, ids and lists of fields of a stream, one after the other. An entry without fields is deleted, but still pending.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgpack

from charonia.errors import InvalidArgument

FORMAT = 1
MAGIC = b"CHARONIA STATE\n"
TYPES = ("string", "hash", "set", "zset", "list", "stream")

_LENGTH_BYTES = 4
_DIGEST_BYTES = 32
_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Summary:
    """What a file says of itself, once its checksum and frames have been checked."""

    header: dict[str, Any]
    keys: int
    files: int
    size_bytes: int


class StateWriter:
    """Writes the file `path`; a context manager that leaves nothing behind when it ends with an error.

    Raises `InvalidArgument` when the file exists, unless `overwrite`, or cannot be written.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, overwrite: bool) -> None:
        self._path, self._overwrite = path, overwrite
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._file: IO[bytes] | None = None
        self._header = header
        self.keys = self.files = self.size_bytes = 0

    def __enter__(self) -> StateWriter:
        if not self._overwrite:
            refuse_existing(self._path)
        with _refused(self._path):
            self._temporary.unlink(missing_ok=True)
            # what callers sent and were answered is in it: for its owner alone
            self._file = open(self._temporary, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600))
            self._write(MAGIC)
            self.add({**self._header, "format": FORMAT})
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a full disk: it has been told
                self._file.close()
            self._temporary.unlink(missing_ok=True)

    def add(self, frame: Any) -> None:
        """Write one frame."""
        packed = msgpack.packb(frame)
        with _refused(self._path):
            self._write(len(packed).to_bytes(_LENGTH_BYTES, "big"))
            self._write(packed)
        if type(frame) is list:
            self.keys += frame[0] == "k"
            self.files += frame[0] == "f"

    def finish(self) -> None:
        """End the file and put it where it belongs."""
        self.add(["e", {"keys": self.keys, "files": self.files}])
        file = self._file
        if file is None:
            raise RuntimeError("the file is not open")
        with _refused(self._path):
            self._write(bytes(_LENGTH_BYTES))
            file.write(self._digest.digest())
            file.flush()
            os.fsync(file.fileno())
            if self._overwrite:
                self._temporary.replace(self._path)
            else:
                os.link(self._temporary, self._path)  # refuses where a rename would replace
            _sync_directory(self._path.parent)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            raise RuntimeError("the file is not open")
        self._file.write(data)
        self._digest.update(data)
        self.size_bytes += len(data)


def refuse_existing(path: Path) -> None:
    """Raises `InvalidArgument`."""
    if os.path.lexists(path):
        raise InvalidArgument(f"'{path}' exists; --overwrite replaces it")


def check(path: Path) -> Summary:
    """Read a file to its end without using it: its checksum, then the form of every frame. Raises `InvalidArgument`."""
    with _refused(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidArgument(f"'{path}' is no exported state of charonia")
        file.seek(0)
        digest, left = hashlib.blake2b(digest_size=_DIGEST_BYTES), size - _DIGEST_BYTES
        while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
        if left < 0 or file.read() != digest.digest():
            raise InvalidArgument(f"'{path}' is damaged or incomplete: its checksum does not match")
    header: dict[str, Any] = {}
    end: dict[str, int] = {}
    keys = files = 0
    for frame in frames(path):
        if not header:
            header = frame
            continue
        keys += frame[0] == "k"
        files += frame[0] == "f"
        if frame[0] == "e":
            end = frame[1]
    if (end.get("keys"), end.get("files")) != (keys, files):
        raise InvalidArgument(f"'{path}' is not what it says: {keys} keys and {files} files, {end} at its end")
    return Summary(header, keys, files, size)


def frames(path: Path) -> Iterator[Any]:
    """The frames of a file, the header first. Raises `InvalidArgument` for one that is not as it should be."""
    with _refused(path), path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - len(MAGIC) - _DIGEST_BYTES
        file.seek(len(MAGIC))
        first, kind = True, ""
        while True:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "big")
            left -= _LENGTH_BYTES + length
            if left < 0:
                raise InvalidArgument(f"'{path}' ends within a frame")
            if not length:
                return
            try:
                frame = msgpack.unpackb(file.read(length), strict_map_key=False)
            except (ValueError, TypeError) as error:  # `TypeError`: a map whose keys are lists
                raise InvalidArgument(f"'{path}' has a frame that cannot be read: {error}") from None
            if first:
                _check_header(path, frame)
            else:
                kind = _check_frame(path, frame, kind)
            first = False
            yield frame


def _check_header(path: Path, frame: Any) -> None:
    found = frame.get("format") if type(frame) is dict else None
    if type(found) is not int or found < 1:
        raise InvalidArgument(f"'{path}' has no header")
    if found > FORMAT:
        raise InvalidArgument(
            f"'{path}' has format {found}, written by charonia {frame.get('charonia', '?')}; this release reads up to "
            f"{FORMAT}: import it with that release or a newer one"
        )


def _check_frame(path: Path, frame: Any, kind: str) -> str:
    """The type of the key that the next frames may go on with."""
    match frame:
        case ["k", bytes(), str(of), int(expires_ms), content] if (
            of in TYPES and expires_ms >= 0 and _fits(of, content)
        ):
            return of
        case ["m", content] if kind and _fits(kind, content):
            return kind
        case ["p", bytes(), list(pending)] if kind == "stream" and not len(pending) % 4 and _are_pending(pending):
            return kind
        case ["s", {"last": bytes(), "deleted": bytes(), "added": int(), "groups": list(groups)}] if kind == "stream":
            if all(map(_is_group, groups)):
                return ""
        case ["f", str(name), bytes()] if name and "/" not in name and not name.startswith("."):
            return ""
        case ["e", dict()]:
            return ""
    raise InvalidArgument(f"'{path}' has a frame that is not known: {str(frame)[:80]}")


def _fits(kind: str, content: Any) -> bool:
    if kind == "string":
        return type(content) is bytes
    if type(content) is not list:
        return False
    if kind == "stream":
        return not len(content) % 2 and all(
            type(entry_id) is bytes and type(fields) is list and not len(fields) % 2
            for entry_id, fields in zip(content[::2], content[1::2], strict=True)
        )
    return (kind in ("set", "list") or not len(content) % 2) and all(type(item) is bytes for item in content)


def _are_pending(flat: list[Any]) -> bool:
    return all(map(_is_pending, zip(*[iter(flat)] * 4, strict=True)))


def _is_pending(entry: tuple[Any, ...]) -> bool:
    return tuple(map(type, entry)) == (bytes, bytes, int, int)


def _is_group(group: Any) -> bool:
    match group:
        case {"name": bytes(), "last": bytes(), "read": int() | None, "consumers": list(consumers)}:
            return all(type(consumer) is bytes for consumer in consumers)
    return False


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise InvalidArgument(f"'{path}' exists; --overwrite replaces it") from None
    except OSError as error:
        raise InvalidArgument(f"'{path}' cannot be read or written: {error.strerror}") from None
