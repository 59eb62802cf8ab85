"""The heads of chains in a file outside the log: one JSON object a line, added at its end only (ADR 0061).

    {"model": "identity", "seal": 12, "entry": "1763900000000-4", "link": "5be1...", "sealed": "2026-11-23T12:00:00Z"}

`link` has 64 hex digits. Who can write to the log can make a new chain from its beginning; with these lines it does not
agree.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from charonia.errors import InvalidArgument
from charonia.operations.text.rendering import moment

from .chain_verification import Head

_LINK = re.compile(r"[0-9a-f]{64}")


def read_heads(file: Path) -> dict[str, dict[int, Head]]:
    """The heads in a file by model and number, none without a file. Raises `InvalidArgument` if it has other lines."""
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the heads in '{file}' cannot be read: {error}") from None
    found: dict[str, dict[int, Head]] = {}
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        head = _read(line)
        if head is None:
            raise InvalidArgument(f"line {place} of '{file}' is no head of a chain")
        known = found.setdefault(head.model, {}).setdefault(head.seal, head)
        if known.link != head.link:
            raise InvalidArgument(f"line {place} of '{file}' has another link of seal {head.seal} than a line before")
    return found


def add_heads(file: Path, heads: Sequence[Head]) -> None:
    """Add lines, which are on disk when this returns. Raises `InvalidArgument`."""
    text = "".join(f"{json.dumps(_document(head))}\n" for head in heads)
    try:
        with file.open("ab+") as out:
            if out.tell():
                out.seek(-1, os.SEEK_END)
                if out.read(1) != b"\n":  # an editor has left the last line without its end
                    text = f"\n{text}"
            out.write(text.encode())
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise InvalidArgument(f"the heads cannot be written to '{file}': {error.strerror}") from None


def _document(head: Head) -> dict[str, object]:
    about = {"model": head.model, "seal": head.seal, "entry": head.entry, "link": head.link}
    return {**about, "sealed": moment(head.sealed_ms * 1000)}


def _read(line: str) -> Head | None:
    try:
        told = json.loads(line)
        model, seal, entry, link, sealed = (told[name] for name in ("model", "seal", "entry", "link", "sealed"))
        sealed_ms = round(datetime.fromisoformat(sealed).timestamp() * 1000)
    except (ValueError, KeyError, TypeError):
        return None
    if not (isinstance(model, str) and type(seal) is int and isinstance(entry, str) and isinstance(link, str)):
        return None
    return Head(model, seal, entry, link, sealed_ms) if _LINK.fullmatch(link) else None
