"""Jobs as JSON, and their events and responses as server-sent events. Pure.

The id of a server-sent event is `<events seen>-<responses seen>`, or the first number alone before any response: a
reader that sends it back as Last-Event-ID continues there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import orjson

from charonia.catalog.served import ServedVersion
from charonia.errors import CharoniaError
from charonia.facts.jobs import JobEvent
from charonia.inference import InferenceResponse
from charonia.tensors import Buffer
from gateway.deferral import Accepted
from gateway.requests.delivery import JobPage, JobView

from .error_replies import JSON_CONTENT_TYPE, Headers, error_body
from .response_codec import ReplyForm, ResponseEncoder

JOBS = "/v2/jobs"
PREFERENCE_APPLIED = b"preference-applied"


def location(job_id: str) -> str:
    """The URL path of a job; its id is percent-encoded, `%` included."""
    return f"{JOBS}/{quote(job_id, safe='')}"


def accepted(job: Accepted) -> tuple[Headers, bytes]:
    """Headers and body of a 202. `queue_length` counts the model's active jobs."""
    receipt = job.receipt
    where = location(receipt.id)
    body = {
        "id": receipt.id,
        "state": job.state,
        "location": where,
        "durability": receipt.durability,
        "position": receipt.position,
        "queue_length": receipt.total,
        "eta_s": _seconds(receipt.eta_s),
    }
    headers = [JSON_CONTENT_TYPE, (b"location", where.encode()), (PREFERENCE_APPLIED, job.applied.encode())]
    return headers, orjson.dumps(body)


def summary_json(view: JobView) -> dict[str, Any]:
    """A job in a list. Times are microseconds since the epoch, null if not reached."""
    return {
        "id": view.id,
        "state": view.state.value,
        "location": location(view.id),
        "model_name": view.model,
        "model_version": str(view.version) if view.version > 0 else "",
        "request_id": view.client_id,
        "attempts": view.attempts,
        "timings": {"accepted_us": view.timings.accepted_us, "ended_us": view.timings.ended_us or None},
        "durability": view.durability,
        "tenant": view.tenant,
        "has_result": view.has_result,
        "expires_us": view.expires_us or None,
    } | ({"webhook": dict(view.webhook)} if view.webhook else {})


def view_json(view: JobView) -> dict[str, Any]:
    """A single job: its summary, and what is read from its events and its position in the queue. Spans are seconds."""
    timings = view.timings
    summary = summary_json(view)
    summary["timings"] |= {
        "batched_us": timings.batched_us or None,
        "queue_s": _seconds(timings.queue_s),
        "execute_s": _seconds(timings.execute_s),
    }
    return summary | {
        "position": view.position,
        "queue_length": view.total,
        "eta_s": _seconds(view.eta_s),
        "wait_reason": view.wait_reason,
        "error": view.error,
    }


def page_json(page: JobPage) -> dict[str, Any]:
    """A page of a listing; `next` is the cursor of the next one, null on the last."""
    return {"jobs": [summary_json(view) for view in page.jobs], "next": page.cursor or None}


def event_json(event: JobEvent, accepted_us: int) -> dict[str, Any]:
    """An event of a timeline; `after_s` counts from the job's acceptance."""
    return {
        "number": event.number,
        "event": event.kind,
        "time_us": event.time_us,
        "after_s": _seconds((event.time_us - accepted_us) / 1e6),
        "detail": plain(event.detail),
    }


def timeline_json(view: JobView, events: tuple[JobEvent, ...]) -> dict[str, Any]:
    accepted_us = view.timings.accepted_us
    return {**view_json(view), "events": [event_json(event, accepted_us) for event in events]}


def server_sent(event: JobEvent, event_id: bytes = b"") -> bytes:
    """One event of an event stream, with `event_id` or its number as id."""
    data = orjson.dumps({"number": event.number, "time_us": event.time_us, "detail": plain(event.detail)})
    kind = "".join(c for c in event.kind if c.isprintable())
    event_id = event_id or b"%d" % event.number
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id, kind.encode("utf-8", "replace"), data)


def plain(value: Any) -> Any:
    """`value` of an event as JSON values; others become text."""
    if isinstance(value, dict):
        return {str(plain(str(key))): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def response_json(response: InferenceResponse, form: ReplyForm, served: ServedVersion) -> bytes:
    """The body with which `infer` would have answered in JSON; of an error its body (E2)."""
    error = response.error
    if error is None:
        try:
            return ResponseEncoder().encode(response, form, served)[1]
        except CharoniaError as refused:  # JSON cannot carry the output
            error = refused
    return error_body(error.message)


class EventWriter:
    """Writes the events of one reader, which has seen `number` events and `responses` responses."""

    def __init__(self, number: int, responses: int) -> None:
        self._number = number
        self._responses = responses

    def event(self, event: JobEvent) -> bytes:
        """An event of the job."""
        self._number = event.number
        return server_sent(event, self._event_id())

    def response(self, response: InferenceResponse, text: Sequence[Buffer]) -> list[Buffer]:
        """A response as an event, in parts; `text` is its JSON."""
        attempt, index = response.place or (1, 0)
        self._responses = index + 1
        data = b'{"attempt":%d,"index":%d,"final":%b' % (attempt, index, b"true" if response.final else b"false")
        if not response.is_flag:
            data += b',"response":'
        return [b"id: %b\nevent: response\ndata: %b" % (self._event_id(), data), *text, b"}\n\n"]

    def _event_id(self) -> bytes:
        return b"%d-%d" % (self._number, self._responses) if self._responses else b"%d" % self._number
