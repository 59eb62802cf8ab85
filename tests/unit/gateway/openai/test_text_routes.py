"""Chats and completions: the shape and order of what clients read."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx2
import pydantic
import pytest

from charonia.errors import ResourceExhausted, Unavailable
from gateway.openai.openai_application import OpenAiInterface

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NO_SCHEMA = {"type": "none"}


def tool(name: str, schema: dict[str, Any] = CITY) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "says", "messages": [{"role": "user", "content": text}], **more}


async def events(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, without the last one, which says that it is done."""
    reply = await client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = reply.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_a_chat(client: httpx2.AsyncClient, handler: Any) -> None:
    reply = await client.post(CHAT, json=chat("say hello there."))
    assert reply.status_code == 200
    document = reply.json()
    assert document["object"] == "chat.completion"
    assert document["id"].startswith("chatcmpl-")
    (choice,) = document["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "hello there"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    (request,) = handler.requests
    ids = next(t for t in request.inputs if t.name == "prompt_token_ids").array().tolist()
    assert document["usage"]["prompt_tokens"] == len(ids)
    assert document["usage"]["completion_tokens"] == len("hello there")
    assert document["usage"]["total_tokens"] == len(ids) + len("hello there")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat("say hello.")),
        (COMPLETIONS, {"model": "says", "prompt": "say hello."}),
        ("/v1/messages", chat("say hello.", max_tokens=9)),
        ("/v1/embeddings", {"model": "embeds", "input": "a text"}),
        ("/v1/rerank", {"model": "embeds", "query": "a text", "documents": ["a text"]}),
    ],
)
async def test_a_call_goes_to_the_version_that_the_rule_has_for_it(
    path: str, body: dict[str, Any], client: httpx2.AsyncClient, handler: Any
) -> None:
    for headers, version in (({"X-Canary": "yes"}, 2), ({"X-Canary": "no"}, 1), ({}, 1)):
        handler.requests.clear()
        reply = await client.post(path, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        assert {request.served.version for request in handler.requests} == {version}


async def test_chunks_come_in_the_order_that_clients_expect(client: httpx2.AsyncClient) -> None:
    chunks = await events(client, CHAT, chat("say abc."))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {"content": "c"}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)


