"""A batch's input file, line by line, and the lines of its output and error files. Pure.

A file is valid as a whole or not at all; each error says its line. What the body of a line means is checked when the
line runs: a wrong one is answered in the error file with the status it would have had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from gateway.openai.api_calls import read_object
from gateway.openai.shapes.api_errors import ApiError, json_bytes

MAX_LINES = 50_000
MAX_LINE_BYTES = 1 << 20
MAX_CUSTOM_ID = 255
"""An idempotency key is made of it."""
MAX_ERRORS = 100
"""A file with more errors than this names the first ones."""
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request. `number` counts lines from 1, empty ones too."""

    number: int
    custom_id: str
    body: dict[str, Any]


@dataclass(slots=True)
class LineReader:
    """Cuts content that comes in pieces into lines. A line that is too long is given as None."""

    _held: bytearray = field(default_factory=bytearray)
    _overlong: bool = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """The lines that are complete now."""
        self._held += data
        begin = 0
        while (end := self._held.find(b"\n", begin)) >= 0:
            yield None if self._overlong or end - begin > MAX_LINE_BYTES else bytes(self._held[begin:end])
            self._overlong = False
            begin = end + 1
        del self._held[:begin]
        if len(self._held) > MAX_LINE_BYTES:
            self._overlong = True
            self._held.clear()

    def end(self) -> Iterator[bytes | None]:
        """The last line, if it has no line end."""
        if self._overlong:
            yield None
        elif self._held:
            yield bytes(self._held)
        self._held.clear()


@dataclass(slots=True)
class Validation:
    """Checks the lines of one file against each other: `custom_id` is unique, `url` and `model` are one."""

    url: str
    lines: int = 0
    model: str = ""
    errors: list[dict[str, Any]] = field(default_factory=list)
    _number: int = 0
    _known: dict[bytes, int] = field(default_factory=dict)

    def check(self, text: bytes | None) -> BatchLine | None:
        """The request of the next line; None for an empty line and for one that is wrong."""
        self._number += 1
        if text is not None and not text.strip():
            return None
        self.lines += 1
        if self.lines == MAX_LINES + 1:
            self._refuse("too_many_requests", f"a batch has at most {MAX_LINES} lines")
        line = self._read(text)
        if line is None or self.lines > MAX_LINES:
            return None
        # a digest, so that 50,000 long ids take little memory
        key = blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        earlier = self._known.setdefault(key, self._number)
        if earlier != self._number:
            text_id = line.custom_id[:64]
            self._refuse("duplicate_custom_id", f"The custom_id '{text_id}' is that of line {earlier}", "custom_id")
            return None
        return line

    def end(self) -> None:
        """The file has ended."""
        if not self.lines:
            self._number = 0
            self._refuse("empty_file", "The file has no requests")

    def _read(self, text: bytes | None) -> BatchLine | None:
        if text is None:
            return self._refuse("line_too_long", f"The line has more than {MAX_LINE_BYTES} bytes")
        try:
            found = read_object(text)
        except ApiError as error:
            return self._refuse("invalid_json_line", f"This line is no request: {error.message}")
        custom_id, body, url = found.get("custom_id"), found.get("body"), found.get("url")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
            text_id = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters"
            return self._refuse("missing_required_parameter", text_id, "custom_id")
        if found.get("method", "POST") != "POST":
            return self._refuse("invalid_method", "method must be POST", "method")
        if url != self.url:
            return self._refuse("invalid_url", f"url must be the endpoint of the batch, {self.url}", "url")
        if not isinstance(body, dict):
            return self._refuse("missing_required_parameter", "body must be a JSON object", "body")
        return self._checked(custom_id, body)

    def _checked(self, custom_id: str, body: dict[str, Any]) -> BatchLine | None:
        model = body.get("model")
        if not isinstance(model, str) or not model:
            return self._refuse("missing_required_parameter", "body.model must name a model", "body.model")
        if self.model and model != self.model:
            return self._refuse(
                "mismatched_model", f"A batch has one model, which is '{self.model[:64]}'", "body.model"
            )
        self.model = model
        if body.get("stream"):
            return self._refuse("invalid_request", "Lines of a batch cannot stream", "body.stream")
        return BatchLine(self._number, custom_id, body)

    def _refuse(self, code: str, message: str, param: str | None = None) -> BatchLine | None:
        """Note what is wrong with the line; there is no request then."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"code": code, "line": self._number or None, "message": message, "param": param})
        return None


def validated(lines: Iterable[bytes | None], url: str) -> Validation:
    """The validation of a whole file."""
    checked = Validation(url)
    for line in lines:
        checked.check(line)
    checked.end()
    return checked


def request_id(batch_id: str, number: int) -> str:
    """The id of a line in the output. It is derived, so that a line that is written again has the same."""
    return "batch_req_" + blake2b(f"{batch_id}:{number}".encode(), digest_size=12).hexdigest()


def seed_of(batch_id: str, number: int) -> int:
    """The seed of a line without one: derived, so that a gateway that drives the batch again asks for the same job."""
    digest = blake2b(f"{batch_id}:{number}:seed".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class LineResult:
    """What became of a line: an answer with a status, or the code and text of why there is none.

    `usage` are the tokens of its prompt and of its answer. `unstored` are the ids of the jobs to delete after the
    result is in the log: until then another gateway may have to ask for them.
    """

    number: int
    custom_id: str
    status: int = 0
    body: dict[str, Any] | None = None
    job_id: str = ""
    code: str = ""
    message: str = ""
    usage: tuple[int, int] = (0, 0)
    unstored: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == 200

    def line(self, batch_id: str) -> bytes:
        """The line of the output file, or of the error file unless `ok`; with its line end."""
        response = None
        if self.status:
            response = {"status_code": self.status, "request_id": self.job_id, "body": self.body}
        error = {"code": self.code, "message": self.message} if self.code else None
        document = {
            "id": request_id(batch_id, self.number),
            "custom_id": self.custom_id,
            "response": response,
            "error": error,
        }
        return json_bytes(document) + b"\n"
