"""How a caller wants an inference delivered, and a job as its caller sees it. Pure data.

The same for every protocol: fronts fill `DeliveryOptions` and write the rest; `gateway.jobs.jobs` implements them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from charonia.facts.jobs import JobState

JOB_NOT_FOUND = "job not found"
"""The same text for a job that is absent, forgotten or of another tenant, and for an invalid id."""

WEBHOOK_EVENTS = ("succeeded", "failed", "cancelled", "expired")


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller, as `Handler.identify` finds it. `scoped`: it sees only jobs of `tenant` (tenants are configured)."""

    tenant: str = ""
    scoped: bool = False


ANYONE = Caller()


@dataclass(frozen=True, slots=True)
class Webhook:
    """The URL to which a job's end is posted; `events` are the terminal states that are posted."""

    url: str
    events: tuple[str, ...] = WEBHOOK_EVENTS


@dataclass(frozen=True, slots=True)
class DeliveryOptions:
    """A caller's options beyond the inference itself. Pass None instead for the defaults: that costs nothing.

    `respond_async` makes the front call `submit_job` instead of `infer`. `durability` is memory, fsync or
    replicated:<n>, "" for the server's; `retention_s` 0 means the server's or the model's. `on_disconnect` "" is the
    default: cancel without an idempotency key, keep with one. The deadline is the request's (`deadline_ns`). `form`
    describes how the front will write the answer; it is kept with the job and returned in its view. `digest`: what was
    asked under the key, 16 bytes, for a front that makes the request again at each retry, and not always the same; b""
    for the digest of the request.
    """

    respond_async: bool = False
    idempotency_key: str = ""
    webhook: Webhook | None = None
    on_disconnect: Literal["", "cancel", "keep"] = ""
    durability: str = ""
    retention_s: int = 0
    caller: Caller = ANYONE
    form: Mapping[str, Any] = field(default_factory=dict)
    digest: bytes = b""


AS_USUAL = DeliveryOptions()
"""The options of a caller without preferences."""


def is_job(options: DeliveryOptions) -> bool:
    """Whether a synchronous call with these options is a job that its caller waits for (ADR 0004)."""
    return bool(options.idempotency_key) or options.webhook is not None


def asks_nothing_more(options: DeliveryOptions) -> bool:
    """Whether a synchronous call with these options needs nothing but its answer."""
    if options is AS_USUAL:
        return True
    kept = options.durability or options.retention_s
    return not (is_job(options) or kept or options.on_disconnect or options.respond_async)


@dataclass(frozen=True, slots=True)
class JobReceipt:
    """A job was accepted, or (`created` False) its key was known and this is the earlier job.

    `durability` is the level reached. `position` is one more than the number of jobs served before it
    (`charonia.facts.jobs`), among the model's `total` active ones; 0 once it runs. `eta_s` is None without statistics.
    """

    id: str
    model: str
    created: bool
    accepted_us: int
    durability: str
    position: int
    total: int
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class JobTimings:
    """Times in us since the epoch, 0 if not reached: accepted, first batched, ended; and the spans between, in seconds.

    `queue_s` and `execute_s` grow while the job waits or runs.
    """

    accepted_us: int
    batched_us: int
    ended_us: int
    queue_s: float
    execute_s: float


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as its caller sees it. `position` and `total` as in `JobReceipt`; both 0 in lists and once it has ended.

    `wait_reason` is a sentence, empty once the job has ended; `error` is the failure's message, empty without one;
    `client_id` is the request id in its call.
    """

    id: str
    model: str
    version: int
    state: JobState
    attempts: int
    timings: JobTimings
    position: int
    total: int
    eta_s: float | None
    wait_reason: str
    error: str
    durability: str
    tenant: str
    client_id: str
    has_result: bool = False
    expires_us: int = 0
    """When an ended job is forgotten at the latest; 0 while it is active."""
    form: Mapping[str, Any] = field(default_factory=dict)
    """`DeliveryOptions.form` of the submission."""
    webhook: Mapping[str, Any] = field(default_factory=dict)
    """The delivery state of an ended job's webhook (`gateway.webhooks.deliveries`); empty without one, and in lists."""
    decoupled: bool = False
    """Whether its model is decoupled."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Selects jobs; "" and None match all."""

    model: str = ""
    state: JobState | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class JobPage:
    """Active jobs (oldest first), then ended ones (newest first). `cursor` continues the list, "" at its end."""

    jobs: tuple[JobView, ...]
    cursor: str
