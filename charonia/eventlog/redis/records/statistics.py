"""Statistics as the scripts add them up, and the hash `s:{m}:<version>:<hash>` as numbers again. Pure.

What one execution of a batch adds is always the same names: it goes as one packed field, `run:<rows>`, which costs the
server a tenth of what seventeen fields do. Anything else goes name by name. The script is fold_statistics.lua.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from charonia.eventlog.redis.server.packing import Argument

_RUN = (
    *("success_count", "success_ns", "queue_count", "queue_ns"),
    *("compute_input_count", "compute_input_ns", "compute_infer_count", "compute_infer_ns"),
    *("compute_output_count", "compute_output_ns", "inference_count", "execution_count"),
)
_OF_SIZE = ("_count", "_input_ns", "_infer_ns", "_output_ns")
_LATEST = "last_inference_ms"
_FIELD = b"run:"
_PACKED = struct.Struct(f"<{len(_RUN) + len(_OF_SIZE) + 1}d")
_HIGHEST = 2**52
"""Sums up to here are exact in a packed field; the script moves what would pass it to fields of their own."""
_MOST_PLANS = 1000

_plans: dict[tuple[str, ...], bytes] = {}


def amounts_of(increments: Mapping[str, int]) -> tuple[Argument, list[Argument]]:
    """Increments as arguments of scripts: "run", its field and value; or how many are sums, all names, all values."""
    names = tuple(increments)
    field = _plans.get(names)
    if field is None:
        if len(_plans) >= _MOST_PLANS:  # hostile variety
            _plans.clear()
        field = _plans[names] = _field_of(names)
    if field:
        values = increments.values()
        if min(values) >= 0 and max(values) <= _HIGHEST:
            return b"run", [field, _PACKED.pack(*values)]
    sums = [name for name, value in increments.items() if value and not name.startswith("last_")]
    added = sums + [name for name in increments if name.startswith("last_")]
    return len(sums), [*added, *[increments[name] for name in added]]


def statistics_of(raw: Sequence[bytes]) -> dict[str, int]:
    """The hash's fields, names and values alternating, with those of runs added to their names."""
    totals: dict[str, int] = {}
    for field, value in zip(raw[::2], raw[1::2], strict=True):
        if field.startswith(_FIELD):
            added = zip(_names(field[len(_FIELD) :].decode()), map(int, _PACKED.unpack(value)), strict=True)
        else:
            added = zip((field.decode(),), (int(value),), strict=True)
        for name, number in added:
            known = totals.get(name, 0)
            totals[name] = max(known, number) if name.startswith("last_") else known + number
    return totals


def _field_of(names: tuple[str, ...]) -> bytes:
    """The field of a run with these names, b"" when they are not those of one."""
    if len(names) != len(_RUN) + len(_OF_SIZE) + 1:
        return b""
    rows = names[len(_RUN)].removeprefix("b").removesuffix("_count")
    return _FIELD + rows.encode() if rows.isdecimal() and rows.isascii() and names == _names(rows) else b""


def _names(rows: str) -> tuple[str, ...]:
    return (*_RUN, *[f"b{rows}{suffix}" for suffix in _OF_SIZE], _LATEST)
