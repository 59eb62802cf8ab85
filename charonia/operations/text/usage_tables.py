"""What `charonia usage` prints: a table for people, comma-separated values for programs. Pure."""

from __future__ import annotations

import csv
import io
from typing import Any

from .rendering import one_line, table

_COLUMNS = (
    ("tenant", "tenant"),
    ("model", "model"),
    ("from", "from"),
    ("requests", "requests"),
    ("failures", "failures"),
    ("rows", "rows"),
    ("instance", "instance_s"),
    ("failed", "failed_instance_s"),
    ("queue", "queue_s"),
    ("in", "input_bytes"),
    ("out", "output_bytes"),
    ("tokens", "tokens"),
    ("share", "share"),
)
_VALUES = (
    "tenant",
    "model",
    "from",
    "requests",
    "failures",
    "rows",
    "instance_s",
    "queue_s",
    "input_bytes",
    "output_bytes",
    "tokens",
    "batch_share",
    "failed_instance_s",
)


def as_table(document: dict[str, Any]) -> list[str]:
    """One line for each row of the document, then the total."""
    span = f"{document['since']} to {document['until']}"
    if not document["usage"]:
        return [f"no requests ran from {span}"]
    columns = [column for column in _COLUMNS if column[0] != "from" or document["period"] != "all"]
    rows = [{**row, "tenant": row["tenant"] or "-", "share": _percent(row["batch_share"])} for row in document["usage"]]
    total = document["total"]
    if len(rows) > 1:
        rows.append({**total, "tenant": "total", "model": "", "from": "", "share": _percent(total["batch_share"])})
    return [span, *table(rows, columns)]


def as_csv(document: dict[str, Any]) -> list[str]:
    """The rows with a heading, RFC 4180. Times in seconds; `from` and a share that is unknown are empty."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(_VALUES)
    for row in document["usage"]:
        writer.writerow([_cell(row.get(name)) for name in _VALUES])
    return written.getvalue().splitlines()


def _cell(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0").rstrip(".")
    return one_line(value) if isinstance(value, str) else value


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
