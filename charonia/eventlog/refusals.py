"""What the log refuses, in words that every adapter shares. When to refuse is the adapters' own affair."""

from __future__ import annotations

from charonia.errors import Cancelled, ResourceExhausted

from .port import Limits

BOUND_REQUESTS = 1
BOUND_BYTES = 2


def over_limit(model: str, bound: int, limits: Limits) -> ResourceExhausted:
    """A request that would pass a bound of its model's unsettled work; `bound` is one of the two above."""
    if bound == BOUND_REQUESTS:
        return ResourceExhausted(f"model '{model}' has reached its limit of {limits.requests} unsettled requests")
    return ResourceExhausted(f"model '{model}' has reached its limit of {limits.size_bytes} unsettled bytes")


def not_owner(model: str, token: int) -> Cancelled:
    """A decision of a former owner, fenced by its token."""
    return Cancelled(f"model '{model}' is no longer owned with token {token}")
