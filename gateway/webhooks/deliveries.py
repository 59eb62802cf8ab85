"""How far the webhook of a job has come, as the senders keep it and a job's view shows it.

The state is a note in the log (`whs:{m}:<id>`) which goes with the job; the job's own record stays the scripts' alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from charonia import keys
from charonia.clock import wall_ns
from charonia.eventlog.port import Notes
from charonia.facts.jobs import JobRecord

from .messages import timestamp, wanted
from .retries import DeliveryState

LEAST_KEPT_S = 3600
"""How long the state stays at least, also of a job that is about to go."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """`last_status` is the HTTP status of the last try, 0 when there was no answer and `last_error` says why."""

    state: DeliveryState = DeliveryState.PENDING
    attempts: int = 0
    last_status: int = 0
    last_error: str = ""
    last_us: int = 0
    next_us: int = 0

    def view(self) -> dict[str, Any]:
        """As a job's view shows it."""
        return {
            "state": str(self.state),
            "attempts": self.attempts,
            "last_status": self.last_status or None,
            "last_error": self.last_error or None,
            "last_attempt": timestamp(self.last_us) if self.last_us else None,
            "next_attempt": timestamp(self.next_us) if self.next_us and not self.state.final else None,
        }


def called(job: JobRecord) -> bool:
    """Whether a webhook is to be called for how a job has ended."""
    webhook = job.about.get("webhook")
    return isinstance(webhook, Mapping) and wanted(webhook, job.state)


async def delivery_of(log: Notes, model: str, job_id: bytes) -> Delivery | None:
    """The state of a job's webhook; None before a sender first tried it, or for a job without one."""
    (data,) = await log.notes([keys.webhook_state(model, job_id)])
    return unpack(data) if data is not None else None


async def keep(log: Notes, job: JobRecord, delivery: Delivery) -> None:
    """Write the state down for as long as the job is kept, and until the next try at least."""
    now_us = wall_ns() // 1000
    until_us = max(job.ended_us + job.retention_s * 1_000_000, delivery.next_us, now_us) + LEAST_KEPT_S * 1_000_000
    await log.put_note(keys.webhook_state(job.model, job.id), pack(delivery), (until_us - now_us) // 1_000_000)


def pack(delivery: Delivery) -> bytes:
    body = {name: getattr(delivery, name) for name in Delivery.__slots__}
    body["state"] = str(delivery.state)
    return bytes(msgpack.packb(body))


def unpack(data: bytes) -> Delivery:
    """A state; fields and states of another release are left at their defaults."""
    try:
        body = {str(name): value for name, value in msgpack.unpackb(data).items()}
        body["state"] = DeliveryState(body["state"])
        return Delivery(**{name: body[name] for name in Delivery.__slots__ if name in body})
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException):
        return Delivery()
