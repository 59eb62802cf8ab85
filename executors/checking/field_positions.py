"""Finds the fields of a `config.pbtxt` text by their paths, for errors that name a field and no line.

Reads the same syntax as protobuf's text format, but keeps positions instead of values. A text that protobuf refuses
gives the fields up to the first place that cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<word>[\w.+-]+)|(?P<mark>[{}<>\[\]:,;])""",
    re.DOTALL,
)
_CLOSING = {"{": "}", "<": ">"}

Step = str | int | tuple[str, str]
"""A field's name; behind it, an index among its repetitions, or a subfield and the value that it has to have."""


@dataclass(slots=True)
class FieldNode:
    """A field as written. `value_start` to `value_end` is its value; `values` are scalars without quotes."""

    name: str
    start: int
    value_start: int = 0
    value_end: int = 0
    values: list[str] = field(default_factory=list)
    children: list[FieldNode] = field(default_factory=list)

    def named(self, name: str) -> list[FieldNode]:
        """The subfields with a name, in their order."""
        return [child for child in self.children if child.name == name]

    def value(self, name: str) -> str:
        """The first scalar of a subfield, "" without one."""
        return next((child.values[0] for child in self.named(name) if child.values), "")

    def descendants(self) -> Iterator[FieldNode]:
        for child in self.children:
            yield child
            yield from child.descendants()


class _Unreadable(Exception):
    pass


class _Tokens:
    def __init__(self, text: str) -> None:
        self.found = [match for match in _TOKEN.finditer(text) if match.lastgroup]
        self.next = 0

    def peek(self) -> str:
        return self.found[self.next].group() if self.next < len(self.found) else ""

    def take(self) -> re.Match[str]:
        if self.next >= len(self.found):
            raise _Unreadable
        self.next += 1
        return self.found[self.next - 1]

    def accept(self, *marks: str) -> bool:
        if self.peek() in marks:
            self.next += 1
            return True
        return False


def read_fields(text: str) -> FieldNode:
    """Return a root whose children are the fields of the text, in their order."""
    root = FieldNode("", 0, 0, len(text))
    try:
        _fields(_Tokens(text), root, "")
    except (_Unreadable, RecursionError):
        pass
    return root


def _fields(tokens: _Tokens, parent: FieldNode, closing: str) -> None:
    while tokens.peek() and tokens.peek() != closing:
        name = tokens.take()
        if name.lastgroup != "word":
            raise _Unreadable
        tokens.accept(":")
        if tokens.accept("["):
            _list(tokens, parent, name)
        else:
            node = FieldNode(name.group(), name.start())
            parent.children.append(node)
            _value(tokens, node)
        tokens.accept(",", ";")


def _list(tokens: _Tokens, parent: FieldNode, name: re.Match[str]) -> None:
    """A list of messages is one node for each, a list of scalars one node."""
    opening = tokens.found[tokens.next - 1]
    scalars = FieldNode(name.group(), name.start(), opening.start(), opening.end())
    while not tokens.accept("]"):
        if tokens.peek() in _CLOSING:
            node = FieldNode(name.group(), tokens.found[tokens.next].start())
            parent.children.append(node)
            _value(tokens, node)
        else:
            scalars.values.append(_plain(tokens.take()))
        tokens.accept(",")
    scalars.value_end = tokens.found[tokens.next - 1].end()
    if scalars.values or parent.named(name.group()) == []:
        parent.children.append(scalars)


def _value(tokens: _Tokens, node: FieldNode) -> None:
    first = tokens.take()
    node.value_start = first.start()
    if first.group() in _CLOSING:
        closing = _CLOSING[first.group()]
        _fields(tokens, node, closing)
        if not tokens.accept(closing):
            raise _Unreadable
    elif first.lastgroup == "mark":
        raise _Unreadable
    else:
        text = _plain(first)
        # adjacent strings are one value
        while first.lastgroup == "string" and tokens.peek()[:1] in ("'", '"') and tokens.peek():
            text += _plain(tokens.take())
        node.values.append(text)
    node.value_end = tokens.found[tokens.next - 1].end()


def _plain(token: re.Match[str]) -> str:
    return token.group()[1:-1] if token.lastgroup == "string" else token.group()


def find(root: FieldNode, path: Sequence[Step]) -> tuple[FieldNode, str]:
    """Follow a path as far as the text has it; return that field and the dotted path, which is always whole."""
    at, words, lost = root, [], False
    for position, step in enumerate(path):
        if not isinstance(step, str):
            continue
        choice = path[position + 1] if position + 1 < len(path) else ""
        found = at.named(step)
        words.append(step)
        if isinstance(choice, int):
            words[-1] += f"[{choice}]"
            found = found[choice : choice + 1]
        elif isinstance(choice, tuple):
            key, value = choice
            index = next((i for i, node in enumerate(found) if node.value(key) == value), None)
            words[-1] += f'["{value}"]' if index is None or key == "key" else f"[{index}]"
            found = [] if index is None else [found[index]]
        lost = lost or not found
        at = at if lost else found[0]
    return at, ".".join(words)


def line_and_column(text: str, offset: int) -> tuple[int, int]:
    """The position of an offset, counted from 1."""
    return text.count("\n", 0, offset) + 1, offset - (text.rfind("\n", 0, offset) + 1) + 1


def offset_of(text: str, line: int, column: int) -> int:
    """The offset of a position counted from 1."""
    at = 0
    for _ in range(line - 1):
        at = text.find("\n", at) + 1
    return at + column - 1
