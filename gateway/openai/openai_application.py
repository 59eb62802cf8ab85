"""The OpenAI API as a front: finds the endpoint of a path, identifies the caller, and answers for calls that fail.

It is served on a port of its own, on the HTTP port beside `/v2`, or on both. Each module of endpoints adds its paths to
the table in a function of its own.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from charonia.errors import SERVER_EXITING, CharoniaError, Unavailable, class_of_failure
from charonia.options.settings import GatewaySettings
from charonia.tasks import Tasks
from gateway.access.restrictions import Restrictions
from gateway.access.token_bounds import TokensExhausted
from gateway.handler import Handler
from gateway.http.bodies import CLIENT_LEFT, ClientGone, Receive, Scope, Send, reply_whole
from gateway.http.codec.error_replies import HttpRefusal
from gateway.http.http_application import HttpApplication

from .adapter_routes import add_adapters
from .api_calls import DONE, ApiCall, OpenAiContext, Page, RouteTable, no_page
from .embedding_routes import EmbeddingEndpoint, add_embeddings
from .message_routes import MESSAGES, add_messages
from .model_routes import OWN_PATHS, add_models
from .moderation_routes import add_moderations
from .scoring_routes import Scoring, add_scoring
from .shapes.api_errors import ApiError, Failure, error_document, json_bytes, render_failure, status_of
from .stored.stored_objects import ObjectLog
from .stored.stored_parts import StoredParts
from .text_models import TextModels
from .text_routes import TextEndpoints, add_texts
from .text_serving import TextServing
from .transcription_routes import add_transcriptions

logger = logging.getLogger("charonia.gateway.openai")

_LOGGED_CHARACTERS = 1000
"""Of an error's text, which a model may make as long as it likes."""
OVERLOADED = "the server is out of time, memory, threads or descriptors: try again"


class OpenAiInterface:
    """The whole API over a `Handler`, for the listeners that serve it."""

    def __init__(
        self, settings: GatewaySettings, handler: Handler, metrics: Page = no_page, log: ObjectLog | None = None
    ) -> None:
        """`metrics` returns the page of `/metrics`, None where there is none; without a `log` nothing is stored."""
        self._handler = handler
        self._restrictions = Restrictions(settings.http_restricted_api, _restricted)
        self._context = OpenAiContext(settings, handler, metrics)
        separator = settings.openai.lora_separator if settings.openai is not None else ""
        self.models = TextModels(handler, separator, settings.http_max_input_size)
        self.serving = TextServing(handler, self.models)
        self.texts = TextEndpoints(self.serving)
        self.embeddings = EmbeddingEndpoint(handler, self.models, self.serving.counts)
        self.stored: StoredParts | None = None
        """What is stored in the log; None without one."""
        if log is not None:
            self.stored = StoredParts(handler, log, self.texts, self.serving, self.embeddings, settings.incarnation)
        self._changes = Tasks(on_error=_say_of_change)
        self.routes = RouteTable()
        self._add_routes()

    def _add_routes(self) -> None:
        add_models(self.routes, self._context, self.models)
        add_texts(self.routes, self.texts)
        add_messages(self.routes, self.serving)
        add_embeddings(self.routes, self.embeddings)
        counts = self.serving.counts
        add_scoring(self.routes, Scoring(self._handler, self.models, counts))
        add_moderations(self.routes, self._handler, self.models, counts)
        add_transcriptions(self.routes, self._handler, self.models, counts)
        add_adapters(self.routes, self._handler, self.models, self._changes)
        if self.stored is not None:
            self.stored.add(self.routes)

    async def close(self) -> None:
        """End the changes of adapters that still run; before it the fronts are closed."""
        await self._changes.close()

    def claims(self, path: str) -> bool:
        """Whether a path belongs to this API where it is served beside another one."""
        return path.startswith("/v1/") or (path not in OWN_PATHS and self.routes.find(path) is not None)

    async def answer(self, scope: Scope, receive: Receive, send: Send, *, draining: bool = False) -> None:
        """Answer one request; `draining`: with "Server exiting" (E7)."""
        call = ApiCall(self._context, scope, receive, send)
        call.headers_of_reply.append((b"x-request-id", uuid.uuid4().hex.encode()))
        try:
            await self._dispatch(call, draining=draining)
        except (ApiError, CharoniaError, HttpRefusal) as failure:
            await _fail(call, failure)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if not scope.get("state", {}).get(CLIENT_LEFT):
                await _fail(call, Unavailable(SERVER_EXITING))
        except Exception as failure:
            logger.exception("unexpected failure of %s %r", scope["method"], scope["path"][:256])
            kind = class_of_failure(failure)
            await _fail(call, kind(OVERLOADED if kind is Unavailable else "internal server error"))

    async def _dispatch(self, call: ApiCall, *, draining: bool) -> None:
        method, path = call.scope["method"], call.scope["path"]
        found = self.routes.find(path)
        if found is None:
            raise ApiError(f"Invalid URL ({method} {path[:256]})", status=404)
        methods, call.arguments = found
        route = methods.get(method)
        if route is None:
            allowed = ", ".join(sorted(methods)).encode()
            raise HttpRefusal(405, f"Not allowed to {method} on {path[:256]}", headers=[(b"allow", allowed)])
        if self._restrictions.any:
            self._restrictions.check(route.group, call.scope["headers"])
        if draining:
            raise HttpRefusal(503, SERVER_EXITING, close=True)
        if not route.is_open and self._handler.identifies:
            call.caller = self._handler.identify(call.scope["headers"])
            if bound := self._handler.request_bound(call.caller):
                call.headers_of_reply.append((b"x-ratelimit-limit-requests", b"%d" % bound))
        await route.endpoint(call)


