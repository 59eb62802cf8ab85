"""What requests have used, by tenant, model and hour: the amounts, and their place in the log (ADR 0055). Pure.

Executors add up what they ran (`executors.settling.usage_counts`) and add it to `us:{m}:<day>` about once a second,
with names `<hour><amount><tenant>`; hours and days are UTC's. `charonia usage` reads them.
"""

from __future__ import annotations

import json
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
)
"""What is added up. `requests` are those that were answered, `failures` those that ended with an error in an executor.

`share_ppm`: the sum of their shares of their batches, in millionths. `instance_ns`: the same shares of the time that
instances spent on the batches. `queue_ns`: from acceptance to the start of the batch. Bytes are those of tensors.
"""
REQUESTS, FAILURES, ROWS, SHARE_PPM, INSTANCE_NS, QUEUE_NS, INPUT_BYTES, OUTPUT_BYTES, TOKENS = range(len(AMOUNTS))
_LETTERS = "nfrsiqabt"
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
"""Names in one write: fifty tenants with one hour. One tenant's of several hours may be at most 24 * 9."""

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
        "queue_s": amounts[QUEUE_NS] / 1e9,
        "input_bytes": amounts[INPUT_BYTES],
        "output_bytes": amounts[OUTPUT_BYTES],
        "tokens": amounts[TOKENS],
        "batch_share": amounts[SHARE_PPM] / PPM / answered if answered else None,
    }


def receipt(amounts: Sequence[int], batch_rows: int, tenant: str, executor: str, batch_id: str, attempt: int) -> str:
    """What one answered request has used, as the text of a response parameter: a JSON object."""
    used = as_document(amounts)
    for name in ("requests", "failures"):
        del used[name]
    about = {"batch_rows": batch_rows, "executor": executor, "batch": batch_id, "attempt": attempt}
    return json.dumps(used | about | ({"tenant": tenant} if tenant else {}), separators=(",", ":"))
