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


def add(totals: dict[str, int], increments: Mapping[str, int]) -> None:
    """Add increments to totals; of `last_*`, keep the maximum."""
    for name, amount in increments.items():
        known = totals.get(name, 0)
        totals[name] = max(known, amount) if name.startswith("last_") else known + amount