def _restricted(header: str) -> ApiError:
    """The refusal of a restricted endpoint, as of Triton's OpenAI frontend."""
    return ApiError(
        f"This API is restricted, expecting header '{header}' with valid value", status=401, code="invalid_auth"
    )


def _say_of_change(error: BaseException) -> None:
    """Logs a change of adapters that failed; a client that still waits gets the error from its call."""
    logger.info("a change of adapters failed: %s", error)


async def _fail(call: ApiCall, failure: Failure) -> None:
    """Answer a call that failed; once an event stream has begun, with a last event.

    Raises `_CutShort` where another response has begun, as nothing can be said in it: the connection is closed.
    """
    is_message = call.scope["path"].startswith(MESSAGES)
    if not call.started:
        status, headers, body = render_failure(failure, is_message=is_message)
        _log_failure(call, failure, status)
        if status == 429 and not isinstance(failure, TokensExhausted):
            headers.append((b"x-ratelimit-remaining-requests", b"0"))
        await reply_whole(call.send, status, [*headers, *call.headers_of_reply], body)
        return
    if not call.streams:
        raise _CutShort(failure.message)
    _log_failure(call, failure, status_of(failure))
    event = b"data: " + json_bytes(error_document(failure, is_message=is_message)) + b"\n\n"
    await call.end_events(b"event: error\n" + event if is_message else event + DONE)


def _log_failure(call: ApiCall, failure: Failure, status: int) -> None:
    """Say what a call failed of where the server failed it: clients often drop the message."""
    if status >= 500:
        level = logging.ERROR if status == 500 else logging.INFO
        text = failure.message[:_LOGGED_CHARACTERS]
        words = (call.scope["method"], call.scope["path"][:256], status, type(failure).__name__, text)
        logger.log(level, "%s %r is answered with %d, %s: %s", *words, exc_info=failure.__cause__)


class _CutShort(Exception):
    """A response ends before it is whole."""


class OpenAiApplication(HttpApplication):
    """The front of a port that serves this API alone."""

    def __init__(self, settings: GatewaySettings, handler: Handler, interface: OpenAiInterface) -> None:
        super().__init__(settings, handler)
        self.lane = None  # the lane would read requests before this front does
        self._interface = interface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._interface.answer(scope, receive, send, draining=self.draining)
