"""The wire side of one HTTP connection: uvicorn's parser with bounds on slow, large and finely chopped requests.

Adds to uvicorn: header bounds, a cap on chunks (H24), refusals as JSON (E2), cancelling the
request whose client left (H25), and `sweep`, which ends connections that stall. What is asked and answered
is the application's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from .bodies import CLIENT_LEFT, RAW_HEADERS
from .codec.error_replies import error_body
from .codec.paths import INFER, resolve
from .codec.response_codec import LargeReply
from .fastpath import RECEIVED, RESPOND, WHOLE
from .http_lane import HttpCall, HttpLane, HttpSignature
from .large_bodies import LARGE_BODY_BYTES, LargeBody, LargeBodyReader, Room, size_of

MAX_CHUNKS = 65_536
"""H24."""

MAX_HEADERS = 256
MAX_HEADER_BYTES = 65_536

HEADERS_TIMEOUT_S = 10
"""From the first byte of a request to the end of its headers, however they trickle."""

BODY_STALL_S = 10
"""A body must bring at least `BODY_MIN_BYTES` within this time."""

BODY_MIN_BYTES = 1024

IDLE_TIMEOUT_S = 300
"""Clients keep pools of idle connections; closing those early costs them a failed request."""

MAX_WAITING = 8
"""Requests of one connection that may wait behind the one that is answered before no more of it is read."""

_JOIN_BYTES = 65_536
"""Up to here copying a body behind its head is cheaper than a second write."""

_SPLIT_BYTES = 16_384
"""Of so much data the headers are parsed first, so that a large body behind them is copied once."""

_PLACES: dict[bytes, tuple[str, bytes, bytes]] = {}
"""By request target: path, raw path and query of the ASGI scope."""

_MOST_PLACES, _PLACE_BYTES = 1024, 256

_WHOLE_BYTES = 65_536
"""A request of more bytes is not recognised, and no more are kept behind one."""
_LARGE = "charonia.large"
"""Key in the scope's state of a body that was received past the parser."""

_IDLE, _HEADERS, _BODY = "idle", "headers", "body"


