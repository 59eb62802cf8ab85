"""When a webhook is tried again, and when no more (Standard Webhooks, "delivery success and failure"). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DELAYS = (1, 60, 360, 1440, 3600, 7200, 10080, 14400, 17280)
"""Waits in multiples of the first one; with its 5 s: 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h."""

MAX_ATTEMPTS = len(DELAYS) + 1

_JITTER = 0.2
_MAX_WISHED_S = 86_400


class DeliveryState(StrEnum):
    """The state of a webhook; only `pending` is not final."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DISABLED = "disabled"
    REFUSED = "refused"
    GIVEN_UP = "given_up"

    @property
    def final(self) -> bool:
        return self is not DeliveryState.PENDING


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state after a try, and `wait_s` until the next one while pending."""

    state: DeliveryState
    wait_s: float = 0.0


def judge(attempts: int, status: int, first_s: float, chance: float, wished_s: int = 0) -> Verdict:
    """The verdict on the last of `attempts` tries; `status` 0 means that there was no answer.

    Only 2xx is success: redirects are not followed. 410 disables the webhook. `chance` in [0, 1) varies waits by a
    fifth either way, so that webhooks that failed together are not tried together; `wished_s` is the endpoint's
    `Retry-After`, which can only lengthen a wait.
    """
    if 200 <= status < 300:
        return Verdict(DeliveryState.DELIVERED)
    if status == 410:
        return Verdict(DeliveryState.DISABLED)
    if attempts >= MAX_ATTEMPTS:
        return Verdict(DeliveryState.GIVEN_UP)
    wait_s = DELAYS[attempts - 1] * first_s * (1 - _JITTER + 2 * _JITTER * chance)
    return Verdict(DeliveryState.PENDING, max(wait_s, min(wished_s, _MAX_WISHED_S)))
