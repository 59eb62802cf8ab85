"""Statistics of ensembles: their compute times are the sums of their steps' (S56)."""

from __future__ import annotations

from batcher.ensembles.ensemble_statistics import Tally, Totals

MS = 1_000_000


def test_steps_add_up_and_requests_too() -> None:
    totals, tally = Totals(), Tally(start_ns=12 * MS)
    tally.add((1, 20, 3))
    tally.add((4, 50, 6))
    totals.succeeded(b"s", 2, 10 * MS, tally, 30 * MS)
    totals.succeeded(b"s", 2, 11 * MS, Tally(13 * MS, 1, 1, 1), 31 * MS)
    counts = totals.by_key[b"s"]
    assert (counts["success_count"], counts["success_ns"]) == (2, 40 * MS)
    assert (counts["queue_count"], counts["queue_ns"]) == (2, 4 * MS)
    assert (counts["compute_input_ns"], counts["compute_infer_ns"], counts["compute_output_ns"]) == (6, 71, 10)
    assert (counts["inference_count"], counts["execution_count"], counts["b2_count"]) == (4, 2, 2)
    assert counts["last_inference_ms"] == 13


def test_a_failure_is_counted_as_other_and_twice() -> None:
    totals = Totals()
    totals.failed(b"s", 10, 15)
    totals.failed(b"s", 20, 15)  # clocks of two machines differ
    assert totals.by_key == {b"s": {"fail_count": 4, "fail_ns": 10, "fail_OTHER": 4}}
