"""Renders operators' answers as text: aligned tables, ages, sizes, times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

Column = tuple[str, str]
"""Heading and the name of the value."""


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[str]:
    """Aligned columns under their headings; numbers to the right."""
    cells = [[_cell(name, row.get(name)) for _, name in columns] for row in rows]
    widths = [max(len(heading), *(len(row[i]) for row in cells), 0) for i, (heading, _) in enumerate(columns)]
    right = [all(_is_number(row.get(name)) for row in rows) for _, name in columns]
    lines = ["  ".join(heading.upper().ljust(width) for (heading, _), width in zip(columns, widths, strict=True))]
    for row in cells:
        padded = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(padded))
    return [line.rstrip() for line in lines]


def pairs(document: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """One value a line behind its name."""
    shown = [(name, _cell(name, document.get(name))) for name in names if document.get(name) not in (None, "", [])]
    width = max((len(name) for name, _ in shown), default=0)
    return [f"{_plain_name(name).ljust(width)}  {text}" for name, text in shown]


def age(seconds: float) -> str:
    """`12ms`, `3.4s`, `5m12s`, `2h05m`, `3d04h`."""
    if seconds < 0:
        return "-" + age(-seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"


def size(size_bytes: int) -> str:
    """`512 B`, `1.5 KiB`, ..."""
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def moment(time_us: int) -> str:
    """UTC, to the millisecond."""
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def detail(values: Mapping[str, Any]) -> str:
    """`name=value` words of an event."""
    return " ".join(f"{name}={one_line(value)}" for name, value in values.items())


def one_line(value: object) -> str:
    """Text of the log for a terminal: control characters and line breaks are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_s") and isinstance(value, (int, float)):
        return age(value)
    if name.endswith("_us") and isinstance(value, int):
        return moment(value)
    if name == "bytes" or name.endswith("_bytes"):
        return size(value)
    if isinstance(value, Mapping):
        return detail(value) or "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(one_line(item) for item in value)
    return one_line(value)


def _plain_name(name: str) -> str:
    return name.removesuffix("_us").removesuffix("_s").replace("_", " ")
