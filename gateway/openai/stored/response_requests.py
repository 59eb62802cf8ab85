"""Reads the body of `POST /v1/responses`, and says it as a chat completion. Pure.

A conversation is a list of items. Items of responses before (`previous_response_id`) come first; the instructions of
those are not carried over. `response_events` writes what comes back.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import orjson

from gateway.openai.shapes.api_errors import ApiError, missing
from gateway.openai.shapes.known_fields import RESPONSE, refuse_unknown
from gateway.openai.shapes.sampling_fields import check_size, flag, text, whole

MAX_ITEMS = 4096
MAX_METADATA = 16
MAX_ID = 256
"""Of an item, in characters; one with a longer id gets another."""
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_SAMPLED = (
    *("temperature", "top_p", "top_logprobs", "presence_penalty", "frequency_penalty", "seed", "user", "priority"),
    *("stop", "logit_bias", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "bad_words"),
    *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "structured_outputs"),
    "chat_template_kwargs",
)
"""Fields that are those of a chat; the second line and the third one are vLLM's."""
_KEPT = (*_SAMPLED, "parallel_tool_calls", "tool_choice", "max_tool_calls", "prompt_cache_key", "safety_identifier")
INCLUDABLE = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    *("reasoning.encrypted_content", "message.output_text.logprobs"),
)
"""What OpenAI's `include` may name. Only the last one adds anything here: the others are of tools and inputs that no
response has.
"""
_UNSUPPORTED = ("conversation", "prompt", "context_management")


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """One request: `fields` are the members that the response object repeats, `items` the input as items."""

    model: str
    items: tuple[Mapping[str, Any], ...]
    instructions: str | None
    previous: str
    store: bool
    background: bool
    stream: bool
    max_output_tokens: int | None
    tools: tuple[Mapping[str, Any], ...]
    format: Mapping[str, Any]
    metadata: Mapping[str, str]
    fields: Mapping[str, Any]

    def note(self) -> bytes:
        """What the job of a stored response keeps of its request."""
        return zlib.compress(self._packed(0), 1)

    def digest(self) -> bytes:
        """What an idempotency key stands for: the same request has the same one, also where its prompt has the date."""
        return blake2b(self._packed(orjson.OPT_SORT_KEYS), digest_size=16).digest()

    def _packed(self, option: int) -> bytes:
        kept = {name: getattr(self, name) for name in ResponseRequest.__dataclass_fields__}
        return orjson.dumps(kept, option=option)

    @staticmethod
    def of_note(note: bytes) -> ResponseRequest:
        kept = orjson.loads(zlib.decompress(note))
        return ResponseRequest(**{**kept, "items": tuple(kept["items"]), "tools": tuple(kept["tools"])})

    def seeded(self, key: str) -> ResponseRequest:
        """With a seed that follows from an idempotency key, unless it has one: asked again, it is the same request."""
        if not key or self.fields.get("seed", -1) != -1:  # -1 is vLLM's word for a random one
            return self
        digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return replace(self, fields={**self.fields, "seed": int.from_bytes(digest, "little") >> 2})

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.fields.get("include", ())


