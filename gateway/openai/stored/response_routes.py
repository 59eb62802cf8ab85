"""`/v1/responses`: a stored response is a job of the log, whose id has the job's.

Its job keeps the request (`ResponseRequest.note`) beside the tensors, so any gateway can say what was asked, write the
events again from their beginning (`response_events`), and go on with them while the model runs. A response that is not
stored is an ordinary call.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, NotFound, Unavailable
from charonia.eventlog.port import Blobs
from charonia.facts.jobs import JobEvent, JobState, parse_public_id
from charonia.generation.tool_calls import CallReader, ToolDelta, call_reader
from charonia.inference import InferenceResponse
from charonia.tasks import Tasks
from gateway.handler import Handler
from gateway.http.bodies import CLIENT_LEFT
from gateway.http.codec.error_replies import HttpRefusal
from gateway.openai.api_calls import ApiCall, RouteTable
from gateway.openai.shapes.api_errors import ApiError, error_document, json_bytes, long_field
from gateway.openai.shapes.chat_shapes import read_chat
from gateway.openai.shapes.forced_calls import reader_of
from gateway.openai.shapes.text_answers import TextDelta, TokenBytes, read_delta, token_logprobs
from gateway.openai.text_models import NOBODY, Asked, TextTools
from gateway.openai.text_serving import PreparedText, TextServing
from gateway.requests.delivery import Caller, DeliveryOptions, JobView

from .file_routes import list_document, page_of
from .response_events import Event, ResponseEvents
from .response_requests import ResponseRequest, chat_body, read_response_request, response_object

PREFIX = "resp_"
NOTE, NOTE_BLOB = "openai_response", "openai_response_blob"
"""Members of the job's form: the request, or the name of the blob that has it."""
PREPARED = "openai_prepared"
"""A member of the job's form: the number of tokens of the prompt, and the form in which the model writes calls."""

_INLINE_BYTES = 64 << 10
"""A note that is larger lies in a blob: lists of jobs read their records."""
_BLOB_KEPT_S = 30 * 86_400
MAX_CHAIN = 256
"""Responses that one conversation may go back."""
_HEARTBEAT_S = 15.0
_HEARTBEAT = b": the response goes on\n\n"
_IDEMPOTENCY = b"idempotency-key"
_OF_CHATS = {"response_format": "text.format", "max_completion_tokens": "max_output_tokens", "messages": "input"}
"""What fields of a chat are called in a response."""


