"""How a caller wants an inference delivered, and what it sees of a job. Pure data.

The same for every protocol: fronts fill `DeliveryOptions` and render the rest; `gateway.jobs.jobs` gives them their
meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from charonia.facts.jobs import JobState

JOB_NOT_FOUND = "job not found"
"""The one text for a job that is absent, forgotten, of another tenant, or whose id is no id."""

WEBHOOK_EVENTS = ("succeeded", "failed", "cancelled", "expired")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as `Handler.identify` found out. `scoped`: sees only jobs of `tenant` (tenants are configured)."""

    tenant: str = ""
    scoped: bool = False


ANYONE = Caller()


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where to post the end of a job; `events` are the terminal states that are posted."""

    url: str
    events: tuple[str, ...] = WEBHOOK_EVENTS


@dataclass(frozen=True, slots=True)
class DeliveryOptions:
    """What a caller asked beyond the inference itself. None in its place stands for the defaults and costs nothing.

    `respond_async` tells the front which method to call: `submit_job` or `infer`. `durability` is memory, fsync or
    replicated:<n>, "" for the server's; `retention_s` 0 the server's or the model's. `on_disconnect` "" is the
    default: cancel without an idempotency key, keep with one. The deadline is the request's own (`deadline_ns`).
    `form` is the front's note on how the answer is to be written; it is kept with the job and given back by its view.
    """

    respond_async: bool = False
    idempotency_key: str = ""
    webhook: Webhook | None = None
    on_disconnect: Literal["", "cancel", "keep"] = ""
    durability: str = ""
    retention_s: int = 0
    caller: Caller = ANYONE
    form: Mapping[str, Any] = field(default_factory=dict)


AS_USUAL = DeliveryOptions()
"""Of a caller that asked for nothing more."""


def is_job(options: DeliveryOptions) -> bool:
    """Whether a synchronous call with these options is a job that its caller waits for (ADR 0004)."""
    return bool(options.idempotency_key) or options.webhook is not None


def asks_nothing_more(options: DeliveryOptions) -> bool:
    """Whether a synchronous call with these options asks for nothing more than its answer."""
    if options is AS_USUAL:
        return True
    kept = options.durability or options.retention_s
    return not (is_job(options) or kept or options.on_disconnect or options.respond_async)


@dataclass(frozen=True, slots=True)
class JobReceipt:
    """A job was accepted, or (`created` False) its key was known and this is the earlier job.

    `durability` is the level reached. `position` is one more than the jobs served before it
    (`charonia.facts.jobs`), of the `total` active ones of the model, 0 once it runs; `eta_s` is None when nothing
    is known to estimate from.
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
    """Wall clock in us since the epoch, 0 for not yet: accepted, first batched, ended; and the spans between.

    `queue_s` and `execute_s` grow while the job waits or runs.
    """

    accepted_us: int
    batched_us: int
    ended_us: int
    queue_s: float
    execute_s: float


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as its caller sees it. `position` and `total` as in `JobReceipt`, both 0 in lists and once it has ended.

    `wait_reason` is a sentence, empty once the job has ended; `error` the failure's message, empty without one;
    `client_id` the request id its caller gave.
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
    """When an ended job is forgotten at the latest, 0 while it has not ended."""
    form: Mapping[str, Any] = field(default_factory=dict)
    """`DeliveryOptions.form` of the submission."""
    webhook: Mapping[str, Any] = field(default_factory=dict)
    """How far the webhook of an ended job has come (`gateway.webhooks.deliveries`); empty without one, and in lists."""
    decoupled: bool = False
    """Whether its model may answer more than once."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs: "" and None match all."""

    model: str = ""
    state: JobState | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class JobPage:
    """Active jobs first (oldest first), then ended ones (newest first); `cursor` asks for more, "" for no more."""

    jobs: tuple[JobView, ...]
    cursor: str
