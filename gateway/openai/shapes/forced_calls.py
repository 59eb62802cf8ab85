"""Tools of a chat: read from a request, turned into a grammar, and forced calls read from the text of an answer. Pure.

Where a tool is forced (`tool_choice` named or required), a grammar makes the text the call: `ForcedCalls` reads it.
Those in a free text are found by `charonia.generation.tool_calls`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from charonia.generation.tool_calls import CallReader, ToolDelta

from .api_errors import ApiError
from .sampling_fields import check_size

MAX_TOOLS = 128

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`mode` as in the request, "named" for one function: `name`."""

    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""


FREE = ToolChoice()


def tools_of(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], ToolChoice]:
    """The tools of a request and its choice among them. Raises `ApiError`."""
    given = body.get("tools")
    tools: list[dict[str, Any]] = []
    if given is not None:
        if not isinstance(given, list) or len(given) > MAX_TOOLS:
            raise ApiError(f"'tools' must be a list of at most {MAX_TOOLS} tools", param="tools")
        tools = [_tool(one, at) for at, one in enumerate(given)]
        check_size(tools, "tools")
    return tools, _choice(body.get("tool_choice"), tools)


def _tool(given: Any, at: int) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or given.get("type") != "function" or not isinstance(function, Mapping):
        raise ApiError(f"'tools[{at}]' must be an object with the type function", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError(f"'tools[{at}].function.name' must be 1 to 64 letters, digits, _ or -", param="tools")
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, Mapping):
        raise ApiError(f"'tools[{at}].function.parameters' must be a JSON schema", param="tools")
    return dict(given)


def _choice(given: Any, tools: list[dict[str, Any]]) -> ToolChoice:
    if given is None:
        return ToolChoice("auto" if tools else "none")
    if given == "none" or (given == "auto" and not tools):
        return FREE
    if given == "auto":
        return ToolChoice("auto")
    if given == "required":
        if not tools:
            raise ApiError("'tool_choice' is only allowed when 'tools' are specified", param="tool_choice")
        return ToolChoice("required")
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ApiError("'tool_choice' must be none, auto, required or a function", param="tool_choice")
    if all(tool["function"]["name"] != name for tool in tools):
        raise ApiError(f"'tool_choice' names '{name[:64]}', which is not among 'tools'", param="tool_choice")
    return ToolChoice("named", name)


def grammar_of(tools: Sequence[Mapping[str, Any]], choice: ToolChoice, *, parallel: bool) -> dict[str, Any] | None:
    """The `structured_outputs` that force a call; None where the model is free."""
    if choice.mode == "named":
        return {"json": next(_parameters(tool) for tool in tools if tool["function"]["name"] == choice.name)}
    if choice.mode != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [tool["function"]["name"]]}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
        if (schema := _parameters(tool)) is not None
    ]
    bounds = {"minItems": 1} if parallel else {"minItems": 1, "maxItems": 1}
    return {"json": {"type": "array", **bounds, "items": {"anyOf": calls}}}


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] | None = tool["function"].get("parameters")
    return found if found else {"type": "object", "properties": {}}


class NamedCall:
    """Reads a text that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name

    def push(self, text: str) -> list[str | ToolDelta]:
        name, self._name = self._name, ""
        return [ToolDelta(0, name, text)] if name or text else []

    def flush(self) -> list[str | ToolDelta]:
        return self.push("")


class ForcedCalls:
    """Reads a text that is a JSON array of `{"name", "parameters"}`; arguments are given on as they come."""

    def __init__(self) -> None:
        self._depth = 0
        self._index = -1
        self._head = ""
        self._in_string = self._escaped = self._in_arguments = self._is_given = False

    def push(self, text: str) -> list[str | ToolDelta]:
        found: list[str | ToolDelta] = []
        piece: list[str] = []
        for character in text:
            if self._in_arguments:
                piece.append(character)
            elif self._depth >= 2:
                self._head += character
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
                if self._depth == 2:
                    self._index, self._head, self._is_given = self._index + 1, character, False
                elif self._depth == 3 and (head := _HEAD.fullmatch(self._head[:-1])) and not self._in_arguments:
                    self._in_arguments = self._is_given = True
                    piece = [character]
                    found.append(ToolDelta(self._index, orjson.loads(head[1])))
            elif character in "}]":
                self._depth -= 1
                if self._in_arguments and self._depth == 2:
                    found.append(ToolDelta(self._index, arguments="".join(piece)))
                    piece, self._in_arguments = [], False
                elif self._depth == 1 and not self._is_given:
                    found += self._whole()
        if piece:
            found.append(ToolDelta(self._index, arguments="".join(piece)))
        return found

    def _whole(self) -> list[ToolDelta]:
        """The call of an object whose name did not come first, once it is complete."""
        try:
            call = orjson.loads(self._head)
        except orjson.JSONDecodeError:
            return []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        return [ToolDelta(self._index, call["name"], orjson.dumps(call.get("parameters", {})).decode())]

    def flush(self) -> list[str | ToolDelta]:
        return []


def reader_of(choice: ToolChoice) -> CallReader | None:
    """What reads the calls of a forced choice; None where the text is free."""
    if choice.mode == "named":
        return NamedCall(choice.name)
    return ForcedCalls() if choice.mode == "required" else None


def call_id(answer_id: str, choice: int, index: int) -> str:
    """The id of a call: the same whichever gateway writes the answer."""
    return "call_" + hashlib.blake2b(f"{answer_id}/{choice}/{index}".encode(), digest_size=12).hexdigest()


class ToolCalls:
    """The calls of one answer, gathered."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._arguments: list[list[str]] = []

    def add(self, delta: ToolDelta) -> None:
        while len(self.names) <= delta.index:
            self.names.append("")
            self._arguments.append([])
        self.names[delta.index] = delta.name or self.names[delta.index]
        self._arguments[delta.index].append(delta.arguments)

    def documents(self, answer_id: str, choice: int) -> list[dict[str, Any]]:
        """`message.tool_calls`."""
        return [
            {
                "id": call_id(answer_id, choice, index),
                "type": "function",
                "function": {"name": name, "arguments": "".join(arguments)},
            }
            for index, (name, arguments) in enumerate(zip(self.names, self._arguments, strict=True))
        ]
