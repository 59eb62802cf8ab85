"""The wire side of one HTTP connection, over the parser of `httptools`.

Parses requests into exchanges, which a pipeline has the application answer (`asgi`). Also here: the way into the
express lane, large bodies that bypass the parser, limits on slow, large and finely chopped requests (H16, H17, H24),
and the refusal of what is not HTTP (E2).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn import Config
from uvicorn.server import ServerState

from .asgi import MAX_WAITING as MAX_WAITING
from .asgi import Exchange, FlowControl, Pipeline
from .bodies import EXCHANGE, RAW_HEADERS, Scope
from .codec.error_replies import JSON_CONTENT_TYPE, error_body
from .codec.paths import INFER, resolve
from .codec.response_codec import response_head
from .fastpath import HttpApplication
from .http_lane import HttpCall, HttpSignature
from .large_bodies import LARGE_BODY_BYTES, LargeBody, LargeBodyReader, size_of
from .lingering import Lingering

MAX_CHUNKS = 65_536
"""H24."""

MAX_HEADERS = 256
MAX_HEADER_BYTES = 65_536

_LONG_HEADERS = f"request headers exceed {MAX_HEADER_BYTES} bytes"

HEADERS_TIMEOUT_S = 10
"""From the first byte of a request to the end of its headers, however they trickle."""

BODY_STALL_S = 10
"""A body must bring at least `BODY_MIN_BYTES` within this time."""

TOO_SLOW = "request was not received in time"

BODY_MIN_BYTES = 1024

IDLE_TIMEOUT_S = 300
"""Clients keep pools of idle connections; closing those early costs them a failed request."""

_SPLIT_BYTES = 16_384
"""Of so much data the headers are parsed first, so that a large body behind them is copied once."""

_PLACES: dict[bytes, tuple[str, bytes, bytes]] = {}
"""By request target: path, raw path and query of the ASGI scope."""

_MOST_PLACES, _PLACE_BYTES = 1024, 256

_WHOLE_BYTES = 65_536
"""A request of more bytes is not recognised, and no more are kept behind one."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client of HTTP/2 says first (RFC 9113, section 3.4)."""

_ASGI = {"version": "3.0", "spec_version": "2.3"}

_IDLE, _HEADERS, _BODY = "idle", "headers", "body"

logger = logging.getLogger("charonia.gateway.http")