async def test_usage_is_a_chunk_of_its_own(client: httpx2.AsyncClient) -> None:
    chunks = await events(client, CHAT, chat("say abc.", stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    reply = await client.post(CHAT, json=chat("say abc.", stream_options={"include_usage": True}))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_so_far_is_in_each_chunk_if_asked_for(client: httpx2.AsyncClient, path: str) -> None:
    """vLLM's `continuous_usage_stats`, which counts only beside `include_usage`."""
    body = chat("say abc.") if path == CHAT else {"model": "says", "prompt": "say abc."}
    body |= {"stream": True, "max_tokens": 3, "min_tokens": 3, "ignore_eos": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(client, path, body | {"stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == ([0] if path == CHAT else []) + [1, 2, 3, 3]
    assert all(
        one["usage"]["total_tokens"] == one["usage"]["prompt_tokens"] + count
        for one, count in zip(chunks, counts, strict=True)
    )
    alone = await events(client, path, body | {"stream_options": {"continuous_usage_stats": True}})
    assert all("usage" not in chunk for chunk in alone)


async def test_several_choices_have_seeds_of_their_own_and_repeat(client: httpx2.AsyncClient) -> None:
    bodies = [(await client.post(CHAT, json=chat("x", n=3, seed=5, max_tokens=8))).json() for _ in range(2)]
    texts = [[choice["message"]["content"] for choice in body["choices"]] for body in bodies]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    assert [choice["index"] for choice in bodies[0]["choices"]] == [0, 1, 2]
    assert bodies[0]["usage"]["completion_tokens"] == 24
    chunks = await events(client, CHAT, chat("x", n=3, seed=5, max_tokens=8))
    joined = ["", "", ""]
    for chunk in chunks:
        joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert joined == texts[0]
    assert [c["choices"][0]["finish_reason"] for c in chunks].count("length") == 3


async def test_the_newer_bound_of_tokens_wins(client: httpx2.AsyncClient) -> None:
    body = chat("say abcdef.", max_tokens=5, max_completion_tokens=2)
    choice = (await client.post(CHAT, json=body)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "length")


async def test_without_a_bound_a_chat_has_the_rest_of_the_context(client: httpx2.AsyncClient, handler: Any) -> None:
    document = (await client.post(CHAT, json=chat("say hi."))).json()
    (request,) = handler.requests
    sampling = json.loads(next(t for t in request.inputs if t.name == "sampling_parameters").array()[0])
    assert sampling["max_tokens"] == 2048 - document["usage"]["prompt_tokens"]


async def test_logprobs_of_a_chat(client: httpx2.AsyncClient) -> None:
    body = chat("say é.", logprobs=True, top_logprobs=2)
    whole = (await client.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in whole] == [[0xC3], [0xA9]]
    assert whole[0]["logprob"] == -0.25
    assert [one["logprob"] for one in whole[0]["top_logprobs"]] == [-0.25, -2.0]
    chunks = await events(client, CHAT, body)
    streamed = [one for c in chunks for one in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole
    for wrong, param in (
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ):
        reply = await client.post(CHAT, json=chat("x", **wrong))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_response_formats_become_structured_output(client: httpx2.AsyncClient, handler: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
    document = (await client.post(CHAT, json=chat("where", response_format=form))).json()
    assert json.loads(document["choices"][0]["message"]["content"]) == {"city": "Paris"}
    await client.post(CHAT, json=chat("where", response_format={"type": "json_object"}))
    sampling = [
        json.loads(r.inputs[2].array()[0]) for r in handler.requests if r.inputs[2].name == "sampling_parameters"
    ]
    assert [one["structured_outputs"] for one in sampling] == [{"json": CITY}, {"json_object": True}]


async def test_a_named_tool_is_called(client: httpx2.AsyncClient) -> None:
    body = chat("where", tools=[tool("find"), tool("go")], tool_choice={"type": "function", "function": {"name": "go"}})
    choice = (await client.post(CHAT, json=body)).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "stop")
    assert (call["type"], call["function"]["name"]) == ("function", "go")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    chunks = await events(client, CHAT, body)
    calls = [c["choices"][0]["delta"]["tool_calls"][0] for c in chunks if "tool_calls" in c["choices"][0]["delta"]]
    assert calls[0]["function"]["name"] == "go"
    assert calls[0]["id"].startswith("call_")
    assert all("name" not in one["function"] and one["index"] == 0 for one in calls[1:])
    assert json.loads("".join(one["function"]["arguments"] for one in calls)) == {"city": "Paris"}


async def test_a_required_tool_is_called(client: httpx2.AsyncClient) -> None:
    body = chat("where", tools=[tool("find"), tool("go")], tool_choice="required")
    choice = (await client.post(CHAT, json=body)).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "find"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    chunks = await events(client, CHAT, body)
    calls = [c["choices"][0]["delta"]["tool_calls"][0] for c in chunks if "tool_calls" in c["choices"][0]["delta"]]
    assert json.loads("".join(one["function"]["arguments"] for one in calls)) == {"city": "Paris"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert not [c for c in chunks if c["choices"][0]["delta"].get("content")]


async def test_completions_of_several_prompts(client: httpx2.AsyncClient) -> None:
    body = {"model": "says", "prompt": ["say a.", "say bb."], "n": 2, "echo": True}
    document = (await client.post(COMPLETIONS, json=body)).json()
    assert document["object"] == "text_completion"
    texts = [(choice["index"], choice["text"]) for choice in document["choices"]]
    assert texts == [(0, "say a.a"), (1, "say a.a"), (2, "say bb.bb"), (3, "say bb.bb")]
    assert document["usage"] == {
        "prompt_tokens": 13,
        "completion_tokens": 6,
        "total_tokens": 19,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    tokens = [list(b"say a."), list(b"say bb.")]
    again = (await client.post(COMPLETIONS, json={**body, "prompt": tokens})).json()
    assert again["choices"] == document["choices"]
    one = (await client.post(COMPLETIONS, json={**body, "prompt": tokens[0], "n": 1})).json()
    assert [choice["text"] for choice in one["choices"]] == ["say a.a"]
    chunks = await events(client, COMPLETIONS, body)
    joined: dict[int, str] = {}
    for chunk in chunks:
        joined[chunk["choices"][0]["index"]] = (
            joined.get(chunk["choices"][0]["index"], "") + chunk["choices"][0]["text"]
        )
    assert joined == dict(texts)


async def test_logprobs_of_a_completion(client: httpx2.AsyncClient) -> None:
    body = {"model": "says", "prompt": "say ab.", "logprobs": 2}
    found = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b"]
    assert found["text_offset"] == [0, 1]
    assert found["token_logprobs"] == [-0.25, -0.25]
    assert found["top_logprobs"][0] == {"a": -0.25, "c": -2.0}
    chunks = await events(client, COMPLETIONS, body)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1]]


async def test_stop_strings_and_fields_without_effect(client: httpx2.AsyncClient) -> None:
    body = {"model": "says", "prompt": "say one two.", "stop": " two", "store": True, "user": "me", "cache_salt": "x"}
    choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one", "stop")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings"])
async def test_fields_that_are_not_known(client: httpx2.AsyncClient, handler: Any, path: str) -> None:
    """A mistyped bound is no call without a bound; OpenAI's words."""
    bodies = {CHAT: chat("x"), COMPLETIONS: {"model": "says", "prompt": "x"}}
    body = bodies.get(path, {"model": "embeds", "input": "x"})
    reply = await client.post(path, json={**body, "max_token": 5})
    assert reply.status_code == 400
    assert reply.json()["error"] == {
        "message": "Unknown parameter: 'max_token'.",
        "type": "invalid_request_error",
        "param": "max_token",
        "code": "unknown_parameter",
    }
    assert len((await client.post(path, json={**body, "x" * 5000: 5})).content) < 500
    assert not handler.requests
    in_a_message = {"model": "says", "messages": [{"role": "user", "content": "x", "extra": 1}]}
    assert (await client.post(CHAT, json=in_a_message)).status_code == 200


@pytest.mark.parametrize(("path", "given"), [(CHAT, chat("x")), (COMPLETIONS, {"model": "says", "prompt": ["x", "y"]})])
async def test_priorities(client: httpx2.AsyncClient, handler: Any, path: str, given: dict[str, Any]) -> None:
    for priority, level in ((None, 0), (0, 0), (3, 3)):
        handler.requests.clear()
        assert (await client.post(path, json={**given, "n": 2, "priority": priority})).status_code == 200
        assert {request.priority for request in handler.requests} == {level}
    reply = await client.post(path, json={**given, "priority": -1})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "priority")


async def test_content_parts_and_earlier_calls(client: httpx2.AsyncClient, handler: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "go", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
        {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "say so."}]},
    ]
    reply = await client.post(CHAT, json={"model": "says", "messages": messages})
    assert reply.json()["choices"][0]["message"]["content"] == "so"
    ids = next(t for t in handler.requests[0].inputs if t.name == "prompt_token_ids").array().tolist()
    assert bytes(token for token in ids if token < 256).startswith(b"system\nbe brief\nassistant\n")
    messages[-1]["content"] = [{"type": "image_url", "image_url": {"url": "data:"}}]
    reply = await client.post(CHAT, json={"model": "says", "messages": messages})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages[3].content")


async def test_adapters(client: httpx2.AsyncClient) -> None:
    for name in ("says:red", "red"):
        reply = await client.post(CHAT, json={**chat("say hi."), "model": name})
        assert reply.json()["choices"][0]["message"]["content"] == "red:hi"
        assert reply.json()["model"] == name
    reply = await client.post(CHAT, json={**chat("say hi."), "model": "says:green"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_model_without_a_tokenizer(client: httpx2.AsyncClient) -> None:
    document = (await client.post(CHAT, json={**chat("say hi."), "model": "plain"})).json()
    assert document["choices"][0]["message"]["content"] == "hi\nassistant:"[:2]
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["usage"]["prompt_tokens"] == 0
    for prompt in ([1, 2], ""):
        reply = await client.post(COMPLETIONS, json={"model": "plain", "prompt": prompt})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


async def test_prompts_that_are_too_long_are_refused_before_the_log(client: httpx2.AsyncClient, handler: Any) -> None:
    for body in (
        {"model": "says", "prompt": "x" * 2048},
        {"model": "says", "prompt": "x" * 2040, "max_tokens": 9},
        {"model": "says", "prompt": [1] * 3000},
    ):
        reply = await client.post(COMPLETIONS, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert reply.json()["error"]["param"] == "prompt"
        assert "maximum context length is 2048 tokens" in reply.json()["error"]["message"]
    for body in (chat("x" * 10_000_000), chat("x" * 2010, max_tokens=200)):
        reply = await client.post(CHAT, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert reply.json()["error"]["param"] == "messages"
    for path, body, param in (
        ("/tokenize", {"model": "says", "prompt": "x" * 5000}, "prompt"),
        ("/tokenize", chat("x" * 5000), "messages"),
    ):
        error = (await client.post(path, json=body)).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert not handler.requests


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 10**9}, "n"),
        ({"n": 0}, "n"),
        ({"stop": ["x"] * 100_000}, "stop"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": "x"}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"seed": 2**70}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 90_000]}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": NO_SCHEMA}}}, "response_format"),
        ({"structured_outputs": {"json": NO_SCHEMA}}, "structured_outputs"),
        ({"tool_choice": "required", "tools": [tool("f", NO_SCHEMA)]}, "tools"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [300]}, "logprob_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": 7, "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "r" * 65, "content": "x"}]}, "messages[0].role"),
        ({"model": ""}, "model"),
    ],
)
async def test_wrong_fields_are_named(
    client: httpx2.AsyncClient, handler: Any, more: dict[str, Any], param: str
) -> None:
    reply = await client.post(CHAT, json=chat("x", **more))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert reply.json()["detail"] == error["message"]
    assert len(reply.content) < 1000
    assert not handler.requests


