"""What requests have used, by tenant, model and hour: the amounts, and their place in the log (ADR 0055). Pure.

Executors add up what they ran (`executors.settling.usage_counts`) and add it to `us:{m}:<day>` about once a second,
with names `<hour><amount><tenant>`; hours and days are UTC's. `charonia usage` reads them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HOUR_S = 3600
HOURS = 24
DAY_S = HOUR_S * HOURS

AMOUNTS = (
    "requests",
    "failures",
    "rows",
    "share_ppm",
    "instance_ns",
    "queue_ns",
    "input_bytes",
    "output_bytes",
    "tokens",
    "failed_instance_ns",
)
"""What is added up. `requests` are those that were answered, `failures` those that ended with an error in an executor.

`share_ppm`: the sum of their shares of their batches, in millionths. `instance_ns`: the same shares of the time that
instances spent on the batches, of answered requests; `failed_instance_ns`: of failures. `queue_ns`: from acceptance to
the start of the batch. Bytes are those of tensors.
"""
(
    REQUESTS,
    FAILURES,
    ROWS,
    SHARE_PPM,
    INSTANCE_NS,
    QUEUE_NS,
    INPUT_BYTES,
    OUTPUT_BYTES,
    TOKENS,
    FAILED_INSTANCE_NS,
) = range(len(AMOUNTS))
_LETTERS = "nfrsiqabtw"
"""The amounts in names, in this order."""
PPM = 1_000_000
KEPT_DAYS = 62
"""Two months: a bill of the last one can still be made at the end of this one. An hour of one tenant with one model
takes 460 to 690 bytes of the log (measured, Valkey 9.1): a thousand tenants that call every hour take 11 to 14 MB a
day, up to 850 MB in these days, and one takes up to 1 MB."""

MOST_TENANTS = 1000
"""An executor names so many tenants of a model a day; the others are counted together, as `OTHERS`."""
OTHERS = "(others)"
MOST_WRITTEN = 450
"""Names in one write: 45 tenants with one hour. One tenant's of several hours may be at most 24 * 10."""

Amounts = list[int]
"""One number for each of `AMOUNTS`."""


def nothing() -> Amounts:
    return [0] * len(AMOUNTS)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What the requests of one tenant ("" for none) have used of one model in one hour. `start_s` is Unix time."""

    model: str
    tenant: str
    start_s: int
    amounts: Sequence[int]


def hour_of(now_ns: int) -> tuple[int, int]:
    """The day since 1970 and the hour of a wall clock time."""
    day, seconds = divmod(now_ns // 1_000_000_000, DAY_S)
    return day, seconds // HOUR_S


def increments(hour: int, by_tenant: Mapping[str, Amounts]) -> dict[str, int]:
    """The names and numbers to add for one hour."""
    return {
        f"{hour:02d}{letter}{tenant}": amount
        for tenant, amounts in by_tenant.items()
        for letter, amount in zip(_LETTERS, amounts, strict=True)
        if amount
    }


def in_parts(added: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Increments in parts of at most `MOST_WRITTEN` names, those of one tenant together: a server's script takes no
    more than some thousands.
    """
    if len(added) <= MOST_WRITTEN:
        yield dict(added)
        return
    by_tenant: dict[str, dict[str, int]] = {}
    for name, amount in added.items():
        by_tenant.setdefault(name[3:], {})[name] = amount
    part: dict[str, int] = {}
    for names in by_tenant.values():
        if part and len(part) + len(names) > MOST_WRITTEN:
            yield part
            part = {}
        part |= names
    yield part


def rows_of(model: str, day: int, kept: Mapping[str, int]) -> list[UsageRow]:
    """What the log has of one day. Names of a newer release, which are unknown here, are skipped."""
    found: dict[tuple[int, str], Amounts] = {}
    for name, amount in kept.items():
        hour, letter, tenant = name[:2], name[2:3], name[3:]
        if not (hour.isascii() and hour.isdecimal() and int(hour) < HOURS and letter and letter in _LETTERS):
            continue
        found.setdefault((int(hour), tenant), nothing())[_LETTERS.index(letter)] = amount
    return [
        UsageRow(model, tenant, day * DAY_S + hour * HOUR_S, amounts)
        for (hour, tenant), amounts in sorted(found.items())
    ]


