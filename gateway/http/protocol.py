"""The wire side of one HTTP/1.1 connection, over the parser of `httptools`.

Parses bytes into exchanges, which the pipeline passes to the application (`exchanges`). Also: offers requests to the
express lane, receives large bodies past the parser, limits slow, large and finely chunked requests (H16, H17, H24),
and refuses bytes that are not HTTP (E2).
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
from typing import Any, NoReturn
from urllib.parse import unquote

import httptools
from uvicorn import Config
from uvicorn.server import ServerState

from charonia.errors import Unavailable
from charonia.offload.handed_memory import handed_memory
from charonia.offload.transfers import APART_BYTES, move

from .binary_bodies import PAST_PARSER_BYTES, BinaryBody, BinaryBodyReader, size_of
from .bodies import EXCHANGE, RAW_HEADERS, Scope
from .codec.error_replies import INTERNAL, JSON_CONTENT_TYPE, error_body
from .codec.paths import INFER, resolve
from .codec.response_codec import response_head
from .exchanges import Exchange, FlowControl, Pipeline
from .http_application import HttpApplication
from .http_lane import HttpCall, HttpSignature
from .lingering import Lingering

MAX_CHUNKS = 65_536
"""Chunks of one body (H24), and one more for each `CHUNK_BYTES` that have come: libraries choose the size of chunks."""
CHUNK_BYTES = 1024

MAX_HEADERS = 256
MAX_HEADER_BYTES = 65_536

_NOT_HTTP = "Invalid HTTP request received."
_LONG_HEADERS = f"request headers exceed {MAX_HEADER_BYTES} bytes"
_LONG_TRAILERS = f"request trailers exceed {MAX_HEADER_BYTES} bytes"

HEADERS_TIMEOUT_S = 10
"""From the first byte of a request to the end of its headers."""

BODY_STALL_S = 10
"""At least `BODY_MIN_BYTES` of a body must arrive within this time."""

TOO_SLOW = "request was not received in time"

BODY_MIN_BYTES = 1024

IDLE_TIMEOUT_S = 300
"""Clients keep pools of idle connections; closing those early costs them a failed request."""

_SPLIT_BYTES = 16_384
"""From this size on the headers are parsed first, so that a large body behind them is copied only once."""

_TARGETS: dict[bytes, tuple[str, bytes, bytes]] = {}
"""Cache: path, raw path and query of the ASGI scope, by request target."""

_MAX_TARGETS, _MAX_TARGET_BYTES = 1024, 256

_MAX_RECOGNISED_BYTES = 65_536
"""The lane recognises no larger request, and at most this much is buffered behind one."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The connection preface of HTTP/2 (RFC 9113, section 3.4)."""

ASGI = {"version": "3.0", "spec_version": "2.3"}

_IDLE, _HEADERS, _BODY = "idle", "headers", "body"

logger = logging.getLogger("charonia.gateway.http")


