"""Bodies of `/v1/responses`, and the chats that they are."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.openai.shapes.api_errors import ApiError
from gateway.openai.shapes.chat_shapes import read_chat
from gateway.openai.stored.response_requests import (
    INCLUDABLE,
    ResponseRequest,
    chat_body,
    read_response_request,
    response_object,
)


def read(**body: Any) -> ResponseRequest:
    return read_response_request({"model": "m", "input": "hello", **body})


def test_defaults() -> None:
    request = read()
    assert (request.store, request.background, request.stream) == (True, False, False)
    assert request.items[0]["content"] == [{"type": "input_text", "text": "hello"}]
    assert request.items[0]["id"].startswith("msg_")
    assert request.items == read().items


def test_a_request_is_kept_as_it_is() -> None:
    request = read(
        instructions="x",
        metadata={"a": "b"},
        temperature=0.5,
        tools=[{"type": "function", "name": "f"}],
        background=True,
    )
    assert ResponseRequest.of_note(request.note()) == request


def test_the_members_of_a_schema_keep_their_order_and_a_key_does_not_depend_on_it() -> None:
    """The order is that in which a model writes an answer, and a later GET shows it."""
    members = {"zebra": {"type": "string"}, "apple": {"type": "string"}}
    request, other = (
        read(tools=[{"type": "function", "name": "f", "parameters": {"type": "object", "properties": dict(order)}}])
        for order in (members.items(), reversed(members.items()))
    )
    kept = ResponseRequest.of_note(request.note())
    assert list(kept.tools[0]["parameters"]["properties"]) == ["zebra", "apple"]
    assert request.digest() == other.digest()


def test_with_a_key_it_is_the_same_request_each_time() -> None:
    for given in ({}, {"seed": -1}):
        first, again = (read(**given).seeded("k") for _ in range(2))
        assert first.fields["seed"] == again.fields["seed"] >= 0
        assert first.digest() == again.digest()
        assert read(**given).seeded("other").fields["seed"] != first.fields["seed"]
    assert read(seed=5).seeded("k").fields["seed"] == 5
    assert read(seed=-1).seeded("").fields["seed"] == -1
    assert len({read(**more).digest() for more in ({}, {"input": "hi"}, {"seed": 5}, {"stream": True})}) == 4


def test_as_a_chat() -> None:
    before = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "before"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me see"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    request = read(
        input=[
            {"type": "function_call_output", "call_id": "c", "output": "7"},
            {"role": "developer", "content": [{"type": "input_text", "text": "brief"}]},
            {"type": "reasoning", "summary": []},
        ],
        instructions="be kind",
        max_output_tokens=5,
        temperature=0.5,
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        tool_choice={"type": "function", "name": "f"},
    )
    body = chat_body(request, before)
    assert [(message["role"], message["content"]) for message in body["messages"]] == [
        ("system", "be kind"),
        ("user", "before"),
        ("assistant", "let me see"),
        ("tool", "7"),
        ("system", "brief"),
    ]
    assert body["messages"][2]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    chat = read_chat(body)
    assert (chat.max_tokens, chat.sampling["temperature"], chat.tool_choice.name) == (5, 0.5, "f")


def test_a_schema() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    chat = read_chat(chat_body(read(text={"format": form}), ()))
    assert chat.sampling["structured_outputs"] == {"json": {"type": "object"}}
    assert response_object(read(text={"format": form}), "r", 1)["text"] == {"format": form}


def test_logprobs() -> None:
    assert read_chat(chat_body(read(top_logprobs=3), ())).top_logprobs == 3
    assert read_chat(chat_body(read(include=["message.output_text.logprobs"]), ())).top_logprobs == 0
    assert read_chat(chat_body(read(top_logprobs=0), ())).top_logprobs is None


def test_fields_that_a_chat_has_count() -> None:
    said = {"stop": ["x"], "logit_bias": {"5": 1.0}, "top_k": 3, "min_tokens": 2, "structured_outputs": {"regex": "a"}}
    request = read(**said, chat_template_kwargs={"plain": True})
    assert ResponseRequest.of_note(request.note()) == request
    chat = read_chat(chat_body(request, ()))
    assert {name: chat.sampling[name] for name in said} == said
    assert chat.template_arguments == {"plain": True}
    assert read(tool_choice="auto") != read(tool_choice="none")


def test_a_key_gives_a_seed() -> None:
    assert read().seeded("k") == read().seeded("k") != read().seeded("l")
    assert read().seeded("") == read()
    assert read(seed=7).seeded("k") == read(seed=7)


def test_what_is_followed_later_streams() -> None:
    assert chat_body(read(background=True), ())["stream"]
    assert not chat_body(read(), ())["stream"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"role": "pope", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"background": True, "store": False}, "background"),
        ({"store": "yes"}, "store"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"instructions": 1}, "instructions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include": 1}, "include"),
        ({"include": False}, "include"),
        ({"include": ["message.output_text.logprobs", "message.output_text.logprob"]}, "include[1]"),
        ({"include": [None]}, "include[0]"),
        ({"include": [["reasoning.encrypted_content"]]}, "include[0]"),
        ({"user": "x" * 100_000}, "user"),
    ],
)
def test_refusals_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(**body)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_what_include_may_name_is_listed_where_it_names_something_else() -> None:
    assert read(include=list(INCLUDABLE)).wants_logprobs
    assert read(include=[]).fields["include"] == []
    with pytest.raises(ApiError) as refused:
        read(include=["usage"])
    assert refused.value.code == "invalid_value"
    assert refused.value.message.startswith(
        "Invalid value: 'usage'. Supported values are: 'file_search_call.results', '"
    )
    assert refused.value.message.endswith("', 'message.output_text.logprobs'.")
