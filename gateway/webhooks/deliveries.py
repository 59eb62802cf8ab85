"""The delivery state of a job's webhook, as senders keep it and a job's view shows it.

It is a note in the log (`whs:{m}:<id>`) that is deleted with the job; only the scripts write the job's record.
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
"""The minimum time that the state is kept, also for a job that is about to be forgotten."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """`last_status` is the HTTP status of the last try; 0 if there was no answer, for the reason in `last_error`."""

    state: DeliveryState = DeliveryState.PENDING
    attempts: int = 0
    last_status: int = 0
    last_error: str = ""
    last_us: int = 0
    next_us: int = 0

    def view(self) -> dict[str, Any]:
        """The state in a job's view."""
        return {
            "state": str(self.state),
            "attempts": self.attempts,
            "last_status": self.last_status or None,
            "last_error": self.last_error or None,
            "last_attempt": timestamp(self.last_us) if self.last_us else None,
            "next_attempt": timestamp(self.next_us) if self.next_us and not self.state.final else None,
        }


def called(job: JobRecord) -> bool:
    """Whether the webhook of a job is called for the way it ended."""
    webhook = job.about.get("webhook")
    return isinstance(webhook, Mapping) and wanted(webhook, job.state)


async def delivery_of(log: Notes, model: str, job_id: bytes) -> Delivery | None:
    """The state of a job's webhook; None before the first try, or without a webhook."""
    (data,) = await log.notes([keys.webhook_state(model, job_id)])
    return unpack(data) if data is not None else None


async def keep(log: Notes, job: JobRecord, delivery: Delivery) -> None:
    """Write the state, kept as long as the job and at least until the next try."""
    now_us = wall_ns() // 1000
    until_us = max(job.ended_us + job.retention_s * 1_000_000, delivery.next_us, now_us) + LEAST_KEPT_S * 1_000_000
    await log.put_note(keys.webhook_state(job.model, job.id), pack(delivery), (until_us - now_us) // 1_000_000)


def pack(delivery: Delivery) -> bytes:
    body = {name: getattr(delivery, name) for name in Delivery.__slots__}
    body["state"] = str(delivery.state)
    return bytes(msgpack.packb(body))


def unpack(data: bytes) -> Delivery:
    """The state in a note; unknown fields and values of another release become defaults."""
    try:
        body = {str(name): value for name, value in msgpack.unpackb(data).items()}
        body["state"] = DeliveryState(body["state"])
        return Delivery(**{name: body[name] for name in Delivery.__slots__ if name in body})
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException):
        return Delivery()
