"""When a failed call is made again, and after which pause. Pure: the caller brings the chance.

A call is repeated where that cannot execute anything twice: the server was not reached, or refused it and says when to
come again; any lost connection where the call only asks, or has an idempotency key.
"""

from __future__ import annotations

from dataclasses import dataclass

from charonia.errors import CharoniaError, ResourceExhausted, StreamInterrupted, Unavailable

from .results import NotConnected, Refused

_LONGEST_REFUSAL_S = 60.0
"""Of a server that wants to be left alone for longer the error is raised: it says for how long."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`attempts` counts the first one. The n-th pause is uniform between half and all of min(max, first * 2**(n-1)), or
    the time that the server asks for, if that is longer.

    The defaults bridge between five and eleven seconds, in which a gateway that died is started again.
    """

    attempts: int = 8
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0

    def pause_s(self, error: CharoniaError, failed: int, *, repeatable: bool, chance: float) -> float | None:
        """The pause after the `failed`-th failure, None where the error is to be raised.

        `repeatable`: executing the call twice does no harm. `chance` is uniform in [0, 1).
        """
        if failed >= self.attempts:
            return None
        wanted_s = refused_for_s(error)
        if wanted_s is None:
            if not repeatable or not isinstance(error, Unavailable) or isinstance(error, StreamInterrupted):
                return None
            wanted_s = 0.0
        if wanted_s > _LONGEST_REFUSAL_S:
            return None
        highest_s = min(self.max_pause_s, self.first_pause_s * 2.0 ** min(failed - 1, 64))
        return max(wanted_s, highest_s * (0.5 + chance / 2))


def refused_for_s(error: CharoniaError) -> float | None:
    """Seconds after which a call that was not accepted may come again; None where it may have been accepted."""
    if isinstance(error, NotConnected):
        return 0.0
    if isinstance(error, Refused):
        return error.retry_after_s
    if isinstance(error, ResourceExhausted) and error.retry_after_s > 0:
        return float(error.retry_after_s)
    return None
