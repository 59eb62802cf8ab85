"""Whether a part is ready, and why not: what `GET /health/ready` on its metrics port answers (`endpoint`).

Ready means what a rolling upgrade waits for before it ends the part's predecessor. It says nothing about being alive: a
part that is not ready, because the event log is away for instance, must not be killed for it.
"""

from __future__ import annotations

from collections.abc import Callable

Check = Callable[[], str]
"""Returns why something is not ready, or an empty text."""


class Health:
    """A part that is ready between `serves` and `drains`, while every check agrees. Pure but for its checks."""

    def __init__(self, starting: str, *checks: Check) -> None:
        """`starting` is the reason until `serves` is called."""
        self._phase = starting
        self._checks = list(checks)

    def add(self, check: Check) -> None:
        """Ask this check as well: a part that lives in the same process."""
        self._checks.append(check)

    def serves(self) -> None:
        self._phase = ""

    def drains(self) -> None:
        """It ends: not ready from now on."""
        self._phase = "it drains"

    def unready(self) -> str:
        """Why the part is not ready: the first reason of all; empty when it is ready."""
        if self._phase:
            return self._phase
        return next((reason for check in self._checks if (reason := check())), "")


def leased(is_leased: Callable[[], bool]) -> Check:
    """The check that the lease of a process is fresh, which it is while the process reaches the log."""
    return lambda: "" if is_leased() else "its lease in the event log has ended: is the log reachable?"
