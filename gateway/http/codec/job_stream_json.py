"""The responses of a job that has several, as JSON and among its server-sent events. Pure.

An event's id says how far its reader is in both rows: `<events seen>-<responses seen>`; as long as there are no
responses it is the event's number alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from charonia.catalog.served import ServedVersion
from charonia.errors import CharoniaError
from charonia.facts.jobs import JobEvent
from charonia.inference import InferenceResponse

from .error_replies import error_body
from .job_json import server_sent
from .response_codec import ReplyForm, ResponseEncoder


def response_json(response: InferenceResponse, form: ReplyForm, served: ServedVersion) -> bytes:
    """The response as `infer` would have answered with JSON outputs; an error as errors are (E2)."""
    error = response.error
    if error is None:
        try:
            return ResponseEncoder().encode(response, form, served)[1]
        except CharoniaError as refused:  # what no JSON can carry
            error = refused
    return error_body(error.message)


def responses_json(responses: Iterable[InferenceResponse], form: ReplyForm, served: ServedVersion) -> bytes:
    """A JSON list of responses."""
    return b"[%b]" % b",".join([response_json(response, form, served) for response in responses])


class EventWriter:
    """Writes what one reader follows, who has seen `number` events and `responses` responses."""

    def __init__(self, form: ReplyForm, served: ServedVersion, number: int, responses: int) -> None:
        self._form = form
        self._served = served
        self._number = number
        self._responses = responses

    def write(self, happening: JobEvent | InferenceResponse) -> bytes:
        """One event of the stream."""
        if isinstance(happening, JobEvent):
            self._number = happening.number
            return server_sent(happening, self._place())
        attempt, index = happening.place or (1, 0)
        self._responses = index + 1
        told = b'{"attempt":%d,"index":%d,"final":%b' % (attempt, index, b"true" if happening.final else b"false")
        if not happening.is_flag:
            told += b',"response":' + response_json(happening, self._form, self._served)
        return b"id: %b\nevent: response\ndata: %b}\n\n" % (self._place(), told)

    def _place(self) -> bytes:
        return b"%d-%d" % (self._number, self._responses) if self._responses else b"%d" % self._number