def read_response_request(body: Mapping[str, Any]) -> ResponseRequest:
    """The request of a body. Raises `ApiError`."""
    refuse_unknown(body, RESPONSE)
    for name in _UNSUPPORTED:
        if body.get(name) is not None:
            raise ApiError(f"'{name}' is not supported", param=name)
    if body.get("truncation") not in (None, "disabled"):
        raise ApiError("'truncation' must be disabled: an input that is too long is refused", param="truncation")
    store, background = flag(body, "store", True), flag(body, "background")
    if background and not store:
        raise ApiError("'background' is only allowed when 'store' is true", param="background")
    _check_include(body.get("include"))
    if not body.get("tools") and body.get("tool_choice") not in (None, "none", "auto"):
        raise ApiError("'tool_choice' is only allowed when 'tools' are specified", param="tool_choice")
    flag(body, "parallel_tool_calls")
    instructions, previous = body.get("instructions"), body.get("previous_response_id")
    for name, value in (("instructions", instructions), ("previous_response_id", previous)):
        if value is not None and not isinstance(value, str):
            raise ApiError(f"'{name}' must be a string", param=name)
    fields = {name: body[name] for name in (*_KEPT, "include") if body.get(name) is not None}
    for name, value in fields.items():
        check_size(value, name)  # they are kept with the job, and no tokenizer bounds them
    return ResponseRequest(
        model=text(body, "model"),
        items=_items(body.get("input")),
        instructions=instructions,
        previous=previous or "",
        store=store,
        background=background,
        stream=flag(body, "stream"),
        max_output_tokens=whole(body, "max_output_tokens", 1, 2**31 - 1),
        tools=_tools(body.get("tools")),
        format=_format(body.get("text")),
        metadata=read_metadata(body.get("metadata")),
        fields=fields,
    )


def _check_include(value: Any) -> None:
    """Raises a 400 `ApiError` in OpenAI's words for what is none of its additions to a response."""
    if not isinstance(value, list | None):
        raise ApiError("'include' must be a list", param="include")
    for at, one in enumerate(value or ()):
        if one not in INCLUDABLE:
            raise ApiError(
                f"Invalid value: '{str(one)[:256]}'. Supported values are: {', '.join(map(repr, INCLUDABLE))}.",
                param=f"include[{at}]",
                code="invalid_value",
            )


