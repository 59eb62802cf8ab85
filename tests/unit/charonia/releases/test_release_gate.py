"""When a candidate is rolled back, advances or waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from charonia.releases.release_gate import ADVANCE, BEGIN, ROLL_BACK, WAIT, VersionCounts, counts_of, judge
from charonia.releases.route_rule import Gate

GATE = Gate(window_s=60, min_requests=50, max_error_percent=1, max_latency_ratio=1.5, latency_slack_ms=5)
PRESENT = VersionCounts(1000, 0, 1000 * 10_000_000)
GOOD = VersionCounts(100, 0, 100 * 11_000_000)
STEP = 2500


@pytest.mark.parametrize(
    ("candidate", "elapsed_s", "step", "action", "reason"),
    [
        (VersionCounts(10, 30), 90, STEP, WAIT, "40 of 50 requests"),
        (VersionCounts(96, 4, 1), 5, STEP, ROLL_BACK, "4.0% of 100 requests in 5 s failed; allowed were 1.0%"),
        (VersionCounts(49, 1, 1), 5, STEP, WAIT, "the window has lasted 5 of 60 s"),
        (
            VersionCounts(97, 3, 1), 60, STEP, WAIT,
            "3.0% of 100 requests in 60 s failed; allowed were 1.0%, which may be chance",
        ),
        (VersionCounts(60, 0, 60 * 21_000_000), 59, STEP, WAIT, "the window has lasted 59 of 60 s"),
        (VersionCounts(99, 1, 1), 5, STEP, WAIT, "the window has lasted 5 of 60 s"),
        (
            VersionCounts(60, 0, 60 * 21_000_000), 60, STEP, ROLL_BACK,
            "mean latency 21.0 ms of 60 requests in 60 s; allowed were 20.0 ms",
        ),
        (GOOD, 59, STEP, WAIT, "the window has lasted 59 of 60 s"),
        (
            GOOD, 60, STEP, ADVANCE,
            "0.0% of 100 requests in 60 s failed (allowed 1.0%), mean latency 11.0 ms (allowed 20.0 ms); next 25%",
        ),
        (GOOD, 60, 0, BEGIN, "within its limits"),
    ],
)  # fmt: skip
def test_verdicts(candidate: VersionCounts, elapsed_s: float, step: int, action: str, reason: str) -> None:
    verdict = judge(GATE, step, PRESENT, candidate, elapsed_s)
    assert (verdict.action, verdict.reason) == (action, reason)


def test_a_candidate_that_is_a_little_worse_is_rolled_back_in_the_end() -> None:
    """With twice the allowed failures, no window of 100 requests shows by itself that it is not chance."""
    seen = VersionCounts()
    actions: list[str] = []
    for minute in range(1, 9):
        if not actions or actions[-1] == BEGIN:
            began = minute - 1
            seen = VersionCounts()
        seen = VersionCounts(seen.answered + 98, seen.failed + 2, 1)
        actions.append(judge(GATE, STEP, PRESENT, seen, 60 * (minute - began)).action)
    assert actions[:5] == [WAIT] * 4 + [ROLL_BACK]


def test_without_rollback_it_only_stays() -> None:
    gate = replace(GATE, rollback=False)
    assert judge(gate, STEP, PRESENT, VersionCounts(97, 3, 1), 90).action == BEGIN
    assert judge(gate, STEP, PRESENT, VersionCounts(0, 100), 59).action == WAIT
    assert judge(gate, STEP, PRESENT, VersionCounts(0, 100), 90).action == BEGIN
    assert judge(gate, STEP, PRESENT, VersionCounts(100, 0, 10**12), 90).action == BEGIN


def test_few_failures_of_the_present_version_excuse_nothing() -> None:
    candidate = VersionCounts(80, 20)
    assert judge(GATE, STEP, VersionCounts(1, 1), candidate, 5).action == ROLL_BACK
    assert judge(GATE, STEP, VersionCounts(50, 50), candidate, 5).action == WAIT


def test_latency_needs_a_present_version_with_enough_requests() -> None:
    few = VersionCounts(49, 0, 49)
    slow = VersionCounts(60, 0, 60 * 10**9)
    assert judge(GATE, STEP, few, slow, 90).action == WAIT
    assert judge(GATE, STEP, few, VersionCounts(0, 60), 90).action == ROLL_BACK, "errors are compared all the same"


def test_what_callers_cancel_says_nothing() -> None:
    fields = {"success_count": 7, "success_ns": 70, "fail_count": 5, "fail_CANCELED": 3, "fail_BACKEND": 2}
    assert counts_of(fields) == VersionCounts(7, 2, 70)
    assert counts_of({}) == VersionCounts()
    hits = {"success_count": 7, "success_ns": 70, "cache_hit_count": 5, "cache_hit_ns": 10}
    assert counts_of(hits) == VersionCounts(2, 0, 60), "what the cache answered says nothing either"
    assert VersionCounts(7, 2, 70).since(VersionCounts(4, 2, 30)) == VersionCounts(3, 0, 40)