def total(rows: Iterable[UsageRow]) -> Amounts:
    totals = nothing()
    for row in rows:
        totals = [one + more for one, more in zip(totals, row.amounts, strict=True)]
    return totals


def as_document(amounts: Sequence[int]) -> dict[str, Any]:
    """Amounts with their units: seconds, bytes, and the mean share of a batch, from 0 to 1 (None without requests)."""
    answered = amounts[REQUESTS]
    return {
        "requests": answered,
        "failures": amounts[FAILURES],
        "rows": amounts[ROWS],
        "instance_s": amounts[INSTANCE_NS] / 1e9,
        "failed_instance_s": amounts[FAILED_INSTANCE_NS] / 1e9,
        "queue_s": amounts[QUEUE_NS] / 1e9,
        "input_bytes": amounts[INPUT_BYTES],
        "output_bytes": amounts[OUTPUT_BYTES],
        "tokens": amounts[TOKENS],
        "batch_share": amounts[SHARE_PPM] / PPM / answered if answered else None,
    }


def receipt(
    amounts: Sequence[int], rows: int, batch_rows: int, tenant: str, executor: str, batch_id: str, attempt: int
) -> str:
    """What one request of so many rows has used, as the text of a response parameter: a JSON object.

    `batch_rows` is 0 for a request that failed before a batch of it began.
    """
    used = as_document(amounts)
    used["rows"] = rows
    failed = {}
    if amounts[FAILURES]:
        failed = {"failed": True}
        used["instance_s"] = used["failed_instance_s"]
        used["batch_share"] = rows / batch_rows if batch_rows else None
    for name in ("requests", "failures", "failed_instance_s"):
        del used[name]
    about = {"batch_rows": batch_rows, "executor": executor, "batch": batch_id, "attempt": attempt}
    return _text(used | about | failed | ({"tenant": tenant} if tenant else {}))


_SUMMED = ("instance_s", "queue_s", "input_bytes", "output_bytes", "tokens")
MOST_STEPS = 100
"""A receipt of an ensemble names so many steps; all count in its sums."""
_MOST_FAILED_STEPS = 2
_MOST_FAILED_BYTES = 1500
"""A failed request's receipt is a header or a trailer, of which clients take 8 KiB in all: it names its last steps."""
_MOST_NESTED_BYTES = 40_000
"""Of the receipt of a step that is an ensemble: of a larger one the sums alone are kept."""


class Steps:
    """The receipts of an ensemble's steps, added up as they arrive."""

    __slots__ = ("_count", "_last", "_sums")

    def __init__(self) -> None:
        self._sums: dict[str, float] = dict.fromkeys(_SUMMED, 0)
        self._last: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS)
        self._count = 0

    def add(self, model: str, version: int, text: object) -> None:
        """Add the receipt of one step, itself perhaps an ensemble's. A text that is no receipt is left out."""
        try:
            used = json.loads(text) if isinstance(text, str) else None
        except ValueError:
            used = None
        if not isinstance(used, dict):
            return
        self._count += 1
        if isinstance(text, str) and len(text) > _MOST_NESTED_BYTES:
            used = {name: used[name] for name in used if name != "steps"}
        self._last.append({"model": model, "version": version} | used)
        for name in _SUMMED:
            amount = used.get(name)
            if isinstance(amount, (int, float)) and not isinstance(amount, bool):
                self._sums[name] += amount

    def receipt(self, rows: int, tenant: str, attempt: int, *, failed: bool) -> str:
        """What a request of the ensemble has used: the sums over its steps, and the steps by name."""
        used: dict[str, Any] = {"rows": rows} | self._sums
        used |= {"instance_s": round(self._sums["instance_s"], 9), "queue_s": round(self._sums["queue_s"], 9)}
        used |= {"attempt": attempt} | ({"failed": True} if failed else {}) | ({"tenant": tenant} if tenant else {})
        steps = list(self._last)
        if failed:
            steps = [{name: one[name] for name in one if name != "steps"} for one in steps[-_MOST_FAILED_STEPS:]]
        text = _text(used | self._named(steps))
        return _text(used | self._named(())) if failed and len(text) > _MOST_FAILED_BYTES else text

    def _named(self, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
        left = self._count - len(steps)
        return {"steps": steps} | ({"steps_left_out": left} if left else {})


def _text(document: Mapping[str, Any]) -> str:
    """In ASCII: it may become a header."""
    return json.dumps(document, separators=(",", ":"))
