"""Vertex AI's front: its paths for predictions and health, and the header that makes a prediction another call (H55).

Vertex AI forwards requests to one path only; the header names a path of the v2 interface.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

from charonia.errors import InvalidArgument, StartupError
from charonia.options.settings import GatewaySettings, VertexAiSettings
from gateway.handler import Handler
from gateway.http.bodies import Receive, Scope, Send, reply_whole
from gateway.http.server import HttpFront

from .cloud_application import CONTENT_TYPE, CloudApplication, reply_empty

REDIRECT = b"x-vertex-ai-triton-redirect"
METRICS_CONTENT_TYPE = b"text/plain; charset=utf-8"

_ENCODINGS = frozenset({b"content-encoding", b"accept-encoding"})
"""Vertex AI defines no compression: bodies are not decoded."""

_MODEL = r"/v2/models/[^/]+(?:/versions/[0-9]+)?"
_MEMORY = r"/v2/(?:system|cuda)sharedmemory(?:/region/[^/]+)?"
_REPOSITORY = r"/v2/repository(?:/[^/]+)?"
_READS = re.compile(
    rf"/v2(?:/health/(?:live|ready))?|/v2/models/stats|{_MODEL}(?:/(?:ready|config|stats))?|{_MEMORY}/status"
)
_CALLS = re.compile(rf"{_MODEL}/infer|{_REPOSITORY}/index")
_CHANGES = re.compile(rf"{_MEMORY}/(?:register|unregister)|{_REPOSITORY}/models/[^/]+/(?:load|unload)")
"""Only the HTTP front serves these."""


class VertexAiApplication(CloudApplication):
    """The front over a `Handler`. `metrics` returns the page of `/metrics`, None where there is none."""

    cloud = "vertex-ai-triton"

    def __init__(
        self,
        settings: GatewaySettings,
        handler: Handler,
        own: VertexAiSettings,
        metrics: Callable[[], Awaitable[bytes | None]],
    ) -> None:
        super().__init__(settings, handler)
        self._own = own
        self._metrics = metrics
        self._model = own.default_model

    def check_model(self) -> None:
        """Raises `StartupError` unless the default model is loaded."""
        try:
            self._default_model()
        except InvalidArgument as error:
            raise StartupError(f"failed to start Vertex AI service: Invalid argument - {error.message}") from None
        if self._model not in self._ready():
            raise StartupError(
                "failed to start Vertex AI service: Invalid argument - "
                f"Expect the default model '{self._model}' is loaded"
            )

    def _ready(self) -> set[str]:
        return {entry.name for entry in self._handler.repository_index(ready=True)}

    def _default_model(self) -> str:
        """The model of predictions: the configured one, or the first that was found. Raises `InvalidArgument`."""
        if not self._model:
            ready = self._ready()
            if len(ready) != 1:
                raise InvalidArgument(
                    "Expect the model repository contains only a single model if default model is not specified"
                )
            self._model = ready.pop()
        return self._model

    async def _answer_cloud(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == self._own.health_route:
            await self._answer_v2("/v2/health/ready", scope, receive, send)
        elif scope["path"] != self._own.predict_route:
            await reply_empty(send, 400)
        elif (redirect := dict(scope["headers"]).get(REDIRECT)) is not None:
            await self._redirect("/" + unquote(redirect.decode("latin-1")), scope, receive, send)
        else:
            headers = self._headers_v2(scope, without=_ENCODINGS)
            await self._answer_v2(f"/v2/models/{self._default_model()}/infer", scope, receive, send, headers=headers)

    async def _redirect(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a prediction that is another call; it is a POST whatever that call is."""
        if scope["method"] != "POST":
            await reply_empty(send, 405)
        elif path == "/metrics":
            page = await self._metrics()
            await reply_whole(send, 200 if page else 400, [(CONTENT_TYPE, METRICS_CONTENT_TYPE)], page or b"")
        elif _READS.fullmatch(path):
            await self._answer_v2(path, scope, receive, send, method="GET")
        elif _CALLS.fullmatch(path):
            headers = self._headers_v2(scope, without=_ENCODINGS)
            await self._answer_v2(path, scope, receive, send, headers=headers)
        else:
            await reply_empty(send, 403 if _CHANGES.fullmatch(path) else 400)


class VertexAiFront(HttpFront):
    """The Vertex AI front; starts and stops as `HttpFront`."""

    def __init__(
        self,
        settings: GatewaySettings,
        handler: Handler,
        own: VertexAiSettings,
        metrics: Callable[[], Awaitable[bytes | None]],
    ) -> None:
        self._vertex_ai = VertexAiApplication(settings, handler, own, metrics)
        super().__init__(settings, handler, application=self._vertex_ai, service="Vertex AI")
        self._loads_are_over = settings.await_executors > 0

    async def start(self) -> None:
        """As `HttpFront.start`. Where models were waited for, the default model has to be there."""
        if self._loads_are_over:
            self._vertex_ai.check_model()
        await super().start()
