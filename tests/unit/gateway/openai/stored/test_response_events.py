"""The events of a response: their order, their numbers, and that they are a fold."""

from __future__ import annotations

from typing import Any

import pytest

from charonia.generation.tool_calls import ToolDelta
from gateway.openai.stored.response_events import Event, ResponseEvents
from gateway.openai.stored.response_requests import read_response_request, response_object


def events_of(**body: Any) -> ResponseEvents:
    request = read_response_request({"model": "m", "input": "x", **body})
    return ResponseEvents(response_object(request, "resp_1", 100))


def kinds(events: list[Event]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def written(texts: list[str]) -> tuple[ResponseEvents, list[Event]]:
    events = events_of(background=True)
    found = [*events.created(), *events.begun()]
    for text in texts:
        found += events.add_text(text)
    return events, found + events.ended("stop", 105)


def test_a_text() -> None:
    events, found = written(["a", "", "b"])
    assert kinds(found) == [
        *("created", "queued", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    assert [event["sequence_number"] for event in found] == list(range(11))
    assert [event["response"]["status"] for event in found if "response" in event] == [
        *("queued", "queued", "in_progress", "completed")
    ]
    assert events.document()["output"][0]["content"][0]["text"] == "ab"
    assert (events.document()["completed_at"], events.document()["status"]) == (105, "completed")


def test_the_same_answer_gives_the_same_events() -> None:
    assert written(["a", "b"])[1] == written(["a", "b"])[1]


def test_an_event_does_not_change_after_it_was_written() -> None:
    events = events_of()
    created = events.created()[0]
    before = repr(created)
    opened = events.add_text("a", [{"token": "a"}])
    seen = repr(opened)
    events.add_text("b", [{"token": "b"}])
    events.ended("stop", 1)
    assert (repr(created), repr(opened)) == (before, seen)


def test_calls() -> None:
    events = events_of(tools=[{"type": "function", "name": "f"}])
    found = events.created() + events.begun() + events.add_text("so ")
    for part in (
        ToolDelta(0, "f"),
        ToolDelta(0, arguments='{"a":'),
        ToolDelta(0, arguments="1}"),
        ToolDelta(1, "g", "{}"),
    ):
        found += events.add_call(part)
    found += events.ended("stop", 1)
    assert kinds(found)[4:] == [
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    output = events.document()["output"]
    assert [(item["type"], item.get("name"), item.get("arguments")) for item in output] == [
        ("message", None, None),
        ("function_call", "f", '{"a":1}'),
        ("function_call", "g", "{}"),
    ]
    assert len({item["id"] for item in output} | {item["call_id"] for item in output[1:]}) == 5


def test_an_answer_that_is_cut_short() -> None:
    events = events_of()
    events.input_tokens, events.output_tokens = 3, 2
    events.add_text("a")
    last = events.ended("length", 1)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["usage"]["total_tokens"] == 5
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_an_answer_without_a_token_has_a_message() -> None:
    events = events_of()
    assert kinds(events.ended("stop", 1))[:2] == ["output_item.added", "content_part.added"]
    assert events.document()["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_an_answer_that_ends_early(end: str) -> None:
    events = events_of()
    events.add_text("a")
    (last,) = events.failed("server_error", "lost") if end == "failed" else events.cancelled()
    assert last["type"] == f"response.{end}"
    assert last["response"]["status"] == end
    assert last["response"]["output"][0]["content"][0]["text"] == "a"
    assert (last["response"]["error"] == {"code": "server_error", "message": "lost"}) is (end == "failed")
