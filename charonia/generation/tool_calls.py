"""Calls of tools in the text that a model writes freely, found as the text comes.

A reader takes text in pieces and gives content and calls: a call's name once, then its arguments as pieces of JSON
text. However the text is cut, the joined content and calls are the same. What looks like a call but turns out to be
none, before its name and the begin of its arguments are there, is content. Forced calls are JSON by a grammar, and need
no reader of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A part of the call `index`: its name comes first and once, its arguments are JSON text in pieces."""

    index: int
    name: str = ""
    arguments: str = ""


class CallReader(Protocol):
    """Divides the text of an answer into content and calls, as it comes."""

    def push(self, text: str) -> list[str | ToolDelta]:
        """Returns what is certain once this text has come."""

    def flush(self) -> list[str | ToolDelta]:
        """Returns the rest, when the text has ended."""


def call_reader(tool_format: str) -> CallReader | None:
    """Returns a reader for a name of `FORMATS`, which `TextAssets.tool_format` has; None for any other."""
    make = FORMATS.get(tool_format)
    return make() if make is not None else None


class _Call:
    """Reads one call character by character: an object with `name` and `arguments` (or `parameters`), or, where the
    name is known before, the arguments alone. `done` at its end; `broken` at a character that fits no call.
    """

    def __init__(self, index: int, name: str = "") -> None:
        self.done = self.broken = False
        self._told = False
        self._index = index
        self._name = name
        self._bare = bool(name)
        self._phase = "value" if name else "begin"
        self._key = "arguments" if name else ""
        self._text: list[str] = []
        self._pending: list[str] = []
        """Arguments that are not given on yet."""
        self._has_arguments = False
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, character: str) -> None:
        phase = self._phase
        if phase == "value":
            self._value(character)
        elif phase == "key":
            self._in_key(character)
        elif character in _SPACE:
            pass
        elif phase == "begin" and character == "{":
            self._phase = "first"
        elif phase in ("first", "next") and character == '"':
            self._text, self._phase = [character], "key"
        elif phase == "colon" and character == ":":
            self._text, self._phase = [], "value"
        elif phase in ("first", "comma") and character == "}":
            self.done = True
            self.broken = not (self._name and self._has_arguments)
        elif phase == "comma" and character == ",":
            self._phase = "next"
        else:
            self.broken = True

    @property
    def given(self) -> bool:
        """Whether it is certain to be a call: it has a name and arguments, or their begin."""
        return bool(self._name) and self._has_arguments

    def take(self) -> list[str | ToolDelta]:
        """What is certain since the last time: the name as soon as there are arguments, then these."""
        if not self.given:
            return []
        arguments = "".join(self._pending)
        self._pending.clear()
        name = "" if self._told else self._name
        self._told = True
        return [ToolDelta(self._index, name, arguments)] if name or arguments else []

    def _in_key(self, character: str) -> None:
        self._text.append(character)
        if self._string_ends(character):
            key = _loaded("".join(self._text)) or ""
            # the first of several arguments counts
            self._key = "" if key in _ARGUMENTS and self._has_arguments else key
            self._phase = "colon"

    def _string_ends(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            return True
        return False

    def _value(self, character: str) -> None:
        if not self._text and character in _SPACE:
            return
        is_first = not self._text
        scalar = not is_first and self._text[0] not in '"{['
        if scalar and character in ",}" + _SPACE:
            self._end_value()
            if not self.broken and character not in _SPACE:
                self.push(character)
            return
        self._text.append(character)
        if self._key in _ARGUMENTS and self._text[0] in "{[":
            self._has_arguments = True
            self._pending.append(character)
        if self._in_string:
            if self._string_ends(character):
                self._in_string = False
                if not self._depth:
                    self._end_value()
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth < 0:
                self.broken = True
            elif not self._depth:
                self._end_value()

    def _end_value(self) -> None:
        text = "".join(self._text)
        if self._key == "name" and not self._name:
            self._name = _loaded(text) or ""
            if len(self._name) > MAX_NAME_CHARACTERS:
                self._name = ""
            self.broken = not self._name
        elif self._key in _ARGUMENTS and text[0] not in "{[":
            # some models write the arguments as a text, or null for none
            inner = _loaded(text)
            self._pending.append(inner if inner else "{}")
            self._has_arguments = True
        self._phase = "comma"
        self.done = self._bare


class _Reader:
    """What the formats share: content that may begin a mark is held back, and space beside calls is left out."""

    mark = ""
    """Begins calls, wherever it stands in the text."""

    def __init__(self) -> None:
        self._held = ""
        """Text that is not divided yet."""
        self._raw = ""
        """The text since the mark of a call that is not certain."""
        self._call: _Call | None = None
        self._calls = 0
        self._out: list[str | ToolDelta] = []
        self._space = ""
        self._step: Callable[[], bool] = self._content

    def push(self, text: str) -> list[str | ToolDelta]:
        self._held += text
        while self._held and self._step():
            pass
        if self._call is not None:
            self._out += self._call.take()
        out, self._out = self._out, []
        return out

    def flush(self) -> list[str | ToolDelta]:
        if self._call is not None and not self._call.given:
            self._say(self._raw)
        self._end()
        if not self._calls and self._space:
            self._out.append(self._space)
        out, self._out = self._out, []
        self._held = self._raw = self._space = ""
        self._call = None
        return out

    def _end(self) -> None:
        """What a format does with text that it holds at the end."""
        if self._call is None:
            self._say(self._raw + self._held)

    def _say(self, text: str) -> None:
        """Content. Space waits for the text behind it: before a call and behind the last one it is left out."""
        whole = self._space + text
        kept = whole.rstrip(_SPACE)
        self._space = whole[len(kept) :]
        if kept:
            self._out.append(kept)

    def _content(self) -> bool:
        """Look for the mark."""
        at = self._held.find(self.mark)
        if at >= 0:
            self._say(self._held[:at])
            self._held = self._held[at + len(self.mark) :]
            self._raw = self.mark
            self._step = self._marked
            return True
        kept = _overlap(self._held, self.mark)
        self._say(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return False

    def _marked(self) -> bool:
        raise NotImplementedError

    def _skip_space(self) -> None:
        text = self._held.lstrip(_SPACE)
        self._raw += self._held[: len(self._held) - len(text)]
        self._held = text

    def _begin_call(self, name: str = "") -> None:
        self._call = _Call(self._calls, name)
        self._step = self._in_call

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        count = 0
        for character in self._held:
            call.push(character)
            count += 1
            if call.done or call.broken:
                break
        if not call.given:
            self._raw += self._held[:count]
        elif call.broken:
            count -= 1  # content goes on with this character
        self._held = self._held[count:]
        if call.broken:
            if not call.given:
                self._say(self._raw)
            self._out += call.take()
            self._calls += call.given
            self._call, self._raw, self._step = None, "", self._content
        elif call.done:
            self._out += call.take()
            self._calls += 1
            self._call, self._raw, self._space, self._step = None, "", "", self._after_call
        return bool(self._held)

    def _after_call(self) -> bool:
        raise NotImplementedError


class HermesReader(_Reader):
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as Hermes and Qwen write."""

    mark = "<tool_call>"
    _close = "</tool_call>"

    def _marked(self) -> bool:
        self._skip_space()
        if self._held:
            self._begin_call()
        return bool(self._held)

    def _after_call(self) -> bool:
        """Leave out the closing mark, if it comes next."""
        self._held = self._held.lstrip(_SPACE)
        if self._held.startswith(self._close):
            self._held = self._held[len(self._close) :]
        elif self._close.startswith(self._held):
            return False
        self._step = self._content
        return bool(self._held)

    def _end(self) -> None:
        if self._step != self._after_call:
            super()._end()


class LlamaReader(_Reader):
    """`{"name": ..., "parameters": ...}` as the whole text, several divided by `;`, as Llama 3 writes."""

    mark = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._step = self._begin

    def _begin(self) -> bool:
        """A text that begins with a brace, or with the mark, may be calls; any other is content."""
        self._skip_space()
        if self._held.startswith("{"):
            self._begin_call()
        elif self.mark.startswith(self._held) and self._held != self.mark:
            return False
        else:
            self._held, self._raw, self._step = self._raw + self._held, "", self._content
        return bool(self._held)

    def _marked(self) -> bool:
        self._skip_space()
        if self._held.startswith("{"):
            self._begin_call()
        elif self._held:
            self._say(self._raw)
            self._raw, self._step = "", self._content
        return bool(self._held)

    def _after_call(self) -> bool:
        self._held = self._held.lstrip(_SPACE + ";,")
        if self._held.startswith("{"):
            self._begin_call()
        elif self._held:
            self._step = self._content
        return bool(self._held)


class MistralReader(_Reader):
    """`[TOOL_CALLS]` and a JSON array of calls, or the name and the arguments of each, as Mistral's models write."""

    mark = "[TOOL_CALLS]"
    _divider = "[ARGS]"

    def __init__(self) -> None:
        super().__init__()
        self._in_array = False

    def _marked(self) -> bool:
        self._skip_space()
        if not self._held:
            return False
        if self._held.startswith("["):
            self._in_array = True
            self._raw += "["
            self._held = self._held[1:]
            self._step = self._element
            return bool(self._held)
        brace = self._held.find("{")
        if brace >= 0:
            name = self._held[:brace].removesuffix(self._divider).strip(_SPACE)
            if name and len(name) <= MAX_NAME_CHARACTERS:
                self._raw += self._held[:brace]
                self._held = self._held[brace:]
                self._begin_call(name)
                return True
        elif len(self._held) <= MAX_NAME_CHARACTERS + len(self._divider):
            return False
        self._say(self._raw)
        self._raw, self._step = "", self._content
        return True

    def _element(self) -> bool:
        """The next call of an array, or its end."""
        self._skip_space()
        if self._held.startswith("{"):
            self._begin_call()
        elif self._held:
            closes = self._held.startswith("]")
            if not closes and not self._calls:
                self._say(self._raw)
            self._held = self._held[1:] if closes else self._held
            self._raw, self._step, self._in_array = "", self._content, False
        return bool(self._held)

    def _after_call(self) -> bool:
        if not self._in_array:
            self._step = self._content
            return bool(self._held)
        self._held = self._held.lstrip(_SPACE)
        if self._held:
            if self._held.startswith(","):
                self._held = self._held[1:]
            self._step = self._element
        return bool(self._held)


FORMATS: Mapping[str, Callable[[], CallReader]] = {
    "hermes": HermesReader,
    "llama3_json": LlamaReader,
    "mistral": MistralReader,
}
MARKED_BY_SPECIAL_TOKENS = frozenset({"llama3_json", "mistral"})
"""Formats whose marks may be special tokens: ask for texts with `skip_special_tokens` false."""


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the begin of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _loaded(text: str) -> str | None:
    """The value of a JSON string; None for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None
