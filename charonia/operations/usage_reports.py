"""`charonia usage`: what tenants have used of each model, from the hours that executors added up (ADR 0055)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from charonia import keys
from charonia.errors import InvalidArgument
from charonia.eventlog.port import EventLog
from charonia.facts.usage import DAY_S, HOUR_S, KEPT_DAYS, UsageRow, as_document, rows_of, total

Period = Literal["all", "day", "hour"]

_MOST_MODELS = 100_000
_MARGIN_DAYS = 2
"""Days that are read beyond those that are kept: executors delete the oldest when a new one begins."""


@dataclass(frozen=True, slots=True)
class Question:
    """Which usage, by what. Times are Unix time; hours that begin before `until_s` and end after `since_s` count."""

    since_s: float
    until_s: float
    models: Sequence[str] = ()
    tenants: Sequence[str] = ()
    period: Period = "all"


async def usage(log: EventLog, question: Question, now_ns: int) -> dict[str, Any]:
    """Rows by tenant, model and period, in this order, and their total. Raises `InvalidArgument` for an empty span."""
    if question.since_s >= question.until_s:
        raise InvalidArgument("--since must be earlier than --until")
    now_s = now_ns / 1e9
    first = max(int(question.since_s), int(now_s) - (KEPT_DAYS + _MARGIN_DAYS) * DAY_S) // DAY_S
    last = int(min(question.until_s, now_s)) // DAY_S
    known = [name.decode() for name in await log.due(keys.USED_MODELS, now_ns // 1000, _MOST_MODELS)]
    rows: list[UsageRow] = []
    for model in question.models or sorted(known):
        for day in range(first, last + 1):
            rows += rows_of(model, day, await log.statistics(keys.usage(model, day)))
    chosen = [row for row in rows if _is_wanted(row, question)]
    return {
        "since": _moment(question.since_s),
        "until": _moment(question.until_s),
        "period": question.period,
        "usage": grouped(chosen, question.period),
        "total": as_document(total(chosen)),
    }


def _is_wanted(row: UsageRow, question: Question) -> bool:
    if question.tenants and row.tenant not in question.tenants:
        return False
    return row.start_s + HOUR_S > question.since_s and row.start_s < question.until_s


def grouped(rows: Iterable[UsageRow], period: Period) -> list[dict[str, Any]]:
    """The sums of rows with the same tenant, model and period."""
    groups: dict[tuple[str, str, int], list[UsageRow]] = {}
    for row in rows:
        length_s = {"all": 0, "day": DAY_S, "hour": HOUR_S}[period]
        start_s = row.start_s // length_s * length_s if length_s else 0
        groups.setdefault((row.tenant, row.model, start_s), []).append(row)
    found = []
    for (tenant, model, start_s), members in sorted(groups.items()):
        about: dict[str, Any] = {"tenant": tenant, "model": model}
        if period != "all":
            about["from"] = _moment(start_s)
        found.append(about | as_document(total(members)))
    return found


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
