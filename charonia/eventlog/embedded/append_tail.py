"""Repairs an append-only file that ends within a write, as a power cut or a full disk leaves it.

Only such an end is cut off: an incomplete command, a transaction without its end, and zeros after either. What is cut
off is kept beside the state and reported. A file that is damaged before its end is left alone: what follows the damage
is work that was accepted.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from charonia.errors import StartupError

from .programs import ServerBinary, ask
from .state_files import StateFiles, write_whole

KEPT = "lost-writes-"
"""What the names of kept ends and their reports begin with, in the state directory."""

REPORTED = frozenset(("time", "file", "offset", "lost_bytes", "lost", "kept"))
"""What a report says."""

_ANALYZED = re.compile(rb"^AOF analyzed: .*\bok_up_to=(\d+)", re.MULTILINE)
_SHOWN = 5
_SHOWN_BYTES = 80


@dataclass(frozen=True, slots=True)
class Repair:
    """What was cut off: `lost_bytes` from `offset` of `file` on, now in `kept`; `writes` are its commands, in words."""

    file: str
    offset: int
    lost_bytes: int
    writes: tuple[str, ...]
    kept: str

    @property
    def text(self) -> str:
        shown = ", ".join(self.writes[:_SHOWN]) or "nothing but zeros"
        more = f" and {len(self.writes) - _SHOWN} more" if len(self.writes) > _SHOWN else ""
        return (
            f"the append-only file ended within a write: its last {self.lost_bytes} bytes, from byte {self.offset} of "
            f"{self.file} on, were cut off and kept in '{self.kept}'; lost: {shown}{more}"
        )


def repair(files: StateFiles, program: ServerBinary) -> Repair | None:
    """Cut an unfinished write off the end of the server's files, unless they ended in order; what was lost.

    The server must not run. Raises `StartupError` for a file that is damaged otherwise.
    """
    last = files.last
    if last is None or files.stopped_in_order() or not last.is_file() or not last.stat().st_size:
        return None
    if last.suffix != ".aof":  # a snapshot, which is whole or not there
        return None
    said, status = ask(program, "redis-check-aof", str(last))
    found = _ANALYZED.search(said)
    if status == 0 or found is None:  # one that cannot be asked repairs the commonest such end by itself
        return None
    return _cut(files, last, int(found[1]))


def _cut(files: StateFiles, last: Path, offset: int) -> Repair:
    size = last.stat().st_size
    with last.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        writes = unfinished(content, offset)
        if writes is None:
            raise StartupError(
                f"'{last}' is damaged at byte {offset} of {size}, and whole writes may follow: nothing was changed. "
                f"Restore it from a copy, or give up the {size - offset} bytes from there on: keep a copy of it, then "
                f"truncate --size={offset} {last}"
            )
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        kept = files.directory / f"{KEPT}{stamp}-{offset}.aof"
        write_whole(kept, content[offset:])
        made = Repair(last.name, offset, size - offset, tuple(writes), str(kept))
        about = {"time": stamp, "file": made.file, "offset": offset, "lost_bytes": made.lost_bytes}
        about |= {"lost": writes, "kept": made.kept}
        write_whole(kept.with_suffix(".json"), json.dumps(about, indent=1).encode() + b"\n")
        os.ftruncate(file.fileno(), offset)
        os.fsync(file.fileno())
    return made


def unfinished(content: bytes | mmap.mmap, offset: int) -> list[str] | None:
    """The writes from `offset` to the end, in words, if the file just ends there too early; None if it is damaged."""
    writes: list[str] = []
    size = len(content)
    while offset < size:
        if content[offset : offset + 1] == b"#":  # a remark of the server's, a line long
            end = content.find(b"\r\n", offset)
            offset = size if end < 0 else end + 2
            continue
        arguments, end = _command(content, offset)
        if end == _MALFORMED:
            return writes if _only_zeros(content, offset) else None
        if arguments:
            done = "" if end >= 0 else " (unfinished)"
            words = b" ".join(arguments[:2]).decode(errors="replace")
            writes.append("".join(sign if sign.isprintable() else "?" for sign in words) + done)
        if end < 0:
            return writes
        offset = end
    return writes


_ENDS_EARLY = -1
_MALFORMED = -2


def _command(content: bytes | mmap.mmap, offset: int) -> tuple[list[bytes], int]:
    """The beginnings of a command's arguments, and where it ends, `_ENDS_EARLY` or `_MALFORMED`."""
    arguments: list[bytes] = []
    count, at = _number(content, offset, b"*")
    if at < 0:
        return arguments, at
    for _ in range(count):
        length, begin = _number(content, at, b"$")
        if begin < 0:
            if begin == _MALFORMED and _only_zeros(content, at):
                return arguments, _ENDS_EARLY
            return arguments, begin
        at = begin + length + 2
        if at > len(content):
            shown = content[begin : min(begin + length, begin + _SHOWN_BYTES)]
            return [*arguments, shown], _ENDS_EARLY
        if content[at - 2 : at] != b"\r\n":
            # a file that was made longer before its bytes came ends in zeros within an argument
            return arguments, _ENDS_EARLY if _only_zeros(content, at - 2) else _MALFORMED
        arguments.append(content[begin : min(begin + length, begin + _SHOWN_BYTES)])
    return arguments, at


def _number(content: bytes | mmap.mmap, offset: int, sign: bytes) -> tuple[int, int]:
    """The number of a line `<sign><digits>\\r\\n`, and where the line ends, `_ENDS_EARLY` or `_MALFORMED`."""
    line = content[offset : offset + 24]
    found = re.match(rb"(\d{1,18})\r\n", line[1:])
    if line[:1] == sign and found is not None:
        return int(found[1]), offset + 1 + found.end()
    if not line or (len(line) < 24 and re.fullmatch(re.escape(sign) + rb"(\d{0,18}|\d{1,18}\r)", line)):
        return 0, _ENDS_EARLY
    return 0, _MALFORMED


def _only_zeros(content: bytes | mmap.mmap, offset: int) -> bool:
    """Whether nothing but zeros follows a prefix of a number's line, to the end."""
    size = len(content)
    line = content[offset : offset + 24]
    found = re.match(rb"[*$]?\d{0,18}\r?\n?\x00", line)
    if found is None:
        return offset >= size
    at = offset + found.end() - 1
    while at < size:
        piece = content[at : at + 1024 * 1024]
        if piece.count(0) != len(piece):
            return False
        at += len(piece)
    return True