class _Flow(FlowControl):
    """Reads no further while enough requests wait for their turn, whatever the parser asks for."""

    def __init__(self, transport: asyncio.Transport, waiting: deque[Any]) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if self.read_paused and len(self._waiting) < MAX_WAITING:
            super().resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. `sweep` is called by the server for all connections at a steady interval."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], room: Room | None = None
    ) -> None:
        """`room` is where large bodies are received."""
        super().__init__(config, server_state, app_state, asyncio.get_running_loop())
        self._room = room
        self._large: LargeBody | None = None
        """The body that is coming, when it is received past the parser."""
        self._phase = _IDLE
        self._header_bytes = 0
        self._body_bytes = 0
        self._chunks = 0
        self._stalled_s = 0.0
        self._refusal: tuple[int, str] | None = None
        self._task: asyncio.Task[None] | None = None
        self._task_cycle: RequestResponseCycle | None = None
        """What the task runs; None while it waits for `_next`."""
        self._next: asyncio.Future[tuple[RequestResponseCycle, Any]] | None = None
        self._upgrading = False
        """The request whose headers came last asks for another protocol."""
        self._lane: HttpLane | None = config.loaded_app.lane
        self.signature: HttpSignature | None = None
        self._call: HttpCall | None = None
        """The request in the lane; while it is under way nothing else is read."""
        self._held = b""
        """What came behind it, or what may become one."""
        self._whole: bytes | None = None
        """All that came since the connection was idle, while that is not much."""
        self._begun = 0
        """Requests that began in it."""
        self._leaves = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)

    # -- parser callbacks ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        lane = self._lane
        if lane is None:
            self._read_fully(data)
        elif self._call is not None:
            self._hold(data)
        elif self._phase is not _IDLE or (self._task is not None and self._next is None):
            if self._whole is not None:
                self._whole = self._whole + data if len(self._whole) < _WHOLE_BYTES else None
            self._read_fully(data)
        else:
            if self._held:
                data, self._held = self._held + data, b""
            if lane.is_open and not self.flow.write_paused:  # else the full way waits until the client reads
                self._call = lane.read(self, data)
                if self._call is not None:
                    lane.ready()
                    return
                if len(data) < _WHOLE_BYTES and lane.may_become(data):
                    self._held = data
                    return
            self._whole = data
            self._begun = 0
            self._read_fully(data)

    # -- the express lane ----------------------------------------------------------------------------------------------

    def _hold(self, data: bytes) -> None:
        """Keep what comes behind a request in the lane, as it comes after it."""
        self._held += data
        if len(self._held) > _WHOLE_BYTES:
            self.flow.pause_reading()

    def write_answer(self, response: bytes) -> None:
        """The answer to the request in the lane."""
        self._call = None
        self._stalled_s = 0.0
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.transport.write(response)
        if self._leaves:
            self.transport.close()
        elif self._held:
            self.loop.call_soon(self._go_on)

    def serve_fully(self, whole: bytes) -> None:
        """Serve the request in the lane like any other."""
        self._call = None
        if not self.transport.is_closing():
            held, self._held = self._held, b""
            self._whole = None
            self._read_fully(whole + held)
            self.flow.resume_reading()

    def _go_on(self) -> None:
        """Read what came behind a request in the lane."""
        if self._held and self._call is None and not self.transport.is_closing():
            held, self._held = self._held, b""
            self.flow.resume_reading()
            self.data_received(held)

    def shutdown(self) -> None:
        if self._call is not None:
            self._leaves = True
        else:
            super().shutdown()

    # -- parsing -------------------------------------------------------------------------------------------------------

    def _read_fully(self, data: bytes) -> None:
        cycle, phase = self.cycle, self._phase
        if len(data) < _SPLIT_BYTES or phase is not _IDLE or self._room is None:
            self._parse(data)
        else:
            self._parse_head_first(data)
        if self._phase is not _IDLE:
            # where in these bytes the headers begin that they end with is not known when there was something before
            joint = phase is _BODY or cycle is not self.cycle
            self._note_partial(len(data), joint=joint)
            if self._phase is _BODY and cycle is not self.cycle and self._large is None:
                self._begin_large()
                large = self._large
                if large is not None and len(large.view) - large.at >= LARGE_BODY_BYTES:
                    self._read_large_from_now(large)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data, upgrade)
        except httptools.HttpParserError:
            self._refuse_broken()

    # -- large bodies (`large_bodies`) ---------------------------------------------------------------------------------

    def _parse_head_first(self, data: bytes) -> None:
        """Parse what begins with a request's headers; a large body behind them goes to its memory from here."""
        cycle = self.cycle
        end = data.find(b"\r\n\r\n", 0, MAX_HEADER_BYTES) + 4
        if end < 4:
            self._parse(data)
            return
        self._parse(data[:end])
        if self._phase is _BODY and cycle is not self.cycle:
            self._begin_large()
        rest, large = memoryview(data)[end:], self._large
        if large is not None:
            rest = rest[large.take(rest) :]
            if large.is_whole:
                self._end_large()
            else:  # the parser knows nothing of what was taken
                self._read_large_from_now(large)
        if rest and not self.transport.is_closing():
            self._parse(bytes(rest))

    def _begin_large(self) -> None:
        """Receive the body whose headers came into memory of its own, if it is a large one of an inference."""
        cycle, sizes = self.cycle, size_of(self.headers)
        if self._large is not None or self._room is None or sizes is None or not cycle.keep_alive or self.pipeline:
            return
        route = resolve(self.scope["path"]) if self.scope["method"] == "POST" else None
        view = self._room(*sizes) if route is not None and route.kind is INFER else None
        if view is None or self.transport.is_closing():
            return
        large = self._large = LargeBody(view)
        cycle.scope["state"][RECEIVED], cycle.scope["state"][_LARGE] = self._received, view
        large.take(cycle.body)
        cycle.body = bytearray()
        cycle.message_event.clear()

    def _read_large_from_now(self, large: LargeBody) -> None:
        self.transport.set_protocol(LargeBodyReader(large, self, self._large_came))

    def _large_came(self, size: int) -> None:
        self._body_bytes += size
        if self._large is not None and self._large.is_whole:
            self.transport.set_protocol(self)
            self._end_large()

    def _end_large(self) -> None:
        """A large body is here; the parser, which has not seen it, makes room for one that waits for the next head."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        if self._large is None:
            super().on_body(body)
        else:
            self._large.take(body)

    def _stay(self, data: bytes, upgrade: httptools.HttpParserUpgrade | None) -> None:
        """Answer requests for another protocol in this one, as anybody may who does not speak the other.

        The parser has stopped before their bodies, which it takes for the other protocol: it gets the headers again,
        without that wish.
        """
        rest = memoryview(data)
        while upgrade is not None:
            rest = rest[upgrade.args[0] :]
            fields = [b"%b: %b\r\n" % field for field in self._fields() if field[0].lower() != b"upgrade"]
            version = self.parser.get_http_version().encode()
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(fields))
            upgrade = None
            try:
                self.parser.feed_data(head)
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as another:
                upgrade = another
            except httptools.HttpParserError:
                self._refuse_broken()

    def _fields(self) -> list[tuple[bytes, bytes]]:
        """The headers of the message that is parsed."""
        return self.headers

    def _refuse_broken(self) -> None:
        message = "Invalid HTTP request received."
        self.logger.warning(message)
        self.send_400_response(message)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._upgrading = False
        self._begun += 1
        self._phase = _HEADERS
        self._header_bytes = 0
        self._stalled_s = 0.0

    def on_headers_complete(self) -> None:
        if len(self.headers) > MAX_HEADERS:
            self._refuse(431, f"request has more than {MAX_HEADERS} headers")
        parser = self.parser
        if parser.should_upgrade():
            if parser.get_method() == b"CONNECT":
                self._refuse(400, "this server is no proxy")
            self._upgrading = True  # nothing of it begins before the parser stops
            return
        self._phase = _BODY
        self._chunks = 0
        self._body_bytes = 0
        place = _PLACES.get(self.url)
        if place is None or (self.cycle is not None and not self.cycle.response_complete):
            super().on_headers_complete()
            self.flow.resume_reading()  # uvicorn stops at the first that waits, and would not see the client leave
            if place is None and len(self.url) <= _PLACE_BYTES:
                scope = self.scope
                if len(_PLACES) >= _MOST_PLACES:
                    _PLACES.clear()
                _PLACES[self.url] = (scope["path"], scope["raw_path"], scope["query_string"])
            return
        # what uvicorn does, for a target that was parsed before and a connection that has nothing under way
        scope = self.scope
        http_version = parser.get_http_version()
        if http_version != "1.1":
            scope["http_version"] = http_version
        scope["method"] = parser.get_method().decode()
        scope["path"], scope["raw_path"], scope["query_string"] = place
        cycle = self.cycle = RequestResponseCycle(
            scope,
            self.transport,
            self.flow,
            self.logger,
            self.access_logger,
            self.access_log,
            self.server_state.default_headers,
            asyncio.Event(),
            self.expect_100_continue,
            http_version != "1.0" and parser.should_keep_alive(),
            self.on_response_complete,
        )
        self._start_asgi_task(cycle, self.app)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            self._refuse(400, f"request body has more than {MAX_CHUNKS} chunks")

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._phase = _IDLE
        self._stalled_s = 0.0
        self._large = None
        super().on_message_complete()

    def _note_partial(self, size: int, *, joint: bool) -> None:
        if self._phase is _BODY:
            self._body_bytes += size
            return
        if joint:
            return
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refusal = (431, f"request headers exceed {MAX_HEADER_BYTES} bytes")
            self.send_400_response("")

    def _refuse(self, status: int, message: str) -> None:
        self._refusal = (status, message)
        raise ValueError(message)  # ends the parse; uvicorn's `data_received` then calls `send_400_response`

    def send_400_response(self, msg: str) -> None:
        status, message = self._refusal or (400, msg)
        body = error_body(message)
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, HTTPStatus(status).phrase.encode(), len(body), body)
        )
        self.transport.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # pipelined requests wait for one another, so a connection runs one at a time, all in one task: a task for each
        # request costs more than what it does here
        following, self._next = self._next, None
        if following is not None and not following.done():
            following.set_result((cycle, app))
        elif self._task is not None and not self._task.done():
            self.pipeline.appendleft((cycle, app))
        else:
            self._task = self.loop.create_task(self._run(cycle, app))
            self.tasks.add(self._task)
            self._task.add_done_callback(self.tasks.discard)

    async def _run(self, cycle: RequestResponseCycle, app: Any) -> None:
        """The connection's requests, one after the other."""
        task = self._task
        assert task is not None
        while True:
            self._task_cycle = cycle
            if cycle.keep_alive:
                state = cycle.scope["state"]
                state[RESPOND], state[RECEIVED] = self._respond, self._received
                state[WHOLE] = self._whole_request
            await cycle.run_asgi(app)
            cycle.scope["state"].pop(_LARGE, None)  # of a request that was refused for something else
            self._task_cycle = None
            if self.transport.is_closing():
                return
            if task.cancelling():  # it was meant for this request; the next ones must not suffer from it
                self._task = None
                if self.pipeline:
                    self._start_asgi_task(*self.pipeline.pop())
                return
            if self.pipeline:
                cycle, app = self.pipeline.pop()
                self.flow.resume_reading()
                continue
            del cycle, app
            self._next = self.loop.create_future()
            cycle, app = await self._next

    def _whole_request(self) -> bytes | None:
        """All bytes of the request that is served, if it came by itself and is not large."""
        return self._whole if self._begun == 1 and self._phase is _IDLE else None

    def _received(self) -> bytes | memoryview | None:
        """The request's body, if it has come whole and nothing of it was read; a large one as a view of its memory."""
        cycle = self._task_cycle
        if cycle is None or cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        view: memoryview | None = cycle.scope["state"].pop(_LARGE, None)
        if view is not None:
            return view
        body = bytes(cycle.body)
        cycle.body = bytearray()
        return body

    def _respond(self, head: bytes, body: bytes | LargeReply) -> bool:
        """Write a whole response in one go: what two ASGI messages do, at a third of their price.

        `head` is the status line and all headers. False when it cannot be done now (the client reads slowly, or the
        connection is to end), and the caller sends ASGI messages.
        """
        cycle = self._task_cycle
        if cycle is None or self.flow.write_paused or cycle.response_started or not cycle.keep_alive:
            return False
        if cycle.disconnected:
            return True
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if isinstance(body, LargeReply):
            self.transport.writelines([head, *body.parts])
        elif len(body) <= _JOIN_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines([head, body])
        cycle.on_response()
        return True

    def on_response_complete(self) -> None:
        # uvicorn arms a timer after each response and disarms it at the next request; `sweep` needs neither
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._call is not None:
            self._call.abandon()
            self._call = None
        self._large = None
        if self.cycle is not None:
            self.cycle.scope["state"].pop(_LARGE, None)
        if self._task is None or self._task.done():
            return
        cycle = self._task_cycle
        if cycle is None:
            self._task.cancel()
        elif not cycle.response_complete:
            cycle.scope["state"][CLIENT_LEFT] = True
            self._task.cancel()

    # -- stalling ------------------------------------------------------------------------------------------------------

    def sweep(self, elapsed_s: float) -> None:
        """End the connection if it has stalled; `elapsed_s` is the time since the last sweep."""
        phase = self._phase
        if self._call is not None:
            self._stalled_s = 0.0
            return
        if self._held:  # it has not become a request that is recognised
            self._whole, self._held = self._held, b""
            self._begun = 0
            self._stalled_s = 0.0
            self._read_fully(self._whole)
            return
        if phase is _IDLE:
            if self._task is not None and not self._task.done() and self._next is None:
                self._stalled_s = 0.0
                return
            limit_s = IDLE_TIMEOUT_S
        elif phase is _HEADERS:
            limit_s = HEADERS_TIMEOUT_S
        elif self.flow.read_paused:  # it is we who keep it waiting
            self._stalled_s = 0.0
            return
        else:
            limit_s = BODY_STALL_S
            if self._body_bytes >= BODY_MIN_BYTES:
                self._body_bytes = 0
                self._stalled_s = 0.0
                return
        self._stalled_s += elapsed_s
        if self._stalled_s < limit_s or self.transport.is_closing():
            return
        if phase is _IDLE:
            self.transport.close()
        else:
            self._refusal = (408, "request was not received in time")
            self.send_400_response("")


class ForwardingHttpProtocol(BoundedHttpProtocol):
    """Keeps header names as they were sent, for forwarding (H21)."""

    _raw_headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._raw_headers = self.scope["state"][RAW_HEADERS] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._raw_headers.append((name, value))

    def _fields(self) -> list[tuple[bytes, bytes]]:
        return self._raw_headers