class BoundedHttpProtocol(asyncio.Protocol):
    """One connection. The server calls `sweep` on every connection at a steady interval.

    The parameters are those that uvicorn passes to the class of its option `http`.
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
        self._allocate_body = app.allocate_body
        self._lane = app.lane
        self._parser = self._new_parser()
        # the connection
        self._server: tuple[str, int] | None = None
        self._client: tuple[str, int] | None = None
        self._scheme = "http"
        self._closes_after_answer = False
        """The connection closes after the answer to the request in the lane."""
        # the message that is being parsed
        self._phase = _IDLE
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._raw_headers: list[tuple[bytes, bytes]] | None = [] if app.forwards_headers else None
        """With names as the client sent them, for forwarding (H21)."""
        self._expects_continue = False
        self._upgrading = False
        """The request asks for another protocol."""
        self._coding = b""
        """All of Transfer-Encoding, its lines joined by commas."""
        self._header_bytes = self._body_bytes = self._chunks = self._chunked_bytes = 0
        self._bare_bytes = 0
        """Bytes of a chunked body without content that came together: sizes, extensions and trailers."""
        self._piece_bytes = 0
        """Size of the data being read; headers that arrive in one piece are measured when they are complete."""
        self._stalled_s = 0.0
        self._refusal: tuple[int, str] | None = None
        self._final_response: bytes | None = None
        """A refusal, written after the answers to earlier requests; nothing more is read. Empty: close without one."""
        self._lingers = False
        """All is written; further bytes of the client are dropped."""
        self._large: BinaryBody | None = None
        """The body that is being received past the parser."""
        self._receiving: asyncio.Task[None] | None = None
        """The task that has threads receive that body; None while the event loop does."""
        self._latest: Exchange | None = None
        """The request whose headers arrived last."""
        # the express lane
        self.signature: HttpSignature | None = None
        self._call: HttpCall | None = None
        """The request in the lane; until its answer nothing else is read."""
        self._held = b""
        """Bytes behind the request in the lane, or the beginning of one that the lane may recognise."""
        self._whole: bytes | None = None
        """All bytes since the connection was idle; None once they are many."""
        self._begun_requests = 0
        """Requests that began in `_whole`."""

    # -- the transport -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.pipeline = Pipeline(self._app, transport, self.server_state.tasks, self._emptied, self._app.offload)
        self.flow = self.pipeline.flow
        self._server, self._client = address(transport, "sockname"), address(transport, "peername")
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self.server_state.connections.add(self)  # type: ignore[arg-type]
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() == "h2" and self._app.http2 is not None:
            self._switch_protocol(self._app.http2(), b"")

    def pause_writing(self) -> None:
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.flow.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.connections.discard(self)
        self.transport.close()  # so that `is_closing` says so
        self._parser = self._latest = self._large = None  # each refers to this connection, or holds memory
        self._stop_receiving()
        if self._call is not None:
            self._call.abandon()
            self._call = None
        self.pipeline.disconnect()
        self.flow.resume_writing()

    def close(self) -> None:
        """Close the connection once all written bytes are sent."""
        self.transport.close()

    def shutdown(self) -> None:
        """Close the connection after the answer to the latest request."""
        if self._call is not None:
            self._closes_after_answer = True
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
            if len(self._held) > _MAX_RECOGNISED_BYTES:
                self.flow.pause_reading()
        elif self._phase is not _IDLE or self.pipeline.serving is not None:
            if self._whole is not None:
                self._whole = self._whole + data if len(self._whole) < _MAX_RECOGNISED_BYTES else None
            self._read_fully(data)
        else:
            if self._held:
                data, self._held = self._held + data, b""
            if lane.count and not self.flow.write_paused:  # if paused, the full way waits until the client reads
                self._call = lane.read(self, data)
                if self._call is not None:
                    return
                if len(data) < _MAX_RECOGNISED_BYTES and lane.may_become(data):
                    self._held = data
                    return
            self._whole = data
            self._begun_requests = 0
            self._read_fully(data)

    # -- the express lane ----------------------------------------------------------------------------------------------

    def waits_for(self, call: HttpCall) -> bool:
        return self._call is call

    def write_answer(self, response: bytes) -> None:
        self._call = None
        self._stalled_s = 0.0
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.transport.write(response)
        if self._closes_after_answer:
            self.transport.close()
        elif self._held:
            self.loop.call_soon(self._read_held)

    def serve_fully(self, whole: bytes) -> None:
        self._call = None
        if not self.transport.is_closing():
            held, self._held = self._held, b""
            self._whole = None
            try:
                self._read_fully(whole + held)
            except Exception:
                self._write_refusal(500, INTERNAL)  # the request is no longer in the lane, which could answer it
                raise
            self.flow.resume_reading()

    def _read_held(self) -> None:
        """Read the bytes that arrived behind a request in the lane."""
        if self._held and self._call is None and not self.transport.is_closing():
            held, self._held = self._held, b""
            self.flow.resume_reading()
            self.data_received(held)

    # -- parsing -------------------------------------------------------------------------------------------------------

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # bytes behind a request that ends the connection must not cost it its answer; two framings: `_drop_length`
        parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_chunked_length=True)
        return parser

    def _read_fully(self, data: bytes) -> None:
        if self._final_response is not None:
            return
        latest, phase = self._latest, self._phase
        self._piece_bytes = len(data)
        self._bare_bytes += len(data)
        if len(data) < _SPLIT_BYTES or phase is not _IDLE or self._allocate_body is None:
            self._parse(data)
        else:
            self._parse_head_first(data)
        if self._phase is _IDLE:
            return
        if self._phase is _BODY:
            self._body_bytes += len(data)
            if self._chunks and self._bare_bytes > MAX_HEADER_BYTES and self._final_response is None:
                self._write_refusal(431, _LONG_TRAILERS)
            elif latest is not self._latest and self._large is None:
                large = self._begin_large()
                if large is not None and len(large.view) - large.at >= PAST_PARSER_BYTES:
                    self._read_large_from_now(large)
        elif phase is not _BODY and latest is self._latest:
            # otherwise another request ends in these bytes, and where the headers begin is not known
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and self._final_response is None:
                self._write_refusal(431, _LONG_HEADERS)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data, upgrade)
        except httptools.HttpParserError as error:
            if self._latest is not None or self._parser.get_method() != b"PRI" or not self._becomes_http2(data):
                self._refuse_broken(error)

    def _becomes_http2(self, data: bytes) -> bool:
        """Switch to HTTP/2 if `data`, at which the parser stopped, completes the preface. Returns whether it did."""
        parsed = next((at for at in range(len(_PREFACE)) if data.startswith(_PREFACE[at:])), None)
        if parsed is None or self._app.http2 is None:
            return False
        self._switch_protocol(self._app.http2(), _PREFACE[:parsed] + data)
        return True

    def _switch_protocol(self, connection: asyncio.Protocol, received: bytes) -> None:
        self._phase = _IDLE
        self.server_state.connections.discard(self)
        self.transport.set_protocol(connection)
        connection.connection_made(self.transport)
        if received:
            connection.data_received(received)

    def _ignore_upgrade(self, data: bytes, upgrade: httptools.HttpParserUpgrade | None) -> None:
        """Answer a request with an Upgrade header in HTTP/1.1, as a server may (RFC 9110, section 7.8).

        The parser takes the body for the other protocol and stops: another one gets the headers again, without Upgrade.
        The first one would drop them behind a request that ends the connection.
        """
        rest = memoryview(data)
        while upgrade is not None:
            rest = rest[upgrade.args[0] :]
            headers = self._headers if self._raw_headers is None else self._raw_headers
            fields = b"".join([b"%b: %b\r\n" % field for field in headers if field[0].lower() != b"upgrade"])
            version = self._parser.get_http_version().encode()
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (self._parser.get_method(), self._url, version, fields)
            upgrade = None
            self._parser = self._new_parser()
            try:
                self._parser.feed_data(head)
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as another:
                upgrade = another
            except httptools.HttpParserError as error:
                self._refuse_broken(error)

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        if self._raw_headers is not None:
            self._raw_headers = []
        self._expects_continue = self._upgrading = False
        self._coding = b""
        self._begun_requests += 1
        self._phase = _HEADERS
        self._header_bytes = 0
        self._stalled_s = 0.0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is _BODY:  # a trailer, which must not pass for a header (RFC 9110, section 6.5.1)
            return
        if self._raw_headers is not None:
            self._raw_headers.append((name, value))
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        elif name == b"transfer-encoding":
            self._coding = b"%b,%b" % (self._coding, value) if self._coding else value
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
            self._upgrading = True  # `_ignore_upgrade` has the headers parsed again
            return
        version: str = parser.get_http_version()
        # HTTP/1.0 has no codings: a proxy may have passed one on that it does not know (RFC 9112, section 6.1)
        ends = bool(self._coding) and self._check_coding() and (self._drop_length() or version == "1.0")
        self._phase = _BODY  # now `_latest` is this request: what is refused before leaves the one before it alone
        self._chunks = self._chunked_bytes = self._body_bytes = self._bare_bytes = 0
        exchange = self._latest = Exchange(
            self,
            is_head=method == "HEAD",
            keep_alive=not ends and parser.should_keep_alive(),
            expects_continue=self._expects_continue,
            is_1_0=version == "1.0",
        )
        state: dict[str, Any] = {EXCHANGE: exchange}
        if self._raw_headers is not None:
            state[RAW_HEADERS] = self._raw_headers
        path, raw_path, query = _TARGETS.get(self._url) or self._split_target()
        scope: Scope = {
            "type": "http",
            "asgi": ASGI,
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

    def _split_target(self) -> tuple[str, bytes, bytes]:
        try:
            return split_target(self._url)
        except (httptools.HttpParserError, ValueError, AttributeError):
            self._refuse(400, _NOT_HTTP)

    def _head_size(self) -> int:
        return len(self._url) + sum([len(name) + len(value) + 4 for name, value in self._headers])

    def _check_coding(self) -> bool:
        """Refuse a body that is not chunked last, whose end cannot be known, and one that is coded in another way, too
        (RFC 9112, sections 6.1 and 6.3).
        """
        codings = [coding.strip().lower() for coding in self._coding.split(b",")]
        if codings[-1] != b"chunked":
            self._refuse(400, _NOT_HTTP)
        if any(coding not in (b"", b"identity", b"chunked") for coding in codings):
            self._refuse(501, "Unsupported transfer coding")
        return True

    def _drop_length(self) -> bool:
        """Drop a Content-Length beside Transfer-Encoding, which overrides it. Returns whether there was one.

        The connection ends with such a request: a proxy may have read it by its length and taken the next request for
        its body (RFC 9112, section 6.1).
        """
        headers = [field for field in self._headers if field[0] != b"content-length"]
        if len(headers) == len(self._headers):
            return False
        self._headers = headers
        return True

    def on_body(self, body: bytes) -> None:
        if self._chunks:
            self._chunked_bytes += len(body)
            self._bare_bytes = 0
        if self._large is not None:
            self._large.take(body)
        elif self._latest is not None:
            self._latest.feed(body)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > MAX_CHUNKS + self._chunked_bytes // CHUNK_BYTES:
            self._refuse(400, f"request body has more than {MAX_CHUNKS} chunks")

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._phase = _IDLE
        self._stalled_s = 0.0
        self._large = None
        if self._latest is not None:
            self._latest.end_body()

    # -- large bodies (`binary_bodies`) --------------------------------------------------------------------------------

    def _parse_head_first(self, data: bytes) -> None:
        """Parse data that begins with a request's headers, and copy a large body behind them to its own memory."""
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
            else:  # the parser has not seen the bytes that were taken
                self._read_large_from_now(large)
        if rest and not self.transport.is_closing() and self._final_response is None:
            self._parse(bytes(rest))

    def _begin_large(self) -> BinaryBody | None:
        """Receive the coming body into its own memory, if it is a large one of an inference."""
        sizes, serving = size_of(self._headers), self.pipeline.serving
        if self._large is not None or self._allocate_body is None or sizes is None or serving is None:
            return None
        served, scope = serving
        if served is not self._latest or not served.keep_alive:
            return None
        route = resolve(scope["path"]) if scope["method"] == "POST" else None
        if route is None or route.kind is not INFER:
            return None
        view = self._allocate_body(*sizes) if sizes[1] else handed_memory(sizes[0])
        if view is None or self._final_response is not None:
            return None
        large = self._large = BinaryBody(view)
        large.take(served.receive_into(view))
        return large

    def _read_large_from_now(self, large: BinaryBody) -> None:
        is_for_threads = len(large.view) - large.at >= APART_BYTES and not self.flow.encrypts
        client = self.flow.descriptor() if is_for_threads else None
        if client is None:
            self.transport.set_protocol(BinaryBodyReader(large, self, self._large_received, self._rest_a_turn))
            return
        self.flow.hold_reading()
        self._receiving = self._app.body_tasks.spawn(self._receive_apart(large, client))
        self._receiving.add_done_callback(lambda _: os.close(client))  # it may be cancelled before it begins

    async def _receive_apart(self, large: BinaryBody, client: int) -> None:
        """Have threads receive a body; `connection_lost` and `close_when_written` cancel this."""
        loop, ready = self.loop, asyncio.Event()
        step, at, end, waits = large.receives(client), large.at, len(large.view), False
        try:
            while at < end:
                if waits:
                    ready.clear()
                    loop.add_reader(client, ready.set)
                    try:
                        await ready.wait()
                    finally:
                        loop.remove_reader(client)
                before = at
                at, waits = await self._app.offload.transfer(move, step, at, end, client, select.POLLIN)
                self._body_bytes += at - before
        except Unavailable:  # the event loop receives the rest
            self.transport.set_protocol(BinaryBodyReader(large, self, self._large_received, self._rest_a_turn))
        except (OSError, EOFError) as error:
            if not isinstance(error, (ConnectionError, EOFError)):
                logger.error("a body of %d bytes cannot be received: %s", end, error)
            self.transport.close()
            return
        else:
            self._end_large()
        self._receiving = None
        self.flow.release_reading()

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _rest_a_turn(self) -> None:
        """Read on after the other connections."""
        self.flow.pause_reading()
        self.loop.call_soon(self.flow.resume_reading)

    def _large_received(self, size: int) -> None:
        self._body_bytes += size
        if self._large is not None and self._large.is_whole:
            self.transport.set_protocol(self)
            self._end_large()

    def _end_large(self) -> None:
        """A large body is complete. The parser, which has not seen it, is replaced by one that expects headers."""
        self._parser = self._new_parser()
        self.on_message_complete()

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> NoReturn:
        """Stop parsing; called from a callback of the parser."""
        self._refusal = (status, message)
        raise ValueError(message)

    def _refuse_broken(self, error: httptools.HttpParserError) -> None:
        """Refuse what the parser has stopped at. If a callback of ours has failed, the fault is not the client's."""
        status, message = self._refusal or (400, _NOT_HTTP)
        if self._refusal is None and isinstance(error, httptools.HttpParserCallbackError):
            status, message = 500, INTERNAL
            logger.error("a request cannot be read", exc_info=error.__context__ or error)
        else:
            logger.warning("refused a request: %s", message)
        self._write_refusal(status, message)

    def _write_refusal(self, status: int, message: str) -> None:
        """Refuse the message that is being parsed, after the answers to earlier ones, and end the connection."""
        body = error_body(message)
        head = [JSON_CONTENT_TYPE, (b"connection", b"close")]
        self._final_response = response_head(head, len(body), status) + body
        latest = self._latest if self._phase is _BODY else None
        serving = self.pipeline.serving
        if latest is not None:
            self.pipeline.withdraw(latest)
            if latest.response_started:  # its answer is written, at least in part
                self._final_response = b""
            if serving is not None and serving[0] is latest:
                latest.disconnect()
                serving = None
        if serving is None:
            self._emptied()

    def _emptied(self) -> None:
        """No request is being answered: write the final response, if there is one, and close."""
        if self._final_response is not None and not self.transport.is_closing():
            if self._final_response:
                self.transport.write(self._final_response)
            self.close_when_written()

    # -- for exchanges (`exchanges.Connection`) ------------------------------------------------------------------------

    def close_when_written(self) -> None:
        """As `close`; the rest of a message that is still being received is dropped."""
        transport = self.transport
        if self._lingers or transport.is_closing():
            return
        if (self._phase is _IDLE and self._final_response is None) or not transport.can_write_eof():
            transport.close()
            return
        self._lingers = True
        self._final_response = b""  # nothing more is read
        self._large = None
        self._stop_receiving()
        transport.write_eof()
        transport.set_protocol(Lingering(transport, self))
        transport.resume_reading()

    def answered(self) -> None:
        self.server_state.total_requests += 1
        if not self.transport.is_closing() and not self._lingers:
            self.flow.resume_reading()

    def whole_request(self) -> bytes | None:
        return self._whole if self._begun_requests == 1 and self._phase is _IDLE else None

    # -- stalling ------------------------------------------------------------------------------------------------------

    def sweep(self, elapsed_s: float) -> None:
        """End the connection if it has stalled; `elapsed_s` is the time since the last sweep."""
        phase = self._phase
        if self._held and self._call is None:  # it was not completed to a request that the lane recognises
            self._whole, self._held = self._held, b""
            self._begun_requests = 0
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
        elif self.flow.read_paused:  # the server delays the body, not the client
            self._stalled_s = 0.0
            return
        else:
            limit_s = BODY_STALL_S
            if self._body_bytes >= BODY_MIN_BYTES:
                self._body_bytes = 0
                self._stalled_s = 0.0
                return
        self._stalled_s += elapsed_s
        if self._stalled_s < limit_s or self.transport.is_closing() or self._final_response is not None:
            return
        if phase is _IDLE:
            self.transport.close()
        else:
            self._write_refusal(408, TOO_SLOW)


def split_target(url: bytes) -> tuple[str, bytes, bytes]:
    """Path, raw path and query of a request target.

    Raises httptools' error, `ValueError` or `AttributeError` for a malformed target.
    """
    parsed = httptools.parse_url(url)
    parts = unquote(parsed.path.decode("ascii")), parsed.path, parsed.query or b""
    if len(url) <= _MAX_TARGET_BYTES:
        if len(_TARGETS) >= _MAX_TARGETS:
            _TARGETS.clear()
        _TARGETS[url] = parts
    return parts


def address(transport: asyncio.BaseTransport, name: str) -> tuple[str, int] | None:
    """The connection's `sockname` or `peername` as ASGI has it: host and port; None of a Unix socket."""
    found = transport.get_extra_info(name)
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None
