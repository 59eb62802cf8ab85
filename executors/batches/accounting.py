"""The results of executed batches, and the increments they add to their model's statistics. Pure.

Increments are written once per batch into `s:{m}` and folded by the gateways; times are ns. A batch's durations count
in full for each of its requests, as in Triton. Requests that were settled elsewhere first are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from charonia.errors import CharoniaError
from charonia.wire import RequestRecord

MAX_COUNTED_RESPONSES = 1000
"""Statistics of single responses stop after this many responses to one request."""

BACKEND = "fail_BACKEND"
OTHER = "fail_OTHER"
REJECTED = "fail_REJECTED"
CANCELED = "fail_CANCELED"


@dataclass(slots=True)
class Execution:
    """One successful run of a model.

    `indices` are the successful requests' positions in the batch; `rows` includes those of failed ones and of empty
    slots. `start_ns` and `end_ns` are wall clock; the three durations are monotonic.
    """

    indices: tuple[int, ...]
    rows: int
    start_ns: int
    end_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int
    first: bool = True
    """Whether the run itself is counted with these requests; False for requests of the run that ended later."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed request of a batch. `reason` is one of the names above, `end_ns` is wall clock."""

    index: int
    error: CharoniaError
    reason: str
    end_ns: int


@dataclass(frozen=True, slots=True)
class Death:
    """How an instance died under a batch. `stderr` holds its last lines; `blameless`: the batch is not the cause.

    `shared_instance`: the instance ran other batches too, so which of them caused the death is unknown.
    """

    instance: str
    reason: str
    stderr: str = ""
    blameless: bool = False
    shared_instance: bool = False


@dataclass(slots=True)
class Executed:
    """The results of a batch: one response record per request, in order, and what to count.

    An answer is empty when the request was left out because it was settled already or, with `death`, because the
    instance died first.
    """

    answers: list[bytes]
    executions: list[Execution] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    death: Death | None = None
    rescheduled: set[int] = field(default_factory=set)
    """Requests that their model rescheduled (S41). They have no answer yet."""
    responses: dict[int, dict[str, int]] = field(default_factory=dict)
    """By request: the increments for its single responses, where they are counted."""
    cancelled: set[int] = field(default_factory=set)
    """Requests that were cancelled while they ran. They are settled elsewhere, but their responses are counted."""


def increments(
    records: Sequence[RequestRecord], executed: Executed, won: Sequence[bool] | None = None
) -> dict[str, int]:
    """Return the increments of a batch; with `won`, only of the requests whose settlement was won.

    Responses of cancelled requests are counted in any case. Empty when there is nothing to count.
    """
    totals: dict[str, int] = {}
    for execution in executed.executions:
        indices = execution.indices if won is None else [i for i in execution.indices if won[i]]
        if indices:
            _add_execution(totals, records, execution, indices)
    for failure in executed.failures:
        if won is None or won[failure.index]:
            waited = failure.end_ns - records[failure.index].accepted_ns
            _add(totals, "fail_count", 1)
            _add(totals, "fail_ns", max(0, waited))
            _add(totals, failure.reason, 1)
    for index, counts in executed.responses.items():
        if won is None or won[index] or index in executed.cancelled:
            for name, value in counts.items():
                _add(totals, name, value)
    return totals


def count_response(
    counts: dict[str, int], index: int, kind: Literal["success", "fail", "empty"], infer_ns: int, output_ns: int
) -> None:
    """Add the response with this index to a request's counts. A response without outputs has no output time."""
    if index >= MAX_COUNTED_RESPONSES:
        return
    added = {"infer": infer_ns, kind: infer_ns + output_ns}
    if kind != "empty" and output_ns:
        added["output"] = output_ns
    for name, spent_ns in added.items():
        _add(counts, f"r{index}_{name}_count", 1)
        _add(counts, f"r{index}_{name}_ns", spent_ns)


def count_cancel(counts: dict[str, int], index: int, spent_ns: int) -> None:
    """Count a cancellation before the response with this index. `spent_ns`: until the model ended the request."""
    if index < MAX_COUNTED_RESPONSES:
        _add(counts, f"r{index}_cancel_count", 1)
        _add(counts, f"r{index}_cancel_ns", spent_ns)


def _add_execution(
    totals: dict[str, int], records: Sequence[RequestRecord], execution: Execution, indices: Sequence[int]
) -> None:
    start, end = execution.start_ns, execution.end_ns
    count = len(indices)
    chosen = records if count == len(records) else [records[index] for index in indices]
    accepted = [record.accepted_ns for record in chosen]
    if max(accepted) <= start:
        together = sum(accepted)
        queued, whole = count * start - together, count * end - together
    else:  # the clocks of two machines differ: no duration may be negative
        queued = sum([max(0, start - at) for at in accepted])
        whole = sum([max(0, end - at) for at in accepted])
    size = f"b{execution.rows}"
    added = {
        "success_count": count,
        "success_ns": whole,
        "queue_count": count,
        "queue_ns": queued,
        "compute_input_count": count,
        "compute_input_ns": count * execution.input_ns,
        "compute_infer_count": count,
        "compute_infer_ns": count * execution.infer_ns,
        "compute_output_count": count,
        "compute_output_ns": count * execution.output_ns,
        "inference_count": sum([record.rows for record in chosen]),
        "execution_count": 1,
        size + "_count": 1,
        size + "_input_ns": execution.input_ns,
        size + "_infer_ns": execution.infer_ns,
        size + "_output_ns": execution.output_ns,
    }
    if not execution.first:
        for name in ("execution_count", size + "_count", size + "_input_ns", size + "_infer_ns", size + "_output_ns"):
            del added[name]
    last_ms = max(totals.get("last_inference_ms", 0), start // 1_000_000)
    if totals:
        for name, value in added.items():
            _add(totals, name, value)
    else:  # nearly always: a batch is one execution
        totals.update(added)
    totals["last_inference_ms"] = last_ms


def _add(totals: dict[str, int], name: str, value: int) -> None:
    totals[name] = totals.get(name, 0) + value
