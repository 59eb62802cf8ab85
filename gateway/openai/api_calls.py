"""One call of the OpenAI API, the table of its paths, and what every endpoint is given.

`openai_application` finds the endpoint of a call, and answers for those that fail.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qs

import orjson

from charonia.offload.pool import OFF_LOOP_BYTES
from charonia.options.settings import GatewaySettings
from gateway.handler import Handler
from gateway.http.bodies import Receive, Scope, Send, check_declared, read_body, reply_whole, without_encoding
from gateway.http.codec.error_replies import JSON_CONTENT_TYPE, Headers, HttpRefusal
from gateway.requests.delivery import ANYONE, Caller

from .shapes.api_errors import ApiError, json_bytes
from .text_models import Asked

EVENT_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


Page = Callable[[], Awaitable[bytes | None]]
_T = TypeVar("_T")


async def no_page() -> bytes | None:
    """The metrics page of a server that has none."""
    return None


MAX_DEPTH = 128
"""How deep JSON may be nested: a schema needs some levels, no request needs more."""

MAX_COMMAS, MAX_BRACKETS = 2_000_000, 500_000
"""Of a body, those in its strings too. A parser keeps the interpreter's lock: so many values take 0.2 s. Texts with as
many have more tokens than a model's context."""


@dataclass(frozen=True, slots=True)
class OpenAiContext:
    """What endpoints share. `metrics` returns the page of `/metrics`, None where there is none."""

    settings: GatewaySettings
    handler: Handler
    metrics: Page = no_page


@dataclass(slots=True)
class ApiCall:
    """One HTTP request. `arguments` are the named parts of its path."""

    context: OpenAiContext
    scope: Scope
    receive: Receive
    send: Send
    arguments: Mapping[str, str] = field(default_factory=dict)
    caller: Caller = ANYONE
    started: bool = False
    """Whether the response has begun."""
    streams: bool = False
    """Whether it has begun as an event stream: what fails later is an event."""
    headers_of_reply: Headers = field(default_factory=list)
    """Sent with every reply of the call."""
    headers: dict[bytes, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.headers = dict(self.scope["headers"])

    @property
    def asked(self) -> Asked:
        """What the routing rule of a model may ask of it."""
        return Asked(self.scope["headers"], self.caller.tenant)

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the URL; of one that is repeated the last."""
        found = parse_qs(self.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        return {name: values[-1] for name, values in found.items()}

    async def body(self) -> bytes | memoryview:
        """The bytes of the body. Raises a 413 `ApiError` for one over `--http-max-input-size`."""
        limit = self.context.settings.http_max_input_size
        try:
            check_declared(self.headers, limit, _too_large)
            whole = await read_body(await self.receive(), self.headers, self.receive, limit, _too_large)
            if b"content-encoding" in self.headers:
                whole = await without_encoding(
                    self.context.handler.offload, self.headers[b"content-encoding"], whole, limit
                )
        except HttpRefusal as refusal:
            if refusal.status == 400:
                raise HttpRefusal(413, refusal.message, close=refusal.close) from None
            raise
        return whole

    async def json(self) -> dict[str, Any]:
        """The body's JSON object. Raises `ApiError` for anything else."""
        return await self.read(read_object)

    async def read(self, reader: Callable[[bytes | memoryview], _T]) -> _T:
        """What a reader makes of the body, of a large one in a thread. Raises what it raises, and as `body`."""
        body = await self.body()
        if len(body) <= OFF_LOOP_BYTES:
            return reader(body)
        return await self.context.handler.offload.in_thread(len(body), reader, body)

    async def reply(self, document: Any) -> None:
        """Answer with JSON."""
        await self.reply_bytes(json_bytes(document), headers=[JSON_CONTENT_TYPE])

    async def reply_bytes(self, body: bytes, *, headers: Headers, status: int = 200) -> None:
        """Answer with these bytes; `headers` has their content type."""
        self.started = True
        await reply_whole(self.send, status, [*headers, *self.headers_of_reply], body)

    async def event(self, document: Any, name: str = "") -> None:
        """Write one server-sent event; the first begins the response. Waits while the client does not read."""
        head = b"event: %b\ndata: " % name.encode() if name else b"data: "
        await self.write(head + json_bytes(document) + b"\n\n")

    async def write(self, data: bytes) -> None:
        """Write a part of an event stream."""
        await self.begin_events()
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def begin_events(self) -> None:
        """Begin the event stream, unless it has begun."""
        if not self.started:
            self.started = self.streams = True
            headers = [*EVENT_HEADERS, *self.headers_of_reply]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def end_events(self, last: bytes = DONE) -> None:
        """Write the last part of an event stream and end it."""
        await self.begin_events()
        await self.send({"type": "http.response.body", "body": last})


def _too_large(_headers: dict[bytes, bytes], size_bytes: int, limit_bytes: int) -> str:
    return (
        f"Request size of {size_bytes} bytes exceeds the maximum allowed input size of {limit_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def read_object(body: bytes | memoryview) -> dict[str, Any]:
    """The JSON object of a body. Raises `ApiError` for other JSON, deep nesting and text that is no JSON."""
    data = bytes(body)
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > MAX_BRACKETS or data.count(b",") > MAX_COMMAS:
        raise ApiError("the request body has too many values")
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the request body is not valid JSON: {error.msg} at {error.pos}") from None
    if not isinstance(found, dict):
        raise ApiError("the request body must be a JSON object")
    if brackets > MAX_DEPTH and _is_deep(found):
        raise ApiError(f"the request body is nested more than {MAX_DEPTH} levels deep")
    return found


def _is_deep(value: Any) -> bool:
    """Whether a value is nested deeper than `MAX_DEPTH`. Python's own steps let other threads in."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            return True
        inner = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
        level = [one for one in inner if isinstance(one, dict | list)]
    return False


Endpoint = Callable[[ApiCall], Awaitable[None]]
"""Answers a call. It raises `ApiError` or `CharoniaError`; after the first byte that becomes an event."""


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """A method of a path. `group` is the restricted API that it belongs to (H53); `is_open`: no key is asked for."""

    method: str
    path: str
    endpoint: Endpoint
    group: str
    is_open: bool


class RouteTable:
    """The paths of the API. A path has named parts in braces, which match one segment: `/v1/models/{model}`."""

    def __init__(self) -> None:
        self.routes: list[ApiRoute] = []
        self._fixed: dict[str, dict[str, ApiRoute]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, ApiRoute]]] = []

    def add(
        self, method: str, path: str, endpoint: Endpoint, *, group: str = "inference", is_open: bool = False
    ) -> None:
        """Register an endpoint."""
        route = ApiRoute(method, path, endpoint, group, is_open)
        self.routes.append(route)
        if "{" not in path:
            self._fixed.setdefault(path, {})[method] = route
            return
        pattern = re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(path)))
        for known, methods in self._patterns:
            if known == pattern:
                methods[method] = route
                return
        self._patterns.append((pattern, {method: route}))

    def find(self, path: str) -> tuple[dict[str, ApiRoute], dict[str, str]] | None:
        """The routes of a (percent-decoded) path by method, and its named parts; None for an unknown path."""
        fixed = self._fixed.get(path)
        if fixed is not None:
            return fixed, {}
        for pattern, methods in self._patterns:
            if found := pattern.fullmatch(path):
                return methods, found.groupdict()
        return None
