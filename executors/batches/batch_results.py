"""The results of executed batches. Pure; what they add to statistics is `executors.settling.settlement`'s.

Times are ns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct, field

from charonia.errors import CharoniaError
from charonia.facts import counters

MAX_COUNTED_RESPONSES = 1000
"""Statistics of single responses stop after this many responses to one request."""

BACKEND = "BACKEND"
OTHER = "OTHER"
REJECTED = "REJECTED"


class Execution(Struct):
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
    """One failed request of a batch. `reason` is one of the names above, `end_ns` is wall clock.

    `ran_ns` is how long the run took in which it failed, of `batch_rows`; both are 0 where no run began.
    """

    index: int
    error: CharoniaError
    reason: str
    end_ns: int
    ran_ns: int = 0
    batch_rows: int = 0

    def spent_ns(self, rows: int) -> int:
        """What a request of so many rows has used of its instance's time: its share of the run."""
        return rows * self.ran_ns // self.batch_rows if self.batch_rows else 0


@dataclass(frozen=True, slots=True)
class Death:
    """How an instance died under a batch. `stderr` holds its last lines; `blameless`: the batch is not the cause.

    `shared_instance`: the instance ran other batches too, so which of them caused the death is unknown. `ends_process`:
    no instance of this process can do its work any more.
    """

    instance: str
    reason: str
    stderr: str = ""
    blameless: bool = False
    shared_instance: bool = False
    ends_process: bool = False


class Executed(Struct):
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
    tokens: dict[int, int] = field(default_factory=dict)
    """By request: its tokens, of prompt and answer, where its model tells them."""
    sent_bytes: dict[int, int] = field(default_factory=dict)
    """By request: the tensor bytes of its responses before the last one."""


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
        counters.add(counts, {f"r{index}_{name}_count": 1, f"r{index}_{name}_ns": spent_ns})


def fail_response(counts: dict[str, int], index: int) -> None:
    """Count the response with this index as a failure, if it was counted as a success: it could not be sent."""
    for unit in ("count", "ns"):
        if (value := counts.pop(f"r{index}_success_{unit}", None)) is not None:
            counters.add(counts, {f"r{index}_fail_{unit}": value})


def count_cancel(counts: dict[str, int], index: int, spent_ns: int) -> None:
    """Count a cancellation before the response with this index. `spent_ns`: until the model ended the request."""
    if index < MAX_COUNTED_RESPONSES:
        counters.add(counts, {f"r{index}_cancel_count": 1, f"r{index}_cancel_ns": spent_ns})


def fail_answered(executed: Executed, index: int, failure: bytes, error: CharoniaError, end_ns: int) -> None:
    """Turn a request that was answered into one that failed, as its answer cannot be sent. `failure` is its record."""
    executed.answers[index] = failure
    ran_ns = rows = 0
    for execution in executed.executions:
        if index in execution.indices:
            execution.indices = tuple([one for one in execution.indices if one != index])
            ran_ns, rows = execution.input_ns + execution.infer_ns + execution.output_ns, execution.rows
    executed.executions = [execution for execution in executed.executions if execution.indices]
    if all(failed.index != index for failed in executed.failures):
        executed.failures.append(Failure(index, error, BACKEND, end_ns, ran_ns, rows))