class BoundedHttpProtocol(asyncio.Protocol):
    """One connection. `sweep` is called by the server for all connections at a steady interval.

    The parameters are those that uvicorn gives to the class of its option `http`.
    """

    transport: asyncio.Transport
    flow: FlowControl
    pipeline: Pipeline

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.server_state = server_state
        self.loop = _loop or asyncio.get_running_loop()
        app: HttpApplication = config.loaded_app
        self._app = app
        self._room = app.room
        self._lane = app.lane
        self._parser = self._new_parser()
        # the connection
        self._server: tuple[str, int] | None = None
        self._client: tuple[str, int] | None = None
        self._scheme = "http"
        self._leaves = False
        """It ends with the request that is under way."""
        # the message that is parsed
        self._phase = _IDLE
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._raw_headers: list[tuple[bytes, bytes]] | None = [] if app.forwards_headers else None
        """With their names as they were sent, for forwarding (H21)."""
        self._expects_continue = False
        self._upgrading = False
        self._coding = b""
        """The last Transfer-Encoding."""
        """It asks for another protocol."""
        self._header_bytes = self._body_bytes = self._chunks = 0
        self._piece_bytes = 0
        """Of what is read; headers that came in one piece are measured when they are complete."""
        self._stalled_s = 0.0
        self._refusal: tuple[int, str] | None = None
        self._last_words: bytes | None = None
        """A refusal: nothing more is read, and it is written behind the answers that are due."""
        self._lingers = False
        """All is written; what the client still sends is dropped."""
        self._large: LargeBody | None = None
        """The body that is coming, when it is received past the parser."""
        self._latest: Exchange | None = None
        """The request whose headers came last."""
        # the express lane
        self.signature: HttpSignature | None = None
        self._call: HttpCall | None = None
        """The request in the lane; while it is under way nothing else is read."""
        self._held = b""
        """What came behind it, or what may become one."""
        self._whole: bytes | None = None
        """All that came since the connection was idle, while that is not much."""
        self._begun = 0
        """Requests that began in it."""

    # -- the transport -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.pipeline = Pipeline(self._app, transport, self.server_state.tasks, self._emptied)
        self.flow = self.pipeline.flow
        self._server, self._client = address(transport, "sockname"), address(transport, "peername")
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self.server_state.connections.add(self)  # type: ignore[arg-type]
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() == "h2" and self._app.http2 is not None:
            self._hand_over(self._app.http2(), b"")

    def pause_writing(self) -> None:
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.flow.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.connections.discard(self)
        self.transport.close()  # for all who ask whether it is closing
        self._parser = self._latest = self._large = None  # they hold this connection, or memory
        if self._call is not None:
            self._call.abandon()
            self._call = None
        self.pipeline.disconnect()
        self.flow.resume_writing()

    def close(self) -> None:
        """End the connection when what was written is sent."""
        self.transport.close()

    def shutdown(self) -> None:
        """End the connection with the request that came last."""
        if self._call is not None:
            self._leaves = True
        elif self._lingers or self._latest is None or self._latest.response_complete:
            self.transport.close()
        else:
            self._latest.keep_alive = False

    def data_received(self, data: bytes) -> None:
        lane = self._lane
        if lane is None:
            self._read_fully(data)
        elif self._call is not None:
            self._held += data
            if len(self._held) > _WHOLE_BYTES:
                self.flow.pause_reading()
        elif self._phase is not _IDLE or self.pipeline.serving is not None:
            if self._whole is not None:
                self._whole = self._whole + data if len(self._whole) < _WHOLE_BYTES else None
            self._read_fully(data)
        else:
            if self._held:
                data, self._held = self._held + data, b""
            if lane.count and not self.flow.write_paused:  # else the full way waits until the client reads
                self._call = lane.read(self, data)
                if self._call is not None:
                    return
                if len(data) < _WHOLE_BYTES and lane.may_become(data):
                    self._held = data
                    return
            self._whole = data
            self._begun = 0
            self._read_fully(data)

    # -- the express lane ----------------------------------------------------------------------------------------------

    def waits_for(self, call: HttpCall) -> bool:
        """Whether this is the request in the lane."""
        return self._call is call

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

    # -- parsing -------------------------------------------------------------------------------------------------------

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # what follows a request that ends the connection does not take its answer away; two framings: `_drop_length`
        parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_chunked_length=True)
        return parser

    def _read_fully(self, data: bytes) -> None:
        if self._last_words is not None:
            return
        latest, phase = self._latest, self._phase
        self._piece_bytes = len(data)
        if len(data) < _SPLIT_BYTES or phase is not _IDLE or self._room is None:
            self._parse(data)
        else:
            self._parse_head_first(data)
        if self._phase is _IDLE:
            return
        if self._phase is _BODY:
            self._body_bytes += len(data)
            if latest is not self._latest and self._large is None:
                large = self._begin_large()
                if large is not None and len(large.view) - large.at >= LARGE_BODY_BYTES:
                    self._read_large_from_now(large)
        elif phase is not _BODY and latest is self._latest:
            # else there was something before, and where in these bytes the headers begin is not known
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and self._last_words is None:
                self._write_refusal(431, _LONG_HEADERS)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data, upgrade)
        except httptools.HttpParserError:
            if self._latest is not None or self._parser.get_method() != b"PRI" or not self._becomes_http2(data):
                self._refuse_broken()

    def _becomes_http2(self, data: bytes) -> bool:
        """Hand the connection over to HTTP/2, if `data`, at which the parser stopped, ends its preface."""
        come = next((at for at in range(len(_PREFACE)) if data.startswith(_PREFACE[at:])), None)
        if come is None or self._app.http2 is None:
            return False
        self._hand_over(self._app.http2(), _PREFACE[:come] + data)
        return True

    def _hand_over(self, connection: asyncio.Protocol, come: bytes) -> None:
        self._phase = _IDLE
        self.server_state.connections.discard(self)
        self.transport.set_protocol(connection)
        connection.connection_made(self.transport)
        if come:
            connection.data_received(come)

    def _stay(self, data: bytes, upgrade: httptools.HttpParserUpgrade | None) -> None:
        """Answer requests for another protocol in this one, as anybody may who does not speak the other.

        The parser has stopped before their bodies, which it takes for the other protocol: it gets the headers again,
        without that wish.
        """
        rest = memoryview(data)
        while upgrade is not None:
            rest = rest[upgrade.args[0] :]
            headers = self._headers if self._raw_headers is None else self._raw_headers
            fields = b"".join([b"%b: %b\r\n" % field for field in headers if field[0].lower() != b"upgrade"])
            version = self._parser.get_http_version().encode()
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (self._parser.get_method(), self._url, version, fields)
            upgrade = None
            try:
                self._parser.feed_data(head)
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as another:
                upgrade = another
            except httptools.HttpParserError:
                self._refuse_broken()

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        if self._raw_headers is not None:
            self._raw_headers = []
        self._expects_continue = self._upgrading = False
        self._coding = b""
        self._begun += 1
        self._phase = _HEADERS
        self._header_bytes = 0
        self._stalled_s = 0.0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._raw_headers is not None:
            self._raw_headers.append((name, value))
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        elif name == b"transfer-encoding":
            self._coding = value
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if len(self._headers) > MAX_HEADERS:
            self._refuse(431, f"request has more than {MAX_HEADERS} headers")
        if self._header_bytes + self._piece_bytes > MAX_HEADER_BYTES and self._head_size() > MAX_HEADER_BYTES:
            self._refuse(431, _LONG_HEADERS)
        parser = self._parser
        method: str = parser.get_method().decode()
        if parser.should_upgrade():
            if method == "CONNECT":
                self._refuse(400, "this server is no proxy")
            self._upgrading = True  # nothing of it begins before the parser stops
            return
        two_framings = bool(self._coding) and self._drop_length()
        self._phase = _BODY  # now `_latest` is this request: what is refused before leaves the one before it alone
        self._chunks = self._body_bytes = 0
        version: str = parser.get_http_version()
        exchange = self._latest = Exchange(
            self,
            is_head=method == "HEAD",
            keep_alive=version != "1.0" and not two_framings and parser.should_keep_alive(),
            expects_continue=self._expects_continue,
        )
        state: dict[str, Any] = {EXCHANGE: exchange}
        if self._raw_headers is not None:
            state[RAW_HEADERS] = self._raw_headers
        path, raw_path, query = _PLACES.get(self._url) or place_of(self._url)
        scope: Scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self._server,
            "client": self._client,
            "scheme": self._scheme,
            "root_path": "",
            "method": method,
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self._headers,
            "state": state,
        }
        self.pipeline.add(exchange, scope)

    def _head_size(self) -> int:
        return len(self._url) + sum([len(name) + len(value) + 4 for name, value in self._headers])

    def _drop_length(self) -> bool:
        """Whether the request has a Content-Length beside its Transfer-Encoding, which goes before it.

        The connection ends with such a request: another reader on its way may have taken it by its length, and what
        follows for its body (RFC 9112, section 6.1). One whose last coding is not chunked is refused.
        """
        headers = [field for field in self._headers if field[0] != b"content-length"]
        if len(headers) == len(self._headers):
            return False
        if self._coding.rpartition(b",")[2].strip().lower() != b"chunked":
            self._refuse(400, "Invalid HTTP request received.")
        self._headers = headers
        return True

    def on_body(self, body: bytes) -> None:
        if self._large is not None:
            self._large.take(body)
        elif self._latest is not None:
            self._latest.feed(body)

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
        if self._latest is not None:
            self._latest.end_body()

    # -- large bodies (`large_bodies`) ---------------------------------------------------------------------------------

    def _parse_head_first(self, data: bytes) -> None:
        """Parse what begins with a request's headers; a large body behind them goes to its memory from here."""
        latest = self._latest
        end = data.find(b"\r\n\r\n", 0, MAX_HEADER_BYTES) + 4
        if end < 4:
            self._parse(data)
            return
        self._parse(data[:end])
        if self._phase is _BODY and latest is not self._latest:
            self._begin_large()
        rest, large = memoryview(data)[end:], self._large
        if large is not None:
            rest = rest[large.take(rest) :]
            if large.is_whole:
                self._end_large()
            else:  # the parser knows nothing of what was taken
                self._read_large_from_now(large)
        if rest and not self.transport.is_closing() and self._last_words is None:
            self._parse(bytes(rest))

    def _begin_large(self) -> LargeBody | None:
        """Receive the body whose headers came into memory of its own, if it is a large one of an inference."""
        sizes, serving = size_of(self._headers), self.pipeline.serving
        if self._large is not None or self._room is None or sizes is None or serving is None:
            return None
        served, scope = serving
        if served is not self._latest or not served.keep_alive:
            return None
        route = resolve(scope["path"]) if scope["method"] == "POST" else None
        view = self._room(*sizes) if route is not None and route.kind is INFER else None
        if view is None or self._last_words is not None:
            return None
        large = self._large = LargeBody(view)
        large.take(served.divert(view))
        return large

    def _read_large_from_now(self, large: LargeBody) -> None:
        self.transport.set_protocol(LargeBodyReader(large, self, self._large_came))

    def _large_came(self, size: int) -> None:
        self._body_bytes += size
        if self._large is not None and self._large.is_whole:
            self.transport.set_protocol(self)
            self._end_large()

    def _end_large(self) -> None:
        """A large body is here; the parser, which has not seen it, makes room for one that waits for the next head."""
        self._parser = self._new_parser()
        self.on_message_complete()

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        """End the parse, from a callback of the parser."""
        self._refusal = (status, message)
        raise ValueError(message)

    def _refuse_broken(self) -> None:
        status, message = self._refusal or (400, "Invalid HTTP request received.")
        logger.warning("refused a request: %s", message)
        self._write_refusal(status, message)

    def _write_refusal(self, status: int, message: str) -> None:
        """Refuse the message that is parsed, behind the answers to those before it, and end the connection."""
        body = error_body(message)
        head = [JSON_CONTENT_TYPE, (b"connection", b"close")]
        self._last_words = response_head(head, len(body), status) + body
        latest = self._latest if self._phase is _BODY else None
        serving = self.pipeline.serving
        if latest is not None:
            self.pipeline.take_back(latest)
            if latest.response_started:  # it has its answer, or the beginning of it
                self._last_words = b""
            if serving is not None and serving[0] is latest:
                latest.disconnect()
                serving = None
        if serving is None:
            self._emptied()

    def _emptied(self) -> None:
        """No request is under way: say the last words, if there are any."""
        if self._last_words is not None and not self.transport.is_closing():
            if self._last_words:
                self.transport.write(self._last_words)
            self.leave()

    # -- what exchanges ask --------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """End the connection when what was written is sent; of a message that still comes, the rest is dropped."""
        transport = self.transport
        if self._lingers or transport.is_closing():
            return
        if (self._phase is _IDLE and self._last_words is None) or not transport.can_write_eof():
            transport.close()
            return
        self._lingers = True
        self._last_words = b""  # nothing more is read
        self._large = None
        transport.write_eof()
        transport.set_protocol(Lingering(transport, self))
        transport.resume_reading()

    def answered(self) -> None:
        """A response is complete."""
        self.server_state.total_requests += 1
        if not self.transport.is_closing() and not self._lingers:
            self.flow.resume_reading()

    def whole_request(self) -> bytes | None:
        """All bytes of the request that is served, if it came by itself and is not large."""
        return self._whole if self._begun == 1 and self._phase is _IDLE else None

    # -- stalling ------------------------------------------------------------------------------------------------------

    def sweep(self, elapsed_s: float) -> None:
        """End the connection if it has stalled; `elapsed_s` is the time since the last sweep."""
        phase = self._phase
        if self._held and self._call is None:  # it has not become a request that is recognised
            self._whole, self._held = self._held, b""
            self._begun = 0
            self._stalled_s = 0.0
            self._read_fully(self._whole)
            return
        if self._call is not None or (phase is _IDLE and self.pipeline.serving is not None):
            self._stalled_s = 0.0
            return
        if phase is _IDLE:
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
        if self._stalled_s < limit_s or self.transport.is_closing() or self._last_words is not None:
            return
        if phase is _IDLE:
            self.transport.close()
        else:
            self._write_refusal(408, TOO_SLOW)


def place_of(url: bytes) -> tuple[str, bytes, bytes]:
    """Path, raw path and query in a request target. Raises what ends the parse."""
    parsed = httptools.parse_url(url)
    place = unquote(parsed.path.decode("ascii")), parsed.path, parsed.query or b""
    if len(url) <= _PLACE_BYTES:
        if len(_PLACES) >= _MOST_PLACES:
            _PLACES.clear()
        _PLACES[url] = place
    return place


def address(transport: asyncio.BaseTransport, name: str) -> tuple[str, int] | None:
    """One of the connection's two addresses, as ASGI has it."""
    found = transport.get_extra_info(name)
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None
