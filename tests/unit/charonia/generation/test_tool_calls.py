"""Calls of tools in free text: each format, whole and character by character, and what only looks like a call."""

from __future__ import annotations

import json
import time

import pytest

from charonia.generation.tool_calls import ToolDelta, call_reader


def read(tool_format: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and the name and arguments of each call."""
    reader = call_reader(tool_format)
    assert reader is not None
    content, calls = "", []
    for found in [each for piece in pieces for each in reader.push(piece)] + reader.flush():
        if isinstance(found, str):
            content += found
        elif found.name:
            assert found.index == len(calls)
            calls.append([found.name, found.arguments])
        else:
            calls[found.index][1] += found.arguments
    return content, [(name, arguments) for name, arguments in calls]


ADD = '{"a": 1, "b": [2, {"c": "}]\\""}]}'
CASES = [
    ("hermes", "no call at all", "no call at all", []),
    ("hermes", " spaces stay \n", " spaces stay \n", []),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": ' + ADD + "}\n</tool_call>", "", [("add", ADD)]),
    ("hermes", 'I add. <tool_call>{"name":"add","arguments":{}}</tool_call>', "I add.", [("add", "{}")]),
    (
        "hermes",
        '<tool_call>{"name":"a","arguments":{}}</tool_call>\n<tool_call>{"arguments":{"x":1},"name":"b"}</tool_call>\n',
        "",
        [("a", "{}"), ("b", '{"x":1}')],
    ),
    ("hermes", '<tool_call>{"name":"a","arguments":"{\\"x\\": 1}"}</tool_call>', "", [("a", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name":"a","arguments":null}</tool_call>', "", [("a", "{}")]),
    ("hermes", '<tool_call>{"id": 3, "name":"a\\u0062","arguments":{}}</tool_call> Done.', " Done.", [("ab", "{}")]),
    ("hermes", '<tool_call>{"name":"a","arguments":{}}', "", [("a", "{}")]),
    ("hermes", '<tool_call>{"name":"a","arguments":{"x": 1', "", [("a", '{"x": 1')]),
    (
        "hermes",
        '<tool_call>{"name":"a","arguments":{},"parameters":{"x":1},"name":"b","arguments":"y"}</tool_call>',
        "",
        [("a", "{}")],
    ),
    ("hermes", '<tool_call>{"name":"a","arguments":{"x":1},oops}</tool_call>', "oops}</tool_call>", [("a", '{"x":1}')]),
    ("hermes", "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ("hermes", '<tool_call>{"name": "a"}</tool_call>', '<tool_call>{"name": "a"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", "a <tool_call>", "a <tool_call>", []),
    ("hermes", '<tool_call>{"name": "a", ', '<tool_call>{"name": "a", ', []),
    ("llama3_json", '{"name": "add", "parameters": ' + ADD + "}", "", [("add", ADD)]),
    ("llama3_json", '<|python_tag|>{"name": "a", "parameters": {}}', "", [("a", "{}")]),
    ("llama3_json", '{"name": "a", "parameters": {}}; {"name": "b", "arguments": {}}', "", [("a", "{}"), ("b", "{}")]),
    ("llama3_json", 'Use {"name": "a", "parameters": {}}', 'Use {"name": "a", "parameters": {}}', []),
    ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3_json", "{not json}", "{not json}", []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", "<|pyth", "<|pyth", []),
    ("llama3_json", "  plain", "  plain", []),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": ' + ADD + "}]", "", [("add", ADD)]),
    (
        "mistral",
        'So: [TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]',
        "So:",
        [("a", "{}"), ("b", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]add{"a": 1}', "", [("add", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]a[ARGS]{"x": "}"}[TOOL_CALLS]b[ARGS]{}', "", [("a", '{"x": "}"}'), ("b", "{}")]),
    ("mistral", "[TOOL_CALLS] [oops]", "[TOOL_CALLS] [oops]", []),
    ("mistral", "[TOOL_CALLS] oops", "[TOOL_CALLS] oops", []),
    ("mistral", "[TOOL_CALLS]{}", "[TOOL_CALLS]{}", []),
    ("mistral", "[TOOL", "[TOOL", []),
]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), CASES)
def test_a_text_is_divided_however_it_is_cut(
    tool_format: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(tool_format, [text]) == (content, calls)
    assert read(tool_format, list(text)) == (content, calls)
    for cut in range(1, len(text)):
        assert read(tool_format, [text[:cut], text[cut:]]) == (content, calls), cut


def test_arguments_come_as_they_are_written() -> None:
    reader = call_reader("hermes")
    assert reader is not None
    assert reader.push('I see.\n<tool_call>{"name": "add", "argu') == ["I see."]
    assert reader.push('ments": {"a"') == [ToolDelta(0, "add", '{"a"')]
    assert reader.push(": 1") == [ToolDelta(0, "", ": 1")]
    assert reader.push("}}</tool") == [ToolDelta(0, "", "}")]
    assert reader.push("_call>") == []
    assert reader.flush() == []


@pytest.mark.parametrize("tool_format", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize("unit", ["<tool_call>", "[TOOL_CALLS]", "{", "[", '"', "<", "[TOOL_CALLS][", '{"name":'])
def test_hostile_texts_take_bounded_time(tool_format: str, unit: str) -> None:
    text = unit * (20_000 // len(unit))
    begin = time.process_time()
    content, calls = read(tool_format, [text[at : at + 4] for at in range(0, len(text), 4)])
    assert time.process_time() - begin < 2.0
    assert calls == []
    assert content.replace(" ", "") == text


def test_formats_that_are_not_known_have_no_reader() -> None:
    assert call_reader("") is None
    assert call_reader("other") is None


def test_arguments_of_calls_are_json() -> None:
    _, calls = read("hermes", ['<tool_call>{"name": "add", "arguments": ' + ADD + "}</tool_call>"])
    assert json.loads(calls[0][1]) == json.loads(ADD)
