"""Anthropic's messages: the shape and order of what its clients read."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from charonia.errors import DeadlineExceeded, InternalError, Unavailable
from gateway.openai.shapes.api_errors import ApiError, error_document

MESSAGES = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": name, "description": "goes", "input_schema": SCHEMA} for name in ("find", "go")]


def message(text: Any, **more: Any) -> dict[str, Any]:
    return {"model": "says", "max_tokens": 200, "messages": [{"role": "user", "content": text}], **more}


async def events(client: httpx2.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await client.post(MESSAGES, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    found = []
    for part in reply.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


async def test_a_message(client: httpx2.AsyncClient) -> None:
    document = (await client.post(MESSAGES, json=message("say hello."))).json()
    assert (document["type"], document["role"], document["model"]) == ("message", "assistant", "says")
    assert document["content"] == [{"type": "text", "text": "hello"}]
    assert (document["stop_reason"], document["stop_sequence"]) == ("end_turn", None)
    assert document["usage"]["output_tokens"] == 5
    counted = (await client.post(MESSAGES + "/count_tokens", json=message("say hello."))).json()
    assert counted == {"input_tokens": document["usage"]["input_tokens"]}
    short = (await client.post(MESSAGES, json=message("say hello.", max_tokens=2))).json()
    assert (short["content"][0]["text"], short["stop_reason"]) == ("he", "max_tokens")


async def test_the_order_of_events(client: httpx2.AsyncClient) -> None:
    found = await events(client, message("say ab."))
    assert [one["type"] for one in found] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert found[0]["message"]["content"] == []
    assert [one["delta"]["text"] for one in found if one["type"] == "content_block_delta"] == ["a", "b"]
    assert found[-2]["delta"]["stop_reason"] == "end_turn"
    assert found[-2]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    ("choice", "text", "name"),
    [
        ({"type": "any"}, "where", "find"),
        ({"type": "tool", "name": "go"}, "where", "go"),
        ({"type": "auto"}, 'say <tool_call>{"name": "go", "arguments": {"city": "Paris"}}</tool_call>.', "go"),
    ],
)
async def test_tools(client: httpx2.AsyncClient, choice: dict[str, Any], text: str, name: str) -> None:
    body = message(text, tools=TOOLS, tool_choice=choice)
    document = (await client.post(MESSAGES, json=body)).json()
    (block,) = document["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", name, {"city": "Paris"})
    assert document["stop_reason"] == "tool_use"
    found = await events(client, body)
    (begun,) = [one["content_block"] for one in found if one["type"] == "content_block_start"]
    assert (begun["type"], begun["name"], begun["input"]) == ("tool_use", name, {})
    parts = [one["delta"]["partial_json"] for one in found if one["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == {"city": "Paris"}


async def test_blocks_become_messages(client: httpx2.AsyncClient, handler: Any) -> None:
    messages = [
        {"role": "user", "content": "begin"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "go", "input": {"city": "Rome"}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "done"}]},
                {"type": "text", "text": "say so."},
            ],
        },
    ]
    body = {**message(""), "messages": messages, "system": [{"type": "text", "text": "be brief"}]}
    document = (await client.post(MESSAGES, json=body)).json()
    assert document["content"][0]["text"] == "so"
    ids = next(t for t in handler.requests[0].inputs if t.name == "prompt_token_ids").array().tolist()
    prompt = bytes(token for token in ids if token < 256).decode()
    assert prompt == "system\nbe brief\nuser\nbegin\nassistant\n\ntool\ndone\nuser\nsay so.\nassistant\n"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": None},
        {"messages": []},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"tools": [{"name": "a b"}]},
        {"tool_choice": {"type": "some"}},
        {"system": 1},
        {"stop_sequences": ["x"] * 100},
    ],
)
async def test_wrong_messages(client: httpx2.AsyncClient, wrong: dict[str, Any]) -> None:
    reply = await client.post(MESSAGES, json={**message("x"), **wrong})
    assert reply.status_code == 400
    assert reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_a_failure_within_the_events(client: httpx2.AsyncClient) -> None:
    reply = await client.post(MESSAGES, json=message("fail and say abc.", stream=True))
    last = reply.text.removesuffix("\n\n").split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.split("data: ")[1])["error"]["message"] == "the model failed"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_the_types_of_anthropic(status: int, kind: str) -> None:
    document = error_document(ApiError("no", status=status), is_message=True)
    assert (document["type"], document["error"]["type"]) == ("error", kind)
    if status >= 500:
        assert error_document(ApiError("no", status=status))["error"]["type"] == "server_error"


async def test_failures_of_the_server_have_those_types(client: httpx2.AsyncClient, handler: Any) -> None:
    for failure, status, kind in (
        (InternalError("broken"), 500, "api_error"),
        (Unavailable("full"), 503, "overloaded_error"),
        (DeadlineExceeded("late"), 504, "timeout_error"),
    ):
        handler.refusal = failure
        reply = await client.post(MESSAGES, json=message("x"))
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)


async def test_messages_that_are_too_long_name_their_field(client: httpx2.AsyncClient) -> None:
    for path in (MESSAGES, MESSAGES + "/count_tokens"):
        error = (await client.post(path, json=message("x" * 5000))).json()["error"]
        assert (error["type"], error["code"], error["param"]) == (
            *("invalid_request_error", "context_length_exceeded"),
            "messages",
        )
