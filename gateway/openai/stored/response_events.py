"""The events of a response, a fold of what its model answered: each gateway makes the same events of a job. Pure.

Numbers count the events of the whole response from 0. A reader that comes back is given the same fold from the
beginning, without the events that it has seen, so numbers and ids depend on nothing but the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from charonia.generation.tool_calls import ToolDelta

Event = dict[str, Any]


@dataclass(slots=True)
class ResponseEvents:
    """The events of one response. `response` is the object without status, output and usage (`response_object`)."""

    response: dict[str, Any]
    _number: int = 0
    _output: list[dict[str, Any]] = field(default_factory=list)
    _open: bool = False
    """Whether the last item of the output goes on."""
    _texts: list[str] = field(default_factory=list)
    """The text, or the arguments, of that item: joined when it ends."""
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def number(self) -> int:
        """How many events there have been."""
        return self._number

    def created(self) -> list[Event]:
        """The first events: the response exists. One in the background is queued first."""
        if not self.response["background"]:
            return [self._about("response.created", "in_progress")]
        return [self._about("response.created", "queued"), self._about("response.queued", "queued")]

    def begun(self) -> list[Event]:
        """The model works on it."""
        return [self._about("response.in_progress", "in_progress")]

    def add_text(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[Event]:
        """The events of more text; `logprobs` are those of its tokens, as the API writes them."""
        if not text and not logprobs:
            return []
        events: list[Event] = []
        if not self._open or self._output[-1]["type"] != "message":
            events += self._close("completed")
            events += self._open_message()
        self._texts.append(text)
        self._output[-1]["content"][0]["logprobs"] += logprobs
        members = {**self._at(), "content_index": 0, "delta": text, "logprobs": list(logprobs)}
        return [*events, self._event("response.output_text.delta", **members)]

    def add_call(self, part: ToolDelta) -> list[Event]:
        """The events of a part of a function call: its name, or more of its arguments."""
        events = self._open_call(part.name) if part.name else []
        if part.arguments:
            self._texts.append(part.arguments)
            events.append(self._event("response.function_call_arguments.delta", **self._at(), delta=part.arguments))
        return events

    def ended(self, finish: str, completed_s: int) -> list[Event]:
        """The model has ended; `finish` is its reason: stop or length."""
        if not self._output:  # an answer without a token still has its message
            opening = self._open_message()
        else:
            opening = []
        incomplete = finish == "length"
        closing = self._close("incomplete" if incomplete else "completed")
        if incomplete:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        status = "incomplete" if incomplete else "completed"
        if not incomplete:
            self.response["completed_at"] = completed_s
        self._use()
        return [*opening, *closing, self._about(f"response.{status}", status)]

    def failed(self, code: str, message: str) -> list[Event]:
        """There is no more of it."""
        self._interrupt()
        self.response["error"] = {"code": code, "message": message}
        return [self._about("response.failed", "failed")]

    def cancelled(self) -> list[Event]:
        self._interrupt()
        return [self._about("response.cancelled", "cancelled")]

    def document(self) -> dict[str, Any]:
        """The response object as it is after the last event."""
        return {**self.response, "output": [_copy(item) for item in self._output]}

    # -- events -------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **members: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **members}
        self._number += 1
        return event

    def _about(self, kind: str, status: str) -> Event:
        self.response["status"] = status
        return self._event(kind, response=self.document())

    def _use(self) -> None:
        self.response["usage"] = {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self.output_tokens,
        }

    def _new_id(self, prefix: str) -> str:
        seed = f"{self.response['id']}:{prefix}:{len(self._output)}"
        return f"{prefix}_{blake2b(seed.encode(), digest_size=16).hexdigest()}"

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _open_message(self) -> list[Event]:
        item: dict[str, Any] = {
            "id": self._new_id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        self._output.append(item)
        self._open = True
        added = self._event("response.output_item.added", output_index=len(self._output) - 1, item=dict(item))
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [part]
        return [
            added,
            self._event("response.content_part.added", **self._at(), content_index=0, part={**part, "logprobs": []}),
        ]

    def _open_call(self, name: str) -> list[Event]:
        events = self._close("completed")
        item = {
            "id": self._new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": self._new_id("call"),
            "name": name,
            "arguments": "",
        }
        self._output.append(item)
        self._open = True
        at = len(self._output) - 1
        return [*events, self._event("response.output_item.added", output_index=at, item=dict(item))]

    def _close(self, status: str) -> list[Event]:
        """End the item that goes on."""
        if not self._open:
            return []
        item = self._end_item(status)
        at = self._at()
        events: list[Event] = []
        if item["type"] == "message":
            part = item["content"][0]
            done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            events.append(self._event("response.output_text.done", **at, **done))
            events.append(self._event("response.content_part.done", **at, content_index=0, part=dict(part)))
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **at, **done))
        closed = self._event("response.output_item.done", output_index=at["output_index"], item=_copy(item))
        return [*events, closed]

    def _end_item(self, status: str) -> dict[str, Any]:
        self._open = False
        item = self._output[-1]
        item["status"] = status
        written = "".join(self._texts)
        self._texts.clear()
        if item["type"] == "message":
            item["content"][0]["text"] = written
        else:
            item["arguments"] = written
        return item

    def _interrupt(self) -> None:
        if self._open:
            self._end_item("incomplete")
        if self.output_tokens:
            self._use()


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    """The item as it is now: what an event says does not change later."""
    copied = dict(item)
    if "content" in copied:
        copied["content"] = [dict(part) for part in copied["content"]]
    return copied
