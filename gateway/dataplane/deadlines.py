"""Answers callers at their deadline, however busy the executors are.

At the instant the request is settled as expired; only when that is won is the caller told so. When a completion was
first, its reply is on its way and is the answer. When the log cannot say, the outcome is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from charonia import keys
from charonia.calls.replies import OUTCOME_UNKNOWN
from charonia.catalog.catalog import ServedVersion
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, DeadlineExceeded, InvalidArgument, LogUnavailable
from charonia.eventlog.port import Work
from charonia.facts.jobs import JobState

from .job_outcomes import DEADLINE_EXCEEDED
from .request_endings import Ending, end_requests
from .waiters import Waiter

MAX_DEADLINE_AHEAD_NS = 366 * 86_400 * 1_000_000_000
_LOG_PATIENCE_S = 1.0
_ASK_AGAIN_S = 0.02

EXPIRED = Ending(JobState.EXPIRED, DEADLINE_EXCEEDED, "deadline")


def check_deadline(deadline_ns: int, now_ns: int) -> None:
    """Raise `DeadlineExceeded` for one that is past, `InvalidArgument` for one over a year ahead."""
    if deadline_ns <= now_ns:
        raise DeadlineExceeded(DEADLINE_EXCEEDED)
    if deadline_ns - now_ns > MAX_DEADLINE_AHEAD_NS:
        raise InvalidArgument("request deadline is more than 366 days ahead")


class Deadlines:
    """The timers of one gateway's waiting callers."""

    def __init__(self, log: Work, spawn: Callable[[object], None], *, journal_jobs: bool, journal_all: bool) -> None:
        self._log = log
        self._spawn = spawn
        self._journal_jobs = journal_jobs
        self._journal_all = journal_all
        self.expired = 0
        """Requests this gateway ended at their deadline."""

    def arm(self, waiter: Waiter, deadline_ns: int, served: ServedVersion) -> asyncio.TimerHandle:
        """A timer, to be cancelled once the waiter has its answer."""
        armed_ns = wall_ns()
        delay_s = max(0.0, (deadline_ns - armed_ns) / 1e9)
        return asyncio.get_running_loop().call_later(delay_s, self._fire, waiter, served, armed_ns)

    def _fire(self, waiter: Waiter, served: ServedVersion, armed_ns: int) -> None:
        if not waiter.sent or waiter.follows:
            waiter.withdrawn = True
            self._answer_expired(waiter)
            return
        statistics = keys.statistics(served.model, served.version, served.content_hash)
        self._spawn(self._expire(waiter, statistics, armed_ns))

    async def _expire(self, waiter: Waiter, statistics: bytes, armed_ns: int) -> None:
        journalled = self._journal_jobs if waiter.is_job else self._journal_all
        increments = {"fail_count": 1, "fail_ns": max(0, wall_ns() - armed_ns), "fail_REJECTED": 1}
        try:
            async with asyncio.timeout(_LOG_PATIENCE_S):
                while not waiter.future.done():
                    won = await end_requests(
                        self._log,
                        waiter.model,
                        [waiter.id],
                        EXPIRED,
                        are_jobs=waiter.is_job,
                        journalled=journalled,
                        statistics=(statistics, increments),
                    )
                    if won[0] or waiter.follows:
                        self._answer_expired(waiter)
                    elif waiter.accepted:
                        return  # a completion was first: its reply is the answer
                    else:
                        await asyncio.sleep(_ASK_AGAIN_S)  # still on its way into the log
        except (CharoniaError, TimeoutError):
            waiter.failed(LogUnavailable(OUTCOME_UNKNOWN))

    def _answer_expired(self, waiter: Waiter) -> None:
        if not waiter.future.done():
            self.expired += 1
            waiter.failed(DeadlineExceeded(DEADLINE_EXCEEDED))
