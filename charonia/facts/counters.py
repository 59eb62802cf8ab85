"""The counters of a model version in `s:{m}`: their names, and how increments of them are added up. Pure.

The log keeps what one execution adds as one packed field, in which each number has its place
(`charonia/eventlog/redis/stored_records.py`, `charonia/eventlog/scripts/fold_statistics.lua`). So the names that
`of_execution` returns, and their order, are fixed: fields that older releases have packed must be read for ever.
A further counter of an execution is a name of its own beside them, and costs its batch the packed form.

`gateway/reports/model_statistics.py` reads all counters; `charonia/metrics/triton_counters.py` names those in metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

OF_REQUESTS = (
    *("success_count", "success_ns", "queue_count", "queue_ns"),
    *("compute_input_count", "compute_input_ns", "compute_infer_count", "compute_infer_ns"),
    *("compute_output_count", "compute_output_ns", "inference_count", "execution_count"),
)
LATEST = "last_inference_ms"
_OF_ONE_REQUEST = frozenset(OF_REQUESTS[:10])
"""Those that grow with each request that succeeds: its count by one, its times by what they took."""
OF_RUN = slice(len(OF_REQUESTS) - 1, -1)
"""Of the counters of an execution those that count the run itself, not its requests."""


@lru_cache(1024)
def of_size(rows: int) -> tuple[str, ...]:
    """The counters of executions of so many rows: their number, and their input, infer and output times."""
    return (f"b{rows}_count", f"b{rows}_input_ns", f"b{rows}_infer_ns", f"b{rows}_output_ns")


@lru_cache(1024)
def of_execution(rows: int) -> tuple[str, ...]:
    """The counters of an execution of so many rows."""
    return (*OF_REQUESTS, *of_size(rows), LATEST)


def of_failures(count: int, waited_ns: int, reason: str) -> dict[str, int]:
    """The increments of requests that failed after `waited_ns` in all; `reason` is M1's."""
    return {"fail_count": count, "fail_ns": max(0, waited_ns), f"fail_{reason}": count}


def without(increments: Mapping[str, int], requests: int, rows: int) -> dict[str, int]:
    """Return increments of executions without `requests` of their successful requests, which had `rows` rows together.

    Each request has the same share of the times. `leave_out` in `charonia/eventlog/scripts/fold_statistics.lua` does
    the same.
    """
    total = max(1, increments.get("success_count", 0))
    left = max(0, total - requests)
    kept = dict(increments)
    for name, amount in increments.items():
        if name == "inference_count":
            kept[name] = max(0, amount - rows)
        elif name in _OF_ONE_REQUEST:
            kept[name] = max(0, amount - requests) if name.endswith("_count") else amount * left // total
    return kept


def share_of(increments: Mapping[str, int], requests: int, rows: int) -> dict[str, int]:
    """Return the part of increments of executions that `without` leaves out: that of `requests` successful requests."""
    total = increments.get("success_count", 0)
    if not total or not requests:
        return {}
    share = {name: amount * requests // total for name, amount in increments.items() if name in _OF_ONE_REQUEST}
    share |= {name: requests for name in share if name.endswith("_count")}
    return share | {"inference_count": rows}


def of_runs(increments: Mapping[str, int]) -> dict[str, int]:
    """Return only the increments that do not belong to successful requests: of the executions, and of failures."""
    left_out = {*_OF_ONE_REQUEST, "inference_count"}
    return {name: amount for name, amount in increments.items() if name not in left_out}


def add(totals: dict[str, int], increments: Mapping[str, int]) -> None:
    """Add increments to totals; of `last_*`, keep the maximum."""
    for name, amount in increments.items():
        known = totals.get(name, 0)
        totals[name] = max(known, amount) if name.startswith("last_") else known + amount