def read_metadata(value: Any) -> dict[str, str]:
    """Pairs of text that a client attaches to an object. Raises `ApiError`."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise ApiError(f"'metadata' must be an object of at most {MAX_METADATA} pairs", param="metadata")
    for name, one in value.items():
        if not isinstance(one, str) or len(name) > 64 or len(one) > 512:
            raise ApiError("'metadata' must have keys up to 64 and strings up to 512 characters", param="metadata")
    return value


def _items(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The input as items, each with an id. Raises `ApiError`."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if value is None:
        raise missing("input")
    if not isinstance(value, list) or not value:
        raise ApiError("'input' must be a string or a list of items that is not empty", param="input")
    if len(value) > MAX_ITEMS:
        raise ApiError(f"'input' has more than {MAX_ITEMS} items", param="input")
    return tuple(_item(item, f"input[{at}]") for at, item in enumerate(value))


def _item(item: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise ApiError(f"'{param}' must be an object", param=param)
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise ApiError(f"'{param}.role' must be one of {', '.join(_ROLES)}", param=f"{param}.role")
        parts = _parts(item.get("content"), item["role"], f"{param}.content")
        found: dict[str, Any] = {"type": "message", "role": item["role"], "status": "completed", "content": parts}
    elif kind == "function_call":
        found = {"type": kind, "status": "completed"}
        found |= {name: _string(item, name, param) for name in ("call_id", "name", "arguments")}
    elif kind == "function_call_output":
        output = item.get("output")
        if isinstance(output, list):
            output = "".join(part["text"] for part in _parts(output, "user", f"{param}.output"))
        if not isinstance(output, str):
            raise ApiError(f"'{param}.output' must be a string", param=f"{param}.output")
        found = {"type": kind, "status": "completed", "call_id": _string(item, "call_id", param), "output": output}
    elif kind == "reasoning":
        found = {"type": kind, "summary": []}
    else:
        raise ApiError(f"items of type '{str(kind)[:64]}' are not supported", param=f"{param}.type")
    given = item.get("id")
    return {"id": given if isinstance(given, str) and 0 < len(given) <= MAX_ID else _id_of(found, param), **found}


def _id_of(item: Mapping[str, Any], place: str) -> str:
    prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}.get(item["type"], "rs")
    return f"{prefix}_" + blake2b(place.encode() + orjson.dumps(item), digest_size=12).hexdigest()


def _string(item: Mapping[str, Any], name: str, param: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(f"'{param}.{name}' must be a string", param=f"{param}.{name}")
    return value


def _parts(content: Any, role: str, param: str) -> list[dict[str, Any]]:
    """The content of a message as parts of text. Raises `ApiError` for images and files."""
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise ApiError(f"'{param}' must be a string or a list of parts", param=param)
    found: list[dict[str, Any]] = []
    for part in content:
        if not isinstance(part, dict):
            raise ApiError(f"'{param}' must be a list of objects", param=param)
        if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
            found.append({"type": kind, "text": part["refusal"]})
            continue
        if part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ApiError(f"'{param}': only parts of text are supported", param=param)
        more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
        found.append({"type": kind, "text": part["text"], **more})
    return found


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ApiError("'tools' must be a list of tools", param="tools")
    for at, tool in enumerate(value):
        if tool.get("type") != "function":
            kind = str(tool.get("type"))[:64]
            raise ApiError(f"tools of type '{kind}' are not supported", param=f"tools[{at}].type")
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise ApiError("a function needs a name", param=f"tools[{at}].name")
    return tuple(value)


def _format(value: Any) -> Mapping[str, Any]:
    """`text.format`. Its schema is checked as `response_format` of the chat completion."""
    if value is None:
        return {"type": "text"}
    form = value.get("format") if isinstance(value, dict) else value
    if form is None:
        return {"type": "text"}
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise ApiError("'text.format' must have a 'type' of text, json_object or json_schema", param="text.format")
    if form["type"] == "json_schema" and not isinstance(form.get("schema"), dict):
        raise ApiError("'text.format.schema' must be a JSON schema", param="text.format.schema")
    return form


# -- as a chat completion ---------------------------------------------------------------------------------------------


def chat_body(request: ResponseRequest, before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The body of the chat completion that this response is; `before` are the items of the responses before it."""
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    for item in (*before, *request.items):
        _add_message(messages, item)
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    # one that is followed later has to give its tokens as they come
    body["stream"] = request.stream or request.background
    body |= {name: request.fields[name] for name in _SAMPLED if name in request.fields}
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if request.wants_logprobs or body.get("top_logprobs"):
        body["logprobs"] = True
    elif "top_logprobs" in body:
        del body["top_logprobs"]
    if request.tools:
        body["tools"] = [_chat_tool(tool) for tool in request.tools]
        if (choice := request.fields.get("tool_choice")) is not None:
            named = isinstance(choice, dict) and choice.get("type") == "function"
            body["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}} if named else choice
        if "parallel_tool_calls" in request.fields:
            body["parallel_tool_calls"] = request.fields["parallel_tool_calls"]
    if request.format["type"] != "text":
        body["response_format"] = _chat_format(request.format)
    return body


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    kind = item["type"]
    if kind == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": "".join(part["text"] for part in item["content"])})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant":  # what a model says and the calls it makes are one message of a chat
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": function}


def _chat_format(form: Mapping[str, Any]) -> dict[str, Any]:
    if form["type"] == "json_object":
        return {"type": "json_object"}
    named = {name: form[name] for name in ("name", "description", "schema", "strict") if name in form}
    return {"type": "json_schema", "json_schema": named}


# -- the object -------------------------------------------------------------------------------------------------------


def response_object(request: ResponseRequest, response_id: str, created_s: int) -> dict[str, Any]:
    """The response without what comes of it: status, output and usage are `response_events`'."""
    fields = request.fields
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "status": "in_progress",
        "background": request.background,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": fields.get("max_tool_calls"),
        "model": request.model,
        "output": [],
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": request.previous or None,
        "prompt_cache_key": fields.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": fields.get("safety_identifier"),
        "service_tier": "default",
        "store": request.store,
        "temperature": fields.get("temperature", 1.0),
        "text": {"format": dict(request.format)},
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": [dict(tool) for tool in request.tools],
        "top_logprobs": fields.get("top_logprobs", 0),
        "top_p": fields.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": None,
        "user": fields.get("user"),
        "metadata": dict(request.metadata),
    }
