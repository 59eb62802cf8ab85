"""Decides whether a candidate gets more requests, none, or goes on as it is. Pure.

A decision compares what the candidate and the present version did in one window. `route_rule` has the limits (`Gate`)
and what a decision makes of a rule; the gateway that owns a release (`gateway.releases.release_watch`) measures and
writes.
"""

from __future__ import annotations

import math
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
    """From the counters of `s:{m}`. Requests that their callers cancelled say nothing about the version, and neither do
    hits of the response cache.
    """
    answered = fields.get("success_count", 0) - fields.get("cache_hit_count", 0)
    failed = fields.get("fail_count", 0) - fields.get("fail_CANCELED", 0)
    latency_ns = fields.get("success_ns", 0) - fields.get("cache_hit_ns", 0)
    return VersionCounts(max(0, answered), max(0, failed), max(0, latency_ns))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do (`WAIT`, `ROLL_BACK`, `ADVANCE`, `BEGIN`), and why, with the figures it was decided on."""

    action: str
    reason: str


def judge(gate: Gate, step: int, present: VersionCounts, candidate: VersionCounts, elapsed_s: float) -> Verdict:
    """Judge a window that has lasted `elapsed_s` so far; `step` is the share that would follow, 0 for none.

    Failures count before the window ends, once the candidate has had `min_requests`. They have to be more than chance
    explains: the gate checks often, and each check is another chance to be wrong. Latency is judged at the window's
    end, because one slow request changes the mean of few. A candidate advances only then, too.
    """
    if candidate.requests < gate.min_requests:
        return Verdict(WAIT, f"{candidate.requests} of {gate.min_requests} requests")
    compared = f"of {candidate.requests} requests in {elapsed_s:.0f} s"
    has_beside = present.requests >= gate.min_requests
    allowed = gate.max_error_percent + (present.error_percent if has_beside else 0.0)
    is_over = elapsed_s >= gate.window_s
    exceeded = ROLL_BACK if gate.rollback else BEGIN if is_over else WAIT
    failures = f"{candidate.error_percent:.1f}% {compared} failed; allowed were {allowed:.1f}%"
    if _is_beyond_chance(candidate, allowed):
        return Verdict(exceeded, failures)
    if not is_over:
        return Verdict(WAIT, f"the window has lasted {elapsed_s:.0f} of {gate.window_s:.0f} s")
    is_comparable = present.answered >= gate.min_requests and candidate.answered > 0
    limit_ms = gate.max_latency_ratio * present.mean_ms + gate.latency_slack_ms
    if is_comparable and candidate.mean_ms > limit_ms:
        reason = f"mean latency {candidate.mean_ms:.1f} ms {compared}; allowed were {limit_ms:.1f} ms"
        return Verdict(exceeded, reason)
    if candidate.error_percent > allowed:
        # the window goes on, until there are so many requests that chance is excluded or the rate is within its limit
        return Verdict(WAIT if gate.rollback else BEGIN, f"{failures}, which may be chance")
    if not step:
        return Verdict(BEGIN, "within its limits")
    if not is_comparable:
        return Verdict(WAIT, f"{present.answered} of {gate.min_requests} requests of the present version")
    reason = (
        f"{candidate.error_percent:.1f}% {compared} failed (allowed {allowed:.1f}%), "
        f"mean latency {candidate.mean_ms:.1f} ms (allowed {limit_ms:.1f} ms)"
    )
    return Verdict(ADVANCE, f"{reason}; next {percent(min(step, WHOLE))}")


def _is_beyond_chance(counts: VersionCounts, allowed_percent: float) -> bool:
    """Whether more requests failed than the allowed ones and two standard deviations of such a count."""
    expected = allowed_percent / 100 * counts.requests
    return counts.failed > expected + 2 * math.sqrt(max(1.0, expected))
