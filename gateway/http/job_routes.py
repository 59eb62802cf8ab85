"""The job endpoints as routes of the control application: status, result, events, timeline, cancel and listing.

`job_json` and `response_codec` write the bodies; `gateway.deferral` makes jobs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from charonia.errors import InvalidArgument, ResourceExhausted
from charonia.facts.jobs import JobState
from charonia.tensors import Buffer
from gateway.deferral import served_of
from gateway.handler import Handler
from gateway.requests.delivery import ANYONE, Caller, JobFilter
from gateway.requests.preferences import MAX_WAIT_S

from .bodies import Receive, Scope, Send, deflate, reply_whole, response_text, written
from .codec.compression import IDENTITY, choose_encoding
from .codec.job_json import JOBS, EventWriter, location, page_json, timeline_json, view_json
from .codec.response_codec import LargeReply, ReplyForm, ResponseEncoder
from .event_stream import HEARTBEAT_S, EventStream

MAX_EVENT_STREAMS = 4096
"""Open event streams of one gateway: each holds a socket and follows the journal."""

DEFAULT_PAGE = 100

_JOB = JOBS + "/{job_id}"
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_NUMBER = re.compile(r"[0-9]{1,9}")
_PLACE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_FILTERS = ("model", "state", "tenant")


def add_jobs(app: FastAPI, handler: Handler) -> None:
    """Add the routes."""
    endpoints = _Jobs(handler)
    app.get(JOBS)(endpoints.list)
    app.delete(JOBS)(endpoints.cancel_many)
    app.get(_JOB)(endpoints.view)
    app.delete(_JOB)(endpoints.cancel)
    app.get(_JOB + "/result")(endpoints.result)
    app.get(_JOB + "/events")(endpoints.events)
    app.get(_JOB + "/timeline")(endpoints.timeline)


class _Jobs:
    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._encoder = ResponseEncoder()
        self._streams = 0

    def _caller(self, request: Request) -> Caller:
        return self._handler.identify(request.scope["headers"]) if self._handler.identifies else ANYONE

    async def list(self, request: Request) -> Response:
        query = _query(request, *_FILTERS, "limit", "cursor")
        limit = query.get("limit", str(DEFAULT_PAGE))
        if not _NUMBER.fullmatch(limit):
            raise InvalidArgument("query parameter 'limit' must be a whole number")
        page = await self._handler.jobs.queries.page(
            _filter(query), self._caller(request), cursor=query.get("cursor", ""), limit=int(limit)
        )
        return _json(page_json(page))

    async def cancel_many(self, request: Request) -> Response:
        query = _query(request, *_FILTERS)
        if not query:
            raise InvalidArgument("name at least one of model, state and tenant to cancel jobs by")
        return _json({"cancelled": await self._handler.jobs.cancel_all(_filter(query), self._caller(request))})

    async def view(self, job_id: str, request: Request) -> Response:
        _query(request)
        return _json(view_json(await self._handler.jobs.queries.view(job_id, self._caller(request))))

    async def cancel(self, job_id: str, request: Request) -> Response:
        _query(request)
        return _json(view_json(await self._handler.jobs.cancel(job_id, self._caller(request))))

    async def timeline(self, job_id: str, request: Request) -> Response:
        _query(request)
        return _json(timeline_json(*await self._handler.jobs.queries.timeline(job_id, self._caller(request))))

    async def result(self, job_id: str, request: Request) -> Response:
        query = _query(request, "wait", "binary")
        wait = query.get("wait", "0")
        if not _SECONDS.fullmatch(wait):
            raise InvalidArgument("query parameter 'wait' must be a number of seconds")
        binary = _binary(query, request)
        caller = self._caller(request)
        view, responses = await self._handler.jobs.queries.result(job_id, caller, min(float(wait), MAX_WAIT_S))
        if responses is None:
            return _json(view_json(view), 202, {"location": location(view.id)})
        served = served_of(self._handler, view)
        if len(responses) != 1:
            form = ReplyForm.of_note(view.form, False)
            parts: list[Buffer] = []
            for response in responses:
                parts += (b",", *await response_text(self._handler.offload, self._encoder, response, form, served))
            return _InParts([b"[", *parts[1:], b"]"], {"content-type": "application/json"})
        (response,) = responses
        if response.error is not None:
            raise response.error
        form = ReplyForm.of_note(view.form, binary)
        headers, reply = await written(self._handler.offload, self._encoder, response, form, served)
        plain = {name.decode(): value.decode() for name, value in headers}
        accepts = request.headers.get("accept-encoding")
        if accepts and (encoding := choose_encoding(accepts.encode("latin-1"))) != IDENTITY:
            reply = await deflate(self._handler.offload, encoding, reply)
            plain["content-encoding"] = encoding
        return _InParts([reply] if isinstance(reply, bytes) else reply.parts, plain)

    async def events(self, job_id: str, request: Request) -> Response:
        query = _query(request, "after")
        seen = request.headers.get("last-event-id", "") or query.get("after", "0")
        place = _PLACE.fullmatch(seen)
        if place is None:
            raise InvalidArgument("Last-Event-ID must be the id of an event")
        number, responses = int(place[1]), int(place[2] or 0)
        caller = self._caller(request)
        if number:
            view, events = await self._handler.jobs.queries.timeline(job_id, caller)
            if view.state.terminal and all(event.number <= number for event in events):
                return Response(status_code=204)  # stops an EventSource from connecting again
        if self._streams >= MAX_EVENT_STREAMS:
            raise ResourceExhausted(f"this gateway has {self._streams} event streams open, which is its bound")
        self._streams += 1
        try:
            following = await self._handler.jobs.queries.events(job_id, caller, number, responses - 1)
            view = await self._handler.jobs.queries.view(job_id, caller)
        except BaseException:
            self._closed()
            raise
        form, served = ReplyForm.of_note(view.form, False), served_of(self._handler, view)
        text = partial(response_text, self._handler.offload, self._encoder, form=form, served=served)
        writer = EventWriter(number, responses)
        return EventStream(following, writer, text, self._closed, heartbeat_s=HEARTBEAT_S)

    def _closed(self) -> None:
        self._streams -= 1


class _InParts(Response):
    """A response whose body is sent in parts, without joining them."""

    def __init__(self, parts: Sequence[Buffer], headers: dict[str, str]) -> None:
        super().__init__(None, 200, headers)
        del self.headers["content-length"]
        self._parts = LargeReply(tuple(parts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply_whole(send, self.status_code, self.raw_headers, self._parts)


def _query(request: Request, *known: str) -> dict[str, str]:
    """The query parameters. Raises `InvalidArgument` for one that is unknown, or occurs twice."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise InvalidArgument(f"unknown query parameter '{name[:64]}', expected {', '.join(known) or 'none'}")
        if name in found:
            raise InvalidArgument(f"query parameter '{name}' is given twice")
        found[name] = value
    return found


def _filter(query: dict[str, str]) -> JobFilter:
    state: JobState | None = None
    if "state" in query:
        try:
            state = JobState(query["state"])
        except ValueError:
            raise InvalidArgument(f"query parameter 'state' must be one of {', '.join(JobState)}") from None
    return JobFilter(query.get("model", ""), state, query.get("tenant", ""))


def _binary(query: dict[str, str], request: Request) -> bool | None:
    """Whether binary outputs are wanted: by the query, otherwise by Accept; None if neither says."""
    if "binary" in query:
        if query["binary"] not in _BOOLEANS:
            raise InvalidArgument("query parameter 'binary' must be true or false")
        return _BOOLEANS[query["binary"]]
    accepted = {part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")}
    if "application/octet-stream" in accepted:
        return True
    return False if "application/json" in accepted else None


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")
