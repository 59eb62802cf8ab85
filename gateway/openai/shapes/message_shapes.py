"""Anthropic's messages: the request read as a chat, the answer and its events written. Pure.

`chat_shapes` reads the chat that a request becomes, and does the same for OpenAI's form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from charonia.generation.tool_calls import CallReader, ToolDelta

from .api_errors import ApiError, missing
from .chat_shapes import ChatRequest, read_chat
from .forced_calls import ToolCalls, call_id
from .text_answers import TextDelta, TextFold

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}

Event = tuple[str, dict[str, Any]]
"""The name of an event and its data."""


def read_messages_request(body: Mapping[str, Any], *, counts: bool = False) -> ChatRequest:
    """The chat that a body asks for; with `counts` only its tokens are. Raises `ApiError`."""
    if body.get("max_tokens") is None and not counts:
        raise missing("max_tokens")
    chat: dict[str, Any] = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat["messages"] = [*_system(body.get("system")), *_messages(body.get("messages"))]
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if body.get("tools"):
        chat["tools"] = _tools(body["tools"])
    choice = body.get("tool_choice")
    if choice is not None:
        if not isinstance(choice, Mapping) or choice.get("type") not in (*_CHOICES, "tool"):
            raise ApiError("'tool_choice' must have a type of auto, any, tool or none", param="tool_choice")
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = _CHOICES.get(choice["type"], named)
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    return read_chat(chat)


def _system(given: Any) -> list[dict[str, Any]]:
    if not given:
        return []
    if not isinstance(given, str | list):
        raise ApiError("'system' must be a string or a list of text blocks", param="system")
    return [{"role": "system", "content": given}]


def _tools(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise ApiError("'tools' must be a list of tools", param="tools")
    return [
        {
            "type": "function",
            "function": {
                "name": one.get("name"),
                "description": one.get("description") or "",
                "parameters": one.get("input_schema"),
            },
        }
        for one in given
    ]


def _messages(given: Any) -> list[dict[str, Any]]:
    if given is None:
        raise missing("messages")
    if not isinstance(given, list) or not given:
        raise ApiError("'messages' must be a list that is not empty", param="messages")
    found: list[dict[str, Any]] = []
    for at, message in enumerate(given):
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            raise ApiError(f"'messages[{at}]' must have a role of user or assistant", param=f"messages[{at}]")
        found += _message(message["role"], message.get("content"), f"messages[{at}].content")
    return found


def _message(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    """The messages that one stands for: results of tools are messages of their own."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ApiError(f"'{where}' must be a string or a list of blocks", param=where)
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append({"type": "text", "text": block.get("text")})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content") or ""}
            results.append(result)
        elif kind not in ("thinking", "redacted_thinking"):  # earlier thoughts are not shown again
            raise ApiError(f"'{where}' has a block of type '{str(kind)[:32]}', which is not supported", param=where)
    if calls:
        return [{"role": role, "content": texts or None, "tool_calls": calls}]
    return [*results, {"role": role, "content": texts}] if texts or not results else results


@dataclass(slots=True)
class MessageAnswer:
    """Writes the answer to a message, as events or whole, from its deltas. `reader` finds calls in the text."""

    request: ChatRequest
    id: str
    reader: CallReader | None
    prompt_tokens: int = 0
    fold: TextFold = field(default_factory=TextFold)
    calls: ToolCalls = field(default_factory=ToolCalls)
    _content: list[str] = field(default_factory=list)
    _block: int = -1
    """The number of the open block of content."""
    _open: tuple[str, int] | None = None
    """The kind of the open block, and the call that it has."""

    def opening(self) -> Iterator[Event]:
        """The first event."""
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        yield "message_start", {"message": {**self._head(), "content": [], "stop_reason": None, "usage": usage}}

    def events(self, delta: TextDelta) -> Iterator[Event]:
        """The events of a delta; the last one closes its block and says why the text ended."""
        for part in self._parts(delta):
            if isinstance(part, ToolDelta):
                yield from self._opened("tool_use", part.index, part.name)
                written: dict[str, Any] = {"type": "input_json_delta", "partial_json": part.arguments}
                if not part.arguments:
                    continue
            else:
                yield from self._opened("text", 0, "")
                written = {"type": "text_delta", "text": part}
            yield "content_block_delta", {"index": self._block, "delta": written}
        if delta.finish:
            yield from self._closed()
            usage = {"input_tokens": self._prompt_tokens, "output_tokens": self.fold.count}
            stop = {"stop_reason": self._reason(), "stop_sequence": None}
            yield "message_delta", {"delta": stop, "usage": usage}
            yield "message_stop", {}

    def add(self, delta: TextDelta) -> None:
        """Take a delta, for `document`."""
        self._content += [part for part in self._parts(delta) if isinstance(part, str)]

    def document(self) -> dict[str, Any]:
        """The whole answer."""
        text = "".join(self._content)
        content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not self.calls.names else []
        for call in self.calls.documents(self.id, 0):
            function = call["function"]
            block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            content.append({**block, "input": _object(function["arguments"])})
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": self.fold.count}
        return {**self._head(), "content": content, "stop_reason": self._reason(), "usage": usage}

    def _parts(self, delta: TextDelta) -> list[str | ToolDelta]:
        self.fold.add(delta)
        if self.reader is None:
            return [delta.text] if delta.text else []
        parts = [*self.reader.push(delta.text), *(self.reader.flush() if delta.finish else [])]
        for part in parts:
            if isinstance(part, ToolDelta):
                self.calls.add(part)
        return [part for part in parts if part != ""]

    def _opened(self, kind: str, call: int, name: str) -> Iterator[Event]:
        """Begin a block of content, unless this one is open; the one before it ends."""
        if self._open == (kind, call):
            return
        yield from self._closed()
        self._block, self._open = self._block + 1, (kind, call)
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind == "tool_use":
            block = {"type": "tool_use", "id": call_id(self.id, 0, call), "name": name, "input": {}}
        yield "content_block_start", {"index": self._block, "content_block": block}

    def _closed(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield "content_block_stop", {"index": self._block}

    def _head(self) -> dict[str, Any]:
        names = {"id": self.id, "type": "message", "role": "assistant", "model": self.request.model}
        return {**names, "stop_sequence": None}

    @property
    def _prompt_tokens(self) -> int:
        return self.prompt_tokens or self.fold.prompt_tokens or 0

    def _reason(self) -> str:
        if self.calls.names and self.fold.finish != "length":
            return "tool_use"
        return _REASONS.get(self.fold.finish, "end_turn")


def _object(arguments: str) -> Any:
    """The arguments of a call as values; a call that was cut short has none."""
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