async def test_echo_with_log_probabilities(client: httpx2.AsyncClient) -> None:
    body = {"model": "says", "prompt": ["say a.", "say bb."], "echo": True, "logprobs": 2, "n": 2}
    choices = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert [choice["text"] for choice in choices] == ["say a.a", "say a.a", "say bb.bb", "say bb.bb"]
    found = choices[2]["logprobs"]
    assert found["tokens"] == list("say bb.bb")
    assert found["token_logprobs"] == [None, *[-0.25] * 8]
    assert found["top_logprobs"][:2] == [None, {"a": -0.25, "c": -2.0}]
    assert found["text_offset"] == list(range(9))
    assert choices[0]["prompt_logprobs"] is None
    streamed = await events(client, COMPLETIONS, body)
    for index, choice in enumerate(choices):
        parts = [c["choices"][0] for c in streamed if c["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [one for part in parts if part["logprobs"] for one in part["logprobs"]["token_logprobs"]] == choice[
            "logprobs"
        ]["token_logprobs"]
        offsets = [one for part in parts if part["logprobs"] for one in part["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]


async def test_a_prompt_is_scored_without_a_text(client: httpx2.AsyncClient, handler: Any) -> None:
    body = {"model": "says", "prompt": "say bb.", "echo": True, "logprobs": 1, "max_tokens": 0}
    document = (await client.post(COMPLETIONS, json=body)).json()
    (choice,) = document["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("say bb.", list("say bb."))
    assert (document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]) == (7, 0)
    streamed = await events(client, COMPLETIONS, body)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "say bb."
    sampling = next(tensor for tensor in handler.requests[-1].inputs if tensor.name == "sampling_parameters")
    assert b'"max_tokens":1' in bytes(sampling.data)
    reply = await client.post(COMPLETIONS, json={**body, "echo": False})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")


async def test_log_probabilities_of_prompts_in_the_form_of_vllm(client: httpx2.AsyncClient) -> None:
    body = {"model": "says", "prompt": "say b.", "prompt_logprobs": 2}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["logprobs"] is None
    rows = choice["prompt_logprobs"]
    assert rows[0] is None
    assert rows[1] == {
        str(ord("a")): {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
        str(ord("c")): {"logprob": -2.0, "rank": 2, "decoded_token": "c"},
    }
    assert len(rows) == len("say b.")
    document = (await client.post(CHAT, json=chat("say b.", prompt_logprobs=0))).json()
    assert len(document["prompt_logprobs"]) == document["usage"]["prompt_tokens"]
    for path, more in ((COMPLETIONS, {"prompt": "x"}), (CHAT, chat("x"))):
        for wrong in ({"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}):
            reply = await client.post(path, json={"model": "says", **more, **wrong})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_a_model_that_does_not_score_prompts(client: httpx2.AsyncClient, handler: Any) -> None:
    known = handler.models["says"]
    handler.models["says"] = replace(
        known, inputs={name: one for name, one in known.inputs.items() if name != "return_prompt_logprobs"}
    )
    for path, body, param in (
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        (CHAT, chat("x", prompt_logprobs=1), "prompt_logprobs"),
        (COMPLETIONS, {"model": "plain", "prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
    ):
        reply = await client.post(path, json={"model": "says", **body})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
        assert "gives no log probabilities of prompts" in error["message"]
    assert not handler.requests


async def test_suffix_and_other_best_ones_are_refused(client: httpx2.AsyncClient) -> None:
    for more, param in (
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
    ):
        reply = await client.post(COMPLETIONS, json={"model": "says", "prompt": "x", **more})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_its_status(
    client: httpx2.AsyncClient, handler: Any, stream: bool
) -> None:
    assert (await client.post(CHAT, json=chat("fail0", stream=stream))).status_code == 400
    handler.refusal = ResourceExhausted("too many requests wait")
    reply = await client.post(CHAT, json=chat("x", stream=stream))
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    handler.refusal = Unavailable("no executor")
    assert (await client.post(CHAT, json=chat("x", stream=stream))).status_code == 503


async def test_a_failure_after_the_first_token_is_an_event(client: httpx2.AsyncClient) -> None:
    reply = await client.post(CHAT, json=chat("fail and say abc.", stream=True))
    assert reply.status_code == 200
    *_, failed, done, _ = reply.text.split("\n\n")
    assert json.loads(failed.removeprefix("data: "))["error"]["message"] == "the model failed"
    assert done == "data: [DONE]"
    whole = await client.post(CHAT, json=chat("fail and say abc.", n=2, stream=True))
    assert whole.text.count('"error"') == 1


async def test_a_client_that_leaves_cancels_its_requests_and_is_counted(
    handler: Any, interface: OpenAiInterface
) -> None:
    handler.gate.clear()
    body = json.dumps(chat("wait and say abc.", stream=True, n=2)).encode()
    first = asyncio.Event()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            first.set()

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "state": {"charonia.client_left": True}}
    task = asyncio.create_task(interface.answer(scope, receive, send))  # type: ignore[arg-type]
    await first.wait()
    task.cancel()
    await task
    await handler.stopped.wait()
    counts = interface.serving.counts
    assert counts.calls == {("chat", "says", "cancelled"): 1}
    assert counts.tokens["says", "", "completion"] in (1, 2)
    assert counts.tokens["says", "", "prompt"] > 0


@pytest.mark.parametrize(
    "structure",
    [
        {"json": {"type": "nothing"}},
        {"regex": "("},
        {"grammar": "start: nowhere"},
        {"json": ""},
        {"choice": []},
    ],
)
async def test_structures_that_no_engine_would_take(
    client: httpx2.AsyncClient, handler: Any, structure: dict[str, Any]
) -> None:
    reply = await client.post(CHAT, json=chat("x", structured_outputs=structure))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert not handler.requests


async def test_calls_in_free_text(client: httpx2.AsyncClient, handler: Any) -> None:
    said = 'ok <tool_call>{"name": "go", "arguments": {"city": "Rome"}}</tool_call>'
    body = chat(f"say {said}.", tools=[tool("find"), tool("go")], max_tokens=200)
    choice = (await client.post(CHAT, json=body)).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ok", "tool_calls")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("go", {"city": "Rome"})
    chunks = await events(client, CHAT, body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert "".join(delta.get("content") or "" for delta in deltas) == "ok"
    assert [one["function"]["name"] for one in calls if "name" in one["function"]] == ["go"]
    assert json.loads("".join(one["function"]["arguments"] for one in calls)) == {"city": "Rome"}
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["tool_calls"]
    without = (await client.post(CHAT, json={**body, "tool_choice": "none"})).json()["choices"][0]
    assert (without["message"]["content"], without["finish_reason"]) == (said, "stop")


async def test_resumable_models_answer_in_parts(client: httpx2.AsyncClient, handler: Any) -> None:
    """Also where the call is answered whole: what was generated is then in the log when an executor dies."""
    known = handler.models["says"]
    for resumable, asked in ((False, False), (True, True)):
        parameters = {**known.parameters, "charonia.resumable": str(resumable).lower()}
        handler.models["says"] = replace(known, parameters=parameters)
        document = (await client.post(CHAT, json=chat("say hello there."))).json()
        assert document["choices"][0]["message"]["content"] == "hello there"
        assert document["usage"]["completion_tokens"] == len("hello there")
        stream = next(tensor for tensor in handler.requests[-1].inputs if tensor.name == "stream")
        assert stream.array().tolist() == [asked]


async def test_ids_of_a_completions_tokens(client: httpx2.AsyncClient) -> None:
    body = {"model": "says", "prompt": "say ab."}
    (plain,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert (plain["token_ids"], plain["prompt_token_ids"]) == (None, None)
    body |= {"return_token_ids": True}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([*b"ab"], [*b"say ab."])
    chunks = [chunk["choices"][0] for chunk in await events(client, COMPLETIONS, body)]
    assert [chunk["token_ids"] for chunk in chunks] == [[*b"a"], [*b"b"]]
    assert [chunk["prompt_token_ids"] for chunk in chunks] == [[*b"say ab."], None]


async def test_ids_of_a_chats_tokens(client: httpx2.AsyncClient) -> None:
    plain = (await client.post(CHAT, json=chat("say ab."))).json()
    assert (plain["prompt_token_ids"], plain["choices"][0]["token_ids"]) == (None, None)
    body = chat("say ab.", return_token_ids=True)
    whole = (await client.post(CHAT, json=body)).json()
    assert whole["choices"][0]["token_ids"] == [*b"ab"]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    first, *rest = await events(client, CHAT, body)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in rest)
    assert [chunk["choices"][0]["token_ids"] for chunk in rest] == [[*b"a"], [*b"b"]]
    assert "token_ids" not in first["choices"][0]


async def test_a_chat_with_the_tokens_that_another_stage_made_of_its_prompt(
    client: httpx2.AsyncClient, handler: Any
) -> None:
    body = chat("x", return_token_ids=True, kv_transfer_params={"prompt_token_ids": [*b"say ab."], "mine": 1})
    whole = (await client.post(CHAT, json=body)).json()
    assert (whole["prompt_token_ids"], whole["choices"][0]["message"]["content"]) == ([*b"say ab."], "ab")
    assert whole["usage"]["prompt_tokens"] == 7
    first, *_ = await events(client, CHAT, body)
    assert first["prompt_token_ids"] == [*b"say ab."]
    assert [tensor.name for tensor in handler.requests[-1].inputs][:1] == ["prompt_token_ids"]
    rendered = (await client.post(CHAT, json=body | {"kv_transfer_params": None})).json()
    assert (await client.post(CHAT, json=body | {"kv_transfer_params": {"mine": 1}})).json()["prompt_token_ids"] == (
        rendered["prompt_token_ids"]
    )
    echoing = (await client.post(CHAT, json=body | {"echo": True})).json()
    assert echoing["prompt_token_ids"] == rendered["prompt_token_ids"], "the messages are needed then"


@pytest.mark.parametrize("wrong", [[], [-1], [True], ["a"], "say", [10**6], [97] * 5000])
async def test_such_tokens_that_no_model_would_take(client: httpx2.AsyncClient, handler: Any, wrong: Any) -> None:
    reply = await client.post(CHAT, json=chat("x", kv_transfer_params={"prompt_token_ids": wrong}))
    assert reply.status_code == 400, reply.text
    reply = await client.post(CHAT, json=chat("x", kv_transfer_params=[wrong]))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "kv_transfer_params")
    assert not handler.requests


async def test_a_model_that_takes_no_tokens_has_no_use_for_them(client: httpx2.AsyncClient, handler: Any) -> None:
    body = chat("x", kv_transfer_params={"prompt_token_ids": [97]}) | {"model": "plain"}
    reply = await client.post(CHAT, json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert not handler.requests


@pytest.mark.parametrize("goes_on", [True, False])
async def test_the_last_message_is_repeated_before_the_answer(client: httpx2.AsyncClient, goes_on: bool) -> None:
    body = chat("say ab.", n=2, echo=True, continue_final_message=goes_on)
    body["messages"].append({"role": "assistant", "content": [{"type": "text", "text": "I say: "}]})
    whole = (await client.post(CHAT, json=body)).json()
    assert [one["message"]["content"] for one in whole["choices"]] == ["I say: ab"] * 2
    chunks = await events(client, CHAT, body)
    for index in range(2):
        own = [one["choices"][0]["delta"] for one in chunks if one["choices"][0]["index"] == index]
        assert own[0] == {"role": "assistant", "content": "I say: "}
        assert "".join(delta.get("content", "") for delta in own) == "I say: ab"
    alone = (await client.post(CHAT, json=body | {"echo": False})).json()
    assert alone["choices"][0]["message"]["content"] == "ab"
    asked = (await client.post(CHAT, json=chat("say ab.", echo=True))).json()
    assert asked["choices"][0]["message"]["content"] == "ab", "the last message is of another role"


async def test_log_probabilities_by_token_ids(client: httpx2.AsyncClient) -> None:
    body = {"model": "says", "prompt": "say ab.", "logprobs": 2, "return_tokens_as_token_ids": True}
    found = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:97", "token_id:98"]
    assert found["top_logprobs"][0] == {"token_id:97": -0.25, "token_id:99": -2.0}
    body = chat("say a.", logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    (content,) = (await client.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["bytes"]) == ("token_id:97", [*b"token_id:97"])


async def test_chosen_tokens_are_asked_of_the_model(client: httpx2.AsyncClient, handler: Any) -> None:
    chosen = {"logprob_token_ids": [5], "allowed_token_ids": [97]}
    for path, body in (
        (COMPLETIONS, {"model": "says", "prompt": "say a.", "logprobs": 0, **chosen}),
        (CHAT, chat("say a.", logprobs=True, **chosen)),
    ):
        assert (await client.post(path, json=body)).status_code == 200
        given = next(one for one in handler.requests[-1].inputs if one.name == "sampling_parameters").array()
        assert {name: json.loads(given[0])[name] for name in chosen} == chosen
    refused = await client.post(COMPLETIONS, json={"model": "says", "prompt": "x", "logprob_token_ids": [5]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_token_ids")
    body = {"model": "says", "prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 0, "logprob_token_ids": [5]}
    assert (await client.post(COMPLETIONS, json=body)).json()["error"]["param"] == "logprob_token_ids"


async def test_prompts_are_cut(client: httpx2.AsyncClient, handler: Any) -> None:
    """Also one that the context has no room for; what is answered is what was kept."""
    body = {"model": "says", "prompt": "x" * 5000 + "say a.", "truncate_prompt_tokens": 6, "echo": True}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["text"] == "say a.a"
    body |= {"truncation_side": "right", "prompt": [*b"say b."] + [120] * 9}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["text"] == "say b.b"
    reply = await client.post(CHAT, json=chat("x" * 5000, truncate_prompt_tokens=-1, max_tokens=2))
    assert reply.json()["usage"]["prompt_tokens"] == 2046
    for more, model in ((2048, "says"), (4, "plain")):
        refused = await client.post(COMPLETIONS, json={"model": model, "prompt": "x", "truncate_prompt_tokens": more})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_prompts_that_are_cut_have_a_bound(client: httpx2.AsyncClient, handler: Any) -> None:
    """Of a text as one that is not cut: it is not encoded beyond that."""
    most = 2048 * len("<|im_start|>")
    for path, given in (
        (COMPLETIONS, lambda text: {"model": "says", "prompt": text, "max_tokens": 16}),
        (CHAT, lambda text: chat(text, max_tokens=16)),
    ):
        body = given("é" * (most - 100)) | {"truncate_prompt_tokens": -1}
        assert (await client.post(path, json=body)).json()["usage"]["prompt_tokens"] == 2032, "of 49,000"
        handler.requests.clear()
        error = (await client.post(path, json=given("é" * (most + 1)) | {"truncate_prompt_tokens": 5})).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"cuts may have at most {most} characters, but this one has" in error["message"]
        assert not handler.requests
    body = {"model": "says", "prompt": [97] * (16 * 2048), "truncate_prompt_tokens": 5}
    assert (await client.post(COMPLETIONS, json=body)).json()["usage"]["prompt_tokens"] == 5
    body["prompt"].append(97)
    error = (await client.post(COMPLETIONS, json=body)).json()["error"]
    assert (error["code"], error["message"]) == (
        "context_length_exceeded",
        "A prompt that 'truncate_prompt_tokens' cuts may have at most 32768 tokens, but this one has 32769.",
    )


@pytest.mark.parametrize(
    ("field", "value", "least", "most"),
    [
        ("seed", -(2**63) - 1, -(2**63), 2**63 - 1),
        ("seed", 2**63, -(2**63), 2**63 - 1),
        ("top_logprobs", 25, 0, 20),
        ("temperature", 2.1, 0, 2),
        ("presence_penalty", -3, -2, 2),
    ],
)
async def test_numbers_out_of_range_are_refused_in_pydantics_words(
    client: httpx2.AsyncClient, field: str, value: float, least: int, most: int
) -> None:
    with pytest.raises(pydantic.ValidationError) as raised:
        pydantic.create_model("Body", number=(type(value), pydantic.Field(ge=least, le=most)))(number=value)
    (expected,) = raised.value.errors()
    reply = await client.post(CHAT, json=chat("x", logprobs=True, **{field: value}))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, expected["type"], field)
    kind = f"[type={expected['type']}, input_value={value}, input_type={type(value).__name__}]"
    assert error["message"] == f"'{field}': {expected['msg']} {kind}"


async def test_a_share_of_nothing(client: httpx2.AsyncClient) -> None:
    error = (await client.post(CHAT, json=chat("x", top_p=0))).json()["error"]
    message = "'top_p': Input should be greater than 0 [type=greater_than, input_value=0, input_type=int]"
    assert (error["code"], error["message"]) == ("greater_than", message)


async def test_other_roles_are_for_the_template(client: httpx2.AsyncClient) -> None:
    body = {"model": "says", "messages": [{"role": "narrator", "content": "say a."}]}
    assert (await client.post(CHAT, json=body)).json()["choices"][0]["message"]["content"] == "a"


async def test_the_path_of_sagemaker(client: httpx2.AsyncClient) -> None:
    reply = await client.post("/invocations", json=chat("say a."))
    assert reply.json()["choices"][0]["message"]["content"] == "a"
    reply = await client.post("/invocations", json={"model": "says", "prompt": "say b."})
    assert reply.json()["choices"][0]["text"] == "b"
    assert (await client.post("/invocations", json={"model": "says"})).status_code == 400
