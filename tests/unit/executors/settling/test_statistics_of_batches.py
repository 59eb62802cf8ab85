"""Statistics increments of one batch (X1-X4)."""

from __future__ import annotations

import numpy as np

from charonia.errors import InternalError
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, pack_request, request_meta, unpack_request
from executors.batches.batch_results import BACKEND, Executed, Execution, Failure, count_cancel, count_response
from executors.settling.settlement import increments


def record(accepted_ns: int, rows: int = 1) -> RequestRecord:
    tensor = Tensor.of("x", np.zeros((rows, 1), np.float32))
    packed = pack_request(
        bytes(16),
        b"",
        b"",
        request_meta(1, "", [tensor], (), {}),
        [tensor.data],
        rows=rows,
        signature=0,
        level=0,
        accepted_ns=accepted_ns,
    )
    return unpack_request(packed)


MS = 1_000_000
RECORDS = [record(1000 * MS), record(1001 * MS, rows=3), record(1002 * MS)]
EXECUTED = Executed(
    [b""] * 3,
    [Execution((0, 1), 5, 1010 * MS, 1020 * MS, 1, 20, 300)],
    [Failure(2, InternalError("no"), BACKEND, 1020 * MS)],
)


def test_each_request_counts_the_batchs_durations_in_full() -> None:
    assert increments(RECORDS, EXECUTED) == {
        "success_count": 2,
        "success_ns": (20 + 19) * MS,
        "queue_count": 2,
        "queue_ns": (10 + 9) * MS,
        "compute_input_count": 2,
        "compute_input_ns": 2,
        "compute_infer_count": 2,
        "compute_infer_ns": 40,
        "compute_output_count": 2,
        "compute_output_ns": 600,
        "inference_count": 4,
        "execution_count": 1,
        "b5_count": 1,
        "b5_input_ns": 1,
        "b5_infer_ns": 20,
        "b5_output_ns": 300,
        "last_inference_ms": 1010,
        "fail_count": 1,
        "fail_ns": 18 * MS,
        "fail_BACKEND": 1,
    }


def test_only_requests_that_were_won_count() -> None:
    mine = increments(RECORDS, EXECUTED, [False, True, False])
    assert (mine["success_count"], mine["inference_count"], mine["execution_count"]) == (1, 3, 1)
    assert mine["compute_infer_ns"] == 20
    assert "fail_count" not in mine
    assert increments(RECORDS, EXECUTED, [False] * 3) == {}


def test_a_clock_that_is_behind_never_makes_a_negative_duration() -> None:
    late = [record(10**18)]
    executed = Executed([b""], [Execution((0,), 1, 5, 6, 0, 0, 0)])
    counted = increments(late, executed)
    assert counted["queue_ns"] == counted["success_ns"] == 0


def test_single_responses_count_with_the_end_of_their_request() -> None:
    """X5."""
    counts: dict[str, int] = {}
    count_response(counts, 0, "success", 5, 2)
    count_response(counts, 0, "fail", 5, 0)
    count_response(counts, 1, "empty", 3, 1)
    count_response(counts, 100_000, "success", 3, 1)
    assert counts == {
        "r0_infer_count": 2,
        "r0_infer_ns": 10,
        "r0_output_count": 1,
        "r0_output_ns": 2,
        "r0_success_count": 1,
        "r0_success_ns": 7,
        "r0_fail_count": 1,
        "r0_fail_ns": 5,
        "r1_infer_count": 1,
        "r1_infer_ns": 3,
        "r1_empty_count": 1,
        "r1_empty_ns": 4,
    }
    executed = Executed([b"a", b"b"], responses={0: counts, 1: {"r0_infer_count": 1}})
    records = [record(0), record(0)]
    assert increments(records, executed)["r0_infer_count"] == 3
    assert increments(records, executed, [False, True]) == {"r0_infer_count": 1}
    executed.cancelled = {0}
    count_cancel(counts, 1, 9)
    count_cancel(counts, 100_000, 9)
    found = increments(records, executed, [False, False])
    assert found == counts, "what a cancelled request was given counts, although others settle it"
    assert (found["r1_cancel_count"], found["r1_cancel_ns"]) == (1, 9)
