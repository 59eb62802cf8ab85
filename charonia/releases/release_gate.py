"""Decides whether a candidate gets more requests, none, or goes on as it is. Pure.

A decision compares what the candidate and the present version did in one window. `route_rule` has the limits (`Gate`)
and what a decision makes of a rule; the gateway that owns a release (`gateway.releases.release_watch`) measures and
writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .route_rule import WHOLE, Gate, percent

WAIT = "wait"
ROLL_BACK = "roll back"
ADVANCE = "advance"
BEGIN = "begin"
"""Nothing changes, and a new window begins: what is long ago must not hide what happens now."""


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """Requests of one version in a window: answered ones with the sum of their latencies in ns, and failed ones."""

    answered: int = 0
    failed: int = 0
    latency_ns: int = 0

    @property
    def requests(self) -> int:
        return self.answered + self.failed

    @property
    def error_percent(self) -> float:
        return 100.0 * self.failed / self.requests if self.requests else 0.0

    @property
    def mean_ms(self) -> float:
        return self.latency_ns / self.answered / 1e6 if self.answered else 0.0

    def since(self, before: VersionCounts) -> VersionCounts:
        """What was counted after `before`."""
        return VersionCounts(
            max(0, self.answered - before.answered),
            max(0, self.failed - before.failed),
            max(0, self.latency_ns - before.latency_ns),
        )


def counts_of(fields: Mapping[str, int]) -> VersionCounts:
    """From the counters of `s:{m}`. Requests that their callers cancelled say nothing about the version."""
    failed = fields.get("fail_count", 0) - fields.get("fail_CANCELED", 0)
    return VersionCounts(fields.get("success_count", 0), max(0, failed), fields.get("success_ns", 0))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do (`WAIT`, `ROLL_BACK`, `ADVANCE`, `BEGIN`), and why, with the figures it was decided on."""

    action: str
    reason: str


def judge(gate: Gate, step: int, present: VersionCounts, candidate: VersionCounts, elapsed_s: float) -> Verdict:
    """Judge a window that has lasted `elapsed_s` so far; `step` is the share that would follow, 0 for none.

    A candidate is rolled back as soon as it has had `min_requests`, before the window ends; it advances only at its
    end.
    """
    if candidate.requests < gate.min_requests:
        return Verdict(WAIT, f"{candidate.requests} of {gate.min_requests} requests")
    compared = f"of {candidate.requests} requests in {elapsed_s:.0f} s"
    allowed = present.error_percent + gate.max_error_percent
    if candidate.error_percent > allowed:
        reason = f"{candidate.error_percent:.1f}% {compared} failed; allowed were {allowed:.1f}%"
        return Verdict(ROLL_BACK if gate.rollback else WAIT, reason)
    is_comparable = present.answered >= gate.min_requests and candidate.answered > 0
    limit_ms = gate.max_latency_ratio * present.mean_ms + gate.latency_slack_ms
    if is_comparable and candidate.mean_ms > limit_ms:
        reason = f"mean latency {candidate.mean_ms:.1f} ms {compared}; allowed were {limit_ms:.1f} ms"
        return Verdict(ROLL_BACK if gate.rollback else WAIT, reason)
    if elapsed_s < gate.window_s:
        return Verdict(WAIT, f"the window has lasted {elapsed_s:.0f} of {gate.window_s:.0f} s")
    if not step:
        return Verdict(BEGIN, "within its limits")
    if not is_comparable:
        return Verdict(WAIT, f"{present.answered} of {gate.min_requests} requests of the present version")
    reason = (
        f"{candidate.error_percent:.1f}% {compared} failed (allowed {allowed:.1f}%), "
        f"mean latency {candidate.mean_ms:.1f} ms (allowed {limit_ms:.1f} ms)"
    )
    return Verdict(ADVANCE, f"{reason}; next {percent(min(step, WHOLE))}")