class ResponseLog(Blobs, Protocol):
    """What of the log responses need beside their jobs."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response: its job, and what was asked."""

    view: JobView
    request: ResponseRequest
    prompt_tokens: int = 0
    tool_format: str = ""

    @property
    def id(self) -> str:
        return PREFIX + self.view.id

    def object(self) -> dict[str, Any]:
        return response_object(self.request, self.id, self.view.timings.accepted_us // 1_000_000)


@dataclass(slots=True)
class ResponseWriter:
    """Turns what a model answers into events."""

    events: ResponseEvents
    reader: CallReader | None
    bytes_of: TokenBytes | None
    top_logprobs: int | None
    finish: str = ""

    def add(self, response: InferenceResponse) -> list[Event]:
        """The events of one response of the model. Raises its error."""
        if response.error is not None:
            raise response.error
        return self.take(read_delta(response)) if response.outputs else []

    def take(self, delta: TextDelta) -> list[Event]:
        """The events of more text."""
        events = self.events
        events.output_tokens += delta.count
        if delta.prompt_tokens is not None:
            events.input_tokens = delta.prompt_tokens
        self.finish = delta.finish or self.finish
        logprobs = self._logprobs(delta)
        if self.reader is None:
            return events.add_text(delta.text, logprobs)
        parts = [*self.reader.push(delta.text)] if delta.text else []
        return self._parts(parts, logprobs)

    def _parts(self, parts: Sequence[str | ToolDelta], logprobs: Sequence[Mapping[str, Any]] = ()) -> list[Event]:
        found: list[Event] = []
        for part in parts:
            if isinstance(part, str):
                found += self.events.add_text(part, logprobs)
                logprobs = ()
            else:
                found += self.events.add_call(part)
        return found

    def ended(self, completed_s: int) -> list[Event]:
        """The last events of a response whose model has ended."""
        rest = self._parts(self.reader.flush()) if self.reader is not None else []
        return [*rest, *self.events.ended(self.finish, completed_s)]

    def _logprobs(self, delta: TextDelta) -> list[dict[str, Any]]:
        if self.top_logprobs is None:
            return []
        found = token_logprobs(delta.tokens, delta.logprobs, self.top_logprobs, self.bytes_of)
        return [
            {
                "token": one.token,
                "bytes": list(one.raw),
                "logprob": one.logprob,
                "top_logprobs": [
                    {"token": token, "bytes": list(raw), "logprob": logprob} for token, raw, logprob in one.candidates
                ],
            }
            for one in found
        ]


class StoredResponses:
    """The responses of one gateway's callers; batches create theirs here, too."""

    def __init__(self, handler: Handler, log: ResponseLog, serving: TextServing) -> None:
        self._handler = handler
        self._log = log
        self._serving = serving
        self.endings = Tasks()

    # -- making -------------------------------------------------------------------------------------------------------

    async def before(self, response_id: str, caller: Caller) -> list[Mapping[str, Any]]:
        """The items of a response and of those before it, the oldest first. Raises a 400 `ApiError`."""
        parts: list[list[Mapping[str, Any]]] = []
        while response_id:
            if len(parts) >= MAX_CHAIN:
                raise ApiError(f"a conversation has at most {MAX_CHAIN} responses", param="previous_response_id")
            try:
                stored = await self.find(response_id, caller)
            except ApiError:
                raise ApiError(
                    f"Previous response with id '{response_id[:256]}' not found.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                ) from None
            document = await self.document(stored, caller)
            if document["status"] not in ("completed", "incomplete"):
                raise ApiError(f"response '{response_id[:256]}' has no output yet", param="previous_response_id")
            parts.append([*stored.request.items, *document["output"]])
            response_id = stored.request.previous
        return [item for part in reversed(parts) for item in part]

    async def prepare(self, request: ResponseRequest, caller: Caller, asked: Asked = NOBODY) -> PreparedText:
        """The model's request for a response. Raises `ApiError`."""
        before = await self.before(request.previous, caller) if request.previous else []
        try:
            with long_field("input"):
                return await self._serving.prepare_chat(read_chat(chat_body(request, before)), caller, asked)
        except ApiError as error:
            error.param = _OF_CHATS.get(error.param or "", error.param)
            raise

    async def submit(
        self, request: ResponseRequest, prepared: PreparedText, options: DeliveryOptions
    ) -> tuple[str, bool]:
        """Make the job of a stored response: the job's id, and whether it is new. Raises as `Handler.submit_job`."""
        note = await self._handler.offload.in_thread(0, request.note)
        form: dict[str, Any] = {PREPARED: [prepared.prompt_tokens, prepared.tool_format]}
        if len(note) <= _INLINE_BYTES:
            form[NOTE] = note
        else:
            blob_id = form[NOTE_BLOB] = "openai-" + secrets.token_hex(16)
            await self._log.put_blob(blob_id, note, _BLOB_KEPT_S)
        try:
            receipt = await self._handler.submit_job(prepared.requests[0], replace(options, form=form))
        except CharoniaError as error:
            if not isinstance(error, Unavailable):  # then the job may exist
                await self._forget(form)
            raise
        if not receipt.created:
            await self._forget(form)
        return receipt.id, receipt.created

    async def _forget(self, form: Mapping[str, Any]) -> None:
        """Delete the note of a job that was not made: callers that are refused ask again and again."""
        if (blob_id := form.get(NOTE_BLOB)) is not None:
            with contextlib.suppress(CharoniaError):
                await self._log.delete_keys([keys.blob(str(blob_id))])

    # -- reading ------------------------------------------------------------------------------------------------------

    async def find(self, response_id: str, caller: Caller) -> Stored:
        """A stored response. Raises a 404 `ApiError`."""
        missing = ApiError(f"Response with id '{response_id[:256]}' not found.", status=404, param="response_id")
        if not response_id.startswith(PREFIX):
            raise missing
        try:
            view = await self._handler.jobs.queries.view(response_id.removeprefix(PREFIX), caller)
        except NotFound:
            raise missing from None
        note = view.form.get(NOTE)
        if note is None and (blob_id := view.form.get(NOTE_BLOB)) is not None:
            note = await self._log.blob(str(blob_id))
        if not isinstance(note, bytes):
            raise missing
        request = await self._handler.offload.in_thread(len(note), ResponseRequest.of_note, note)
        return Stored(view, request, *view.form.get(PREPARED, ()))

    async def writer(
        self, request: ResponseRequest, response: dict[str, Any], prompt_tokens: int, tool_format: str
    ) -> ResponseWriter:
        """What writes the events of a response. Of a model that is gone, without the bytes of its tokens."""
        chat = read_chat(chat_body(request, ()))
        tools: TextTools | None = None
        with contextlib.suppress(ApiError, CharoniaError):
            tools = await self._serving.models.tools(self._serving.models.find(request.model))
        events = ResponseEvents(response)
        events.input_tokens = prompt_tokens
        bytes_of = tools.tokenizer.token_bytes if tools is not None else None
        choice = chat.tool_choice
        reader = call_reader(tool_format) if choice.mode == "auto" else reader_of(choice)
        return ResponseWriter(events, reader, bytes_of, chat.top_logprobs)

    async def writer_of(self, stored: Stored) -> ResponseWriter:
        """What writes the events of a stored response."""
        return await self.writer(stored.request, stored.object(), stored.prompt_tokens, stored.tool_format)

    async def follow(self, stored: Stored, caller: Caller, writer: ResponseWriter) -> AsyncGenerator[list[Event]]:
        """The events of a stored response from its first one, as they come; the last is a terminal one."""
        events = writer.events
        yield events.created()
        begun = not stored.request.background
        if begun:
            yield events.begun()
        job_id = stored.view.id
        following = await self._handler.jobs.queries.events(job_id, caller, 0, -1)
        async with contextlib.aclosing(following):
            async for update in following:
                if not begun and (isinstance(update, InferenceResponse) or update.kind in ("batched", "succeeded")):
                    begun = True
                    yield events.begun()
                if isinstance(update, InferenceResponse):
                    try:
                        yield writer.add(update)
                    except CharoniaError as error:
                        yield events.failed("server_error", error.message)
                        return
                    continue
                async for last in self._terminal(update, stored, caller, writer):
                    yield last

    async def _terminal(
        self, event: JobEvent, stored: Stored, caller: Caller, writer: ResponseWriter
    ) -> AsyncGenerator[list[Event]]:
        """The events of a job's end; none of another event."""
        if event.kind == JobState.SUCCEEDED:
            if not stored.view.decoupled:
                for response in (await self._handler.jobs.queries.result(stored.view.id, caller))[1] or ():
                    yield writer.add(response)
            yield writer.ended(event.time_us // 1_000_000)
        elif event.kind == JobState.CANCELLED:
            yield writer.events.cancelled()
        elif event.kind in (JobState.FAILED, JobState.EXPIRED):
            view = await self._handler.jobs.queries.view(stored.view.id, caller)
            yield writer.events.failed("server_error", view.error)

    async def document(self, stored: Stored, caller: Caller) -> dict[str, Any]:
        """The response as it is now."""
        state = stored.view.state
        if not state.terminal:
            queued = state is JobState.QUEUED and stored.request.background
            return {**stored.object(), "status": "queued" if queued else "in_progress"}
        return await self.ended(stored, caller)

    async def ended(self, stored: Stored, caller: Caller) -> dict[str, Any]:
        """The response once it has ended."""
        writer = await self.writer_of(stored)
        async with contextlib.aclosing(self.follow(stored, caller, writer)) as following:
            async for _ in following:
                pass
        return writer.events.document()

    async def delete(self, stored: Stored, caller: Caller) -> None:
        """Delete a response and its job; one that runs is cancelled."""
        if not stored.view.state.terminal:
            await self._handler.jobs.cancel(stored.view.id, caller)
        parsed = parse_public_id(stored.view.id)
        assert parsed is not None
        await self._log.delete_keys([keys.job(*parsed), keys.job_responses(*parsed), keys.job_delivery(*parsed)])
        if (blob_id := stored.view.form.get(NOTE_BLOB)) is not None:
            await self._log.delete_keys([keys.blob(str(blob_id))])

    async def left(self, submitting: asyncio.Task[tuple[str, bool]], caller: Caller, *, keeps: bool) -> None:
        """Cancel a response whose client has left, unless it is to go on, or is another call's."""
        with contextlib.suppress(ApiError, CharoniaError):
            job_id, created = await submitting
            if created and not keeps:
                await self._handler.jobs.cancel(job_id, caller)


def add_responses(routes: RouteTable, responses: StoredResponses, serving: TextServing) -> None:
    """Add the paths of this module."""
    endpoints = _Responses(responses, serving)
    routes.add("POST", "/v1/responses", endpoints.create)
    routes.add("GET", "/v1/responses/{response}", endpoints.get)
    routes.add("DELETE", "/v1/responses/{response}", endpoints.delete)
    routes.add("POST", "/v1/responses/{response}/cancel", endpoints.cancel)
    routes.add("GET", "/v1/responses/{response}/input_items", endpoints.input_items)


class _Responses:
    def __init__(self, responses: StoredResponses, serving: TextServing) -> None:
        self._responses = responses
        self._serving = serving

    async def create(self, call: ApiCall) -> None:
        key = call.headers.get(_IDEMPOTENCY, b"").decode("latin-1")
        request = read_response_request(await call.json()).seeded(key)
        asked = NOBODY if request.store else call.asked  # jobs get the present version (ADR 0058)
        prepared = await self._responses.prepare(request, call.caller, asked)
        if not request.store:
            await self._unstored(call, request, prepared)
            return
        digest = await call.context.handler.offload.in_thread(0, request.digest) if key else b""
        options = DeliveryOptions(caller=call.caller, idempotency_key=key, digest=digest)
        # a task of its own: a client that leaves meanwhile has a job all the same, which has to be found
        submitting = asyncio.create_task(self._responses.submit(request, prepared, options), name="response")
        try:
            job_id, created = await asyncio.shield(submitting)
            stored = await self._responses.find(PREFIX + job_id, call.caller)
            if request.background and not request.stream:
                queued = {**stored.object(), "status": "queued"}
                await call.reply(queued if created else await self._responses.document(stored, call.caller))
            elif request.stream:
                await self._stream(call, stored)
            else:
                await self._reply_ended(call, stored)
        except asyncio.CancelledError:
            has_left = call.scope.get("state", {}).get(CLIENT_LEFT)
            keeps = request.background or bool(key) or not has_left
            self._responses.endings.spawn(self._responses.left(submitting, call.caller, keeps=keeps))
            raise

    async def _reply_ended(self, call: ApiCall, stored: Stored) -> None:
        """Answer with the whole response; one that failed with its error."""
        document = await self._responses.ended(stored, call.caller)
        if document["status"] == "failed":
            await call.context.handler.jobs.queries.result(stored.view.id, call.caller)  # raises the job's error
        await call.reply(document)

    async def _unstored(self, call: ApiCall, request: ResponseRequest, prepared: PreparedText) -> None:
        created_s = wall_ns() // 1_000_000_000
        response = response_object(request, PREFIX + secrets.token_hex(16), created_s)
        writer = await self._responses.writer(request, response, prepared.prompt_tokens, prepared.tool_format)
        events = writer.events

        async def run() -> AsyncGenerator[list[Event]]:
            yield events.created()
            yield events.begun()
            async with contextlib.aclosing(self._serving.deltas(prepared, call.caller, "responses")) as deltas:
                async for _, delta in deltas:
                    yield writer.take(delta)
            yield writer.ended(wall_ns() // 1_000_000_000)

        if request.stream:
            await self._write(call, run(), events)
            return
        async with contextlib.aclosing(run()) as running:
            async for _ in running:
                pass
        await call.reply(events.document())

    async def get(self, call: ApiCall) -> None:
        stored = await self._find(call)
        if call.query.get("stream") not in ("true", "1"):
            await call.reply(await self._responses.document(stored, call.caller))
            return
        after = call.query.get("starting_after", "")
        if after and not (after.isascii() and after.isdecimal() and len(after) <= 9):
            raise ApiError("'starting_after' must be the number of an event", param="starting_after")
        await self._stream(call, stored, int(after) if after else -1)

    async def _stream(self, call: ApiCall, stored: Stored, after: int = -1) -> None:
        writer = await self._responses.writer_of(stored)
        await self._write(call, self._responses.follow(stored, call.caller, writer), writer.events, after)

    async def _write(
        self, call: ApiCall, updates: AsyncGenerator[list[Event]], events: ResponseEvents, after: int = -1
    ) -> None:
        """Write events above a number as they come, and a comment from time to time while there are none."""
        pending: asyncio.Task[list[Event]] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(updates, _END))
                await asyncio.wait({pending}, timeout=_HEARTBEAT_S)
                if not pending.done():
                    await call.write(_HEARTBEAT)
                    continue
                found, pending = pending.result(), None
                if found is _END:
                    break
                if data := b"".join(_event_bytes(one) for one in found if one["sequence_number"] > after):
                    await call.write(data)
        except (ApiError, CharoniaError, HttpRefusal) as error:
            if not call.started:
                raise
            about = error_document(error)["error"]
            event = {"type": "error", "sequence_number": events.number, **about}
            await call.write(_event_bytes({**event, "type": "error"}))
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
            await updates.aclose()
        await call.end_events(b"")

    async def delete(self, call: ApiCall) -> None:
        stored = await self._find(call)
        await self._responses.delete(stored, call.caller)
        await call.reply({"id": stored.id, "object": "response", "deleted": True})

    async def cancel(self, call: ApiCall) -> None:
        stored = await self._find(call)
        if not stored.request.background:
            raise ApiError("Only responses that run in the background can be cancelled.", param="response_id")
        await call.context.handler.jobs.cancel(stored.view.id, call.caller)
        await call.reply(await self._responses.document(await self._find(call), call.caller))

    async def input_items(self, call: ApiCall) -> None:
        """What the model was given: the items of the request, after those of the responses before it."""
        stored = await self._find(call)
        previous = stored.request.previous
        before = await self._responses.before(previous, call.caller) if previous else []
        items = [_Item(item) for item in (*before, *stored.request.items)]
        page, more = page_of(items, call.query, default=20, most=100)
        await call.reply(list_document([dict(one.item) for one in page], more))

    async def _find(self, call: ApiCall) -> Stored:
        return await self._responses.find(call.arguments["response"], call.caller)


@dataclass(frozen=True, slots=True)
class _Item:
    item: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.item["id"])


_END: list[Event] = []
"""Stands for the end of events: no update is this list itself."""


def _event_bytes(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_bytes(event))
