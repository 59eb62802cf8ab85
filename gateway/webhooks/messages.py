"""The message of a webhook about the end of a job, after Standard Webhooks. Pure.

It names the job and how it ended; the result is fetched by its path. Id and body are the same at every try, so that
receivers recognise repeated messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import orjson

from charonia.facts.jobs import JobRecord, JobState

from .signatures import sign


@dataclass(frozen=True, slots=True)
class Message:
    """A message; `id` is stable for a job and its end."""

    id: str
    body: bytes
    trace: tuple[tuple[str, str], ...] = ()
    """Trace headers of the job's request."""

    def headers(self, secrets: Sequence[bytes], timestamp_s: int) -> list[tuple[str, str]]:
        """The headers of one try, signed at `timestamp_s`."""
        return [
            ("content-type", "application/json"),
            ("webhook-id", self.id),
            ("webhook-timestamp", str(timestamp_s)),
            ("webhook-signature", sign(secrets, self.id, timestamp_s, self.body)),
            *self.trace,
        ]


def wanted(webhook: Mapping[str, Any], state: JobState) -> bool:
    """Whether a job's webhook (`about["webhook"]`) is called for this state: `events` names terminal states."""
    events = webhook.get("events")
    return state.terminal and (not events or not isinstance(events, Sequence) or str(state) in events)


def message_of(job: JobRecord) -> Message:
    """The message about an ended job. `error` is its text, or null."""
    last = job.events[-1].detail if job.events else {}
    version = last.get("version") or job.about.get("version")
    succeeded = job.state is JobState.SUCCEEDED
    body = {
        "type": f"job.{job.state}",
        "timestamp": timestamp(job.ended_us),
        "data": {
            "id": job.public_id,
            "model": job.model,
            "version": str(version) if version and str(version) != "-1" else None,
            "state": str(job.state),
            "error": None if succeeded else _text(last.get("error")),
            "attempts": job.attempts,
            "durability": job.durability,
            "result_url": f"/v2/jobs/{quote(job.public_id, safe='')}/result" if succeeded else None,
        },
    }
    return Message(f"msg_{job.id.hex()}", orjson.dumps(body), _trace(job.about.get("webhook")))


def _trace(webhook: Any) -> tuple[tuple[str, str], ...]:
    carrier = webhook.get("trace") if isinstance(webhook, Mapping) else None
    if not isinstance(carrier, Mapping):
        return ()
    found = [(name, carrier.get(name)) for name in ("traceparent", "tracestate")]
    return tuple((name, value) for name, value in found if isinstance(value, str) and _is_header(value))


def _is_header(value: str) -> bool:
    return value.isascii() and value.isprintable()


def timestamp(time_us: int) -> str:
    """ISO 8601 in UTC, to the microsecond."""
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _text(value: object) -> str | None:
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
