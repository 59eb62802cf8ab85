"""What the log refuses, in words that every adapter shares. When to refuse is the adapters' own affair. Pure."""

from __future__ import annotations

from charonia.errors import Cancelled, InternalError, InvalidArgument, KeyReused, ResourceExhausted

from . import port
from .port import Limits

BOUND_REQUESTS = 1
BOUND_BYTES = 2
BOUND_TENANT_REQUESTS = 3
BOUND_TENANT_BYTES = 4


def over_limit(model: str, bound: int, limits: Limits, tenant: str = "") -> ResourceExhausted:
    """A request that would pass a bound of its model's or tenant's unsettled work; `bound` is one of those above."""
    who = f"tenant '{tenant}' of model '{model}'" if bound >= BOUND_TENANT_REQUESTS else f"model '{model}'"
    amount = {
        BOUND_REQUESTS: f"{limits.requests} unsettled requests",
        BOUND_BYTES: f"{limits.size_bytes} unsettled bytes",
        BOUND_TENANT_REQUESTS: f"{limits.tenant_requests} unsettled requests",
        BOUND_TENANT_BYTES: f"{limits.tenant_size_bytes} unsettled bytes",
    }[bound]
    return ResourceExhausted(f"{who} has reached its limit of {amount}")


def answer_too_large(size_bytes: int, model: str) -> InternalError | None:
    """The error in place of an answer of so many bytes; None if a record may have that size."""
    if size_bytes <= port.MAX_RECORD_BYTES:
        return None
    return InternalError(
        f"the answer of model '{model}' has {size_bytes} bytes, which is more than the log takes "
        f"({port.MAX_RECORD_BYTES} bytes): only answers to requests that are no jobs, on the machine of their gateway, "
        "may be larger"
    )


def string_too_large(size_bytes: int) -> InvalidArgument:
    """A record or blob that no server of the log takes."""
    return InvalidArgument(f"{size_bytes} bytes are more than the event log takes at once ({port.MAX_STRING_BYTES})")


def batch_too_large(size_bytes: int, requests: int, model: str, limit_bytes: int) -> InvalidArgument:
    """The error in place of a batch that no server of the log takes as one entry."""
    return InvalidArgument(
        f"a batch of {requests} requests of model '{model}' has {size_bytes} bytes, which is more than the log "
        f"takes at once ({limit_bytes} bytes)"
    )


def key_reused() -> KeyReused:
    """An Idempotency-Key whose first request was another one."""
    return KeyReused("this Idempotency-Key has been used for another request")


def not_owner(model: str, token: int) -> Cancelled:
    """A decision of a former owner, fenced by its token."""
    return Cancelled(f"model '{model}' is no longer owned with token {token}")
