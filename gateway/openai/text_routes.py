"""The endpoints that generate text: `/v1/chat/completions` and `/v1/completions`, streamed or whole.

`text_serving` runs the requests, `shapes` has their JSON.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from charonia.clock import wall_ns
from charonia.generation.tool_calls import call_reader
from gateway.http.codec.error_replies import Headers
from gateway.requests.delivery import ANYONE, Caller

from .api_calls import ApiCall, RouteTable
from .shapes import known_fields
from .shapes.api_errors import ApiError, json_bytes, long_field
from .shapes.chat_shapes import ChatAnswer, read_chat
from .shapes.completion_shapes import CompletionAnswer, read_completion
from .shapes.known_fields import refuse_unknown
from .text_models import NOBODY, Asked, TextModels
from .text_serving import PreparedText, TextServing

Prepared = tuple[PreparedText, ChatAnswer | CompletionAnswer]

CHAT, COMPLETION = "chat", "completion"


class TextEndpoints:
    """Answers bodies of the two endpoints; also those that come in a batch's file."""

    def __init__(self, serving: TextServing) -> None:
        self._serving = serving

    @property
    def models(self) -> TextModels:
        """The models that it asks."""
        return self._serving.models

    async def prepare_chat(self, body: Mapping[str, Any], caller: Caller = ANYONE, asked: Asked = NOBODY) -> Prepared:
        """The requests of a chat's body, and what writes their answer. Raises `ApiError`."""
        refuse_unknown(body, known_fields.CHAT)
        chat = read_chat(body)
        with long_field("messages"):
            prepared = await self._serving.prepare_chat(chat, caller, asked)
        reader = partial(call_reader, prepared.tool_format)
        answer = ChatAnswer(chat, _new_id("chatcmpl-"), _now_s(), _bytes_of(prepared), reader)
        answer.prompt_tokens = prepared.prompt_tokens
        answer.prompt_ids = prepared.prompt_ids[0] if prepared.prompt_ids else None
        return prepared, answer

    async def prepare_completion(
        self, body: Mapping[str, Any], caller: Caller = ANYONE, asked: Asked = NOBODY
    ) -> Prepared:
        """The requests of a completion's body, and what writes their answer. Raises `ApiError`."""
        refuse_unknown(body, known_fields.COMPLETION)
        wanted = read_completion(body)
        with long_field("prompt"):
            prepared = await self._serving.prepare_completion(wanted, caller, asked)
        answer = CompletionAnswer(
            wanted, _new_id("cmpl-"), _now_s(), _bytes_of(prepared), prepared.prompts, prepared.prompt_ids
        )
        answer.prompt_tokens = prepared.prompt_tokens
        return prepared, answer

    async def document(self, prepared: Prepared, caller: Caller = ANYONE, endpoint: str = CHAT) -> dict[str, Any]:
        """The whole answer, once all texts have ended. Raises the error of the first that failed."""
        text, answer = prepared
        async with contextlib.aclosing(self._serving.deltas(text, caller, endpoint)) as deltas:
            async for index, delta in deltas:
                answer.add(index, delta)
        return answer.document()

    def token_headers(self, prepared: Prepared, caller: Caller) -> Headers:
        """See `TextServing.token_headers`."""
        return self._serving.token_headers(prepared[0], caller)

    async def stream(self, call: ApiCall, prepared: Prepared, endpoint: str, *, include_usage: bool) -> None:
        """Write the answer as events. It begins with the first text, so that an error before it has its own status."""
        text, answer = prepared
        async with contextlib.aclosing(self._serving.deltas(text, call.caller, endpoint)) as deltas:
            async for index, delta in deltas:
                chunks = [] if call.started else [*answer.opening()]
                chunks += answer.chunks(index, delta)
                if chunks:
                    await call.write(b"".join(b"data: " + json_bytes(chunk) + b"\n\n" for chunk in chunks))
        if include_usage:
            await call.event(answer.usage_chunk())
        await call.end_events()


def add_texts(routes: RouteTable, endpoints: TextEndpoints) -> None:
    """Add the paths of this module."""

    async def chat(call: ApiCall) -> None:
        body = await call.json()
        prepared = await endpoints.prepare_chat(body, call.caller, call.asked)
        await answer(call, body, prepared, CHAT)

    async def completion(call: ApiCall) -> None:
        body = await call.json()
        prepared = await endpoints.prepare_completion(body, call.caller, call.asked)
        await answer(call, body, prepared, COMPLETION)

    async def invocation(call: ApiCall) -> None:
        """The path of SageMaker's containers: what the body has says what is asked for."""
        body = await call.json()
        if "messages" in body:
            await answer(call, body, await endpoints.prepare_chat(body, call.caller, call.asked), CHAT)
        elif "prompt" in body:
            await answer(call, body, await endpoints.prepare_completion(body, call.caller, call.asked), COMPLETION)
        else:
            raise ApiError("the body must have 'messages' or 'prompt'")

    async def answer(call: ApiCall, body: Mapping[str, Any], prepared: Prepared, endpoint: str) -> None:
        call.headers_of_reply += endpoints.token_headers(prepared, call.caller)
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            await endpoints.stream(call, prepared, endpoint, include_usage=usage)
        else:
            await call.reply(await endpoints.document(prepared, call.caller, endpoint))

    routes.add("POST", "/v1/chat/completions", chat)
    routes.add("POST", "/v1/completions", completion)
    routes.add("POST", "/invocations", invocation)


def _bytes_of(prepared: PreparedText) -> Callable[[int], bytes] | None:
    return prepared.tools.tokenizer.token_bytes if prepared.tools is not None else None


def _new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def _now_s() -> int:
    return wall_ns() // 1_000_000_000
