"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, over the same models as chats.

`text_routes` has OpenAI's endpoints.
"""

from __future__ import annotations

import contextlib
import uuid

from charonia.generation.tool_calls import call_reader

from .api_calls import ApiCall, RouteTable
from .shapes.api_errors import ApiError, json_bytes, long_field
from .shapes.forced_calls import reader_of
from .shapes.message_shapes import Event, MessageAnswer, read_messages_request
from .text_serving import TextServing

MESSAGES = "/v1/messages"
ENDPOINT = "messages"


def add_messages(routes: RouteTable, serving: TextServing) -> None:
    """Add the paths of this module."""

    async def messages(call: ApiCall) -> None:
        chat = read_messages_request(await call.json())
        with long_field("messages"):
            prepared = await serving.prepare_chat(chat, call.caller, call.asked)
        call.headers_of_reply += serving.token_headers(prepared, call.caller)
        choice = chat.tool_choice
        reader = call_reader(prepared.tool_format) if choice.mode == "auto" else reader_of(choice)
        answer = MessageAnswer(chat, f"msg_{uuid.uuid4().hex}", reader, prepared.prompt_tokens)
        async with contextlib.aclosing(serving.deltas(prepared, call.caller, ENDPOINT)) as deltas:
            async for _, delta in deltas:
                if not chat.stream:
                    answer.add(delta)
                    continue
                found = [] if call.started else [*answer.opening()]
                await call.write(b"".join(map(_written, [*found, *answer.events(delta)])))
        if chat.stream:
            await call.end_events(b"")
        else:
            await call.reply(answer.document())

    async def count_tokens(call: ApiCall) -> None:
        chat = read_messages_request(await call.json(), counts=True)
        tools = await serving.models.tools(serving.models.find(chat.model, call.asked))
        if tools is None:
            raise ApiError(f"The model '{chat.model}' has no tokenizer here", param="model")
        with long_field("messages"):
            tokens = await serving.models.encode(tools, await serving.models.render(tools, chat), special=False)
        await call.reply({"input_tokens": len(tokens)})

    routes.add("POST", MESSAGES, messages)
    routes.add("POST", MESSAGES + "/count_tokens", count_tokens)


def _written(event: Event) -> bytes:
    name, data = event
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_bytes({"type": name, **data}))
