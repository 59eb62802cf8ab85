"""SageMaker's front: `/ping` and `/invocations`, and `/models` of its multi-model endpoints (H55).

A multi-model endpoint loads models at run time, each from a directory where SageMaker has unpacked it. SageMaker
addresses a model by a hash (here its alias) and passes its own name in a header.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import orjson

from charonia.errors import SERVER_EXITING, CharoniaError, ErrorCode, InvalidArgument
from charonia.models.names import check_model_name, name_of, namespace_of
from charonia.offload.pool import MAX_CONTROL_BYTES
from charonia.options.settings import GatewaySettings, SageMakerSettings
from gateway.handler import Handler
from gateway.http.bodies import Message, Receive, Scope, Send, check_declared, read_body, reply_whole
from gateway.http.bodies import too_large_for_control as too_large
from gateway.http.codec.compression import content_encoding
from gateway.http.codec.error_replies import JSON_CONTENT_TYPE, HttpRefusal
from gateway.http.codec.jsondata import NOT_STRING
from gateway.http.codec.jsontext import parse_json
from gateway.http.codec.response_codec import HEADER_LENGTH

from .cloud_application import CONTENT_TYPE, CloudApplication, reply_empty

TARGET_MODEL = b"x-amzn-sagemaker-target-model"

_MODELS = re.compile(r"/models/?([^/]+)?(/invoke)?")
_NO_MEMORY = re.compile(
    "[Oo]ut [Oo]f [Mm]emory|OutOfMemory|OUT_OF_MEMORY|OOM|MemoryError|[Ff]ailed to allocate memory|"
    "(?:Dst|Src) tensor is not initialized|CUDNN_STATUS_NOT_INITIALIZED|CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|"
    "No space left on device"
)
"""Error texts with these words make SageMaker unload other models to free memory."""
_KEPT = frozenset({401, 403, 405, 429})
"""Statuses of invocations that are more specific than "the model failed"."""


class SageMakerApplication(CloudApplication):
    """The front over a `Handler`."""

    cloud = "sagemaker-triton"

    def __init__(self, settings: GatewaySettings, handler: Handler, own: SageMakerSettings) -> None:
        super().__init__(settings, handler)
        self._ping = f"/v2/health/{own.ping_mode}"
        self._invocations = f"/v2/models/{own.default_model}/{own.inference}"
        self._models = own.models
        self._url = re.compile(rf"{re.escape(own.models)}/[0-9A-Za-z._]+/model(?:/[0-9A-Za-z._]+)?")

    async def _answer_cloud(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/ping":
            await self._answer_v2(self._ping, scope, receive, send)
        elif path == "/invocations":
            headers = self._headers_v2(scope)
            await self._answer_v2(self._invocations, scope, receive, self._announcing(send), headers=headers)
        elif (found := _MODELS.fullmatch(path)) is None:
            await reply_empty(send, 400)
        elif found[2] and scope["method"] == "POST":
            await self._invoke(found[1] or "", scope, receive, send)
        else:
            await self._manage(found[1] or "", scope, receive, send)

    def _announcing(self, send: Send) -> Send:
        """A `send` for replies whose content type announces the size of the JSON part."""

        async def translated(message: Message) -> None:
            length = dict(message.get("headers", ())).get(HEADER_LENGTH)
            if length is not None:
                headers = [(n, v) for n, v in message["headers"] if n not in (HEADER_LENGTH, CONTENT_TYPE)]
                message = {**message, "headers": [*headers, (CONTENT_TYPE, self._mime.encode() + length)]}
            await send(message)

        return translated

    # -- multi-model endpoints ----------------------------------------------------------------------------------------

    async def _invoke(self, alias: str, scope: Scope, receive: Receive, send: Send) -> None:
        if alias not in self._handler.registered_models():
            await reply_empty(send, 404)
            return
        try:
            content_encoding(dict(scope["headers"]).get(b"content-encoding", b""))
        except HttpRefusal as refusal:
            raise HttpRefusal(415, refusal.message, headers=refusal.headers) from None
        path = f"/v2/models/{_target(scope, alias)}/infer"
        announcing, failed = self._announcing(send), None

        async def judged(message: Message) -> None:
            nonlocal failed
            if message.get("status", 200) >= 400 and message["status"] not in _KEPT:
                failed = message  # its status depends on the text
                return
            if failed is not None:
                await send({**failed, "status": _status(bytes(message["body"]).decode())})
                failed = None
            await announcing(message)

        await self._answer_v2(path, scope, receive, judged, headers=self._headers_v2(scope))

    async def _manage(self, alias: str, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if method not in ("GET", "POST", "DELETE"):
            await reply_empty(send, 400)
            return
        self._restrictions.check("model-repository", scope["headers"])
        if self.draining:
            raise HttpRefusal(503, SERVER_EXITING, close=True)
        if method == "POST":
            await self._load(scope, receive, send)
            return
        registered = self._handler.registered_models()
        if alias and alias not in registered:
            await reply_empty(send, 404)
        elif method == "DELETE":
            try:
                await self._handler.unregister_model(alias, _target(scope, alias))
            except CharoniaError as error:
                raise HttpRefusal(400, error.message) from error
            await reply_empty(send, 200)
        elif alias:
            await _reply_json(send, _entry(alias, registered[alias]))
        else:
            ready = self._handler.model_ready
            models = [_entry(name, key) for name, key in sorted(registered.items()) if ready(name_of(key), "")]
            await _reply_json(send, {"models": models})

    async def _load(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        check_declared(headers, MAX_CONTROL_BYTES, too_large)
        body = bytes(await read_body(await receive(), headers, receive, MAX_CONTROL_BYTES, too_large))
        try:
            alias, url = _read_load(body)
            model = _target(scope, alias)
            for name in (alias, model):
                check_model_name(name)
            path = self._directory(url)
            await self._handler.register_model(alias, model, path)
        except CharoniaError as error:
            is_there = error.code is ErrorCode.ALREADY_EXISTS
            raise HttpRefusal(409 if is_there else _status(error.message), error.message) from error
        await reply_empty(send, 200)

    def _directory(self, url: str) -> str:
        """The normalised path of a model's directory. Raises `InvalidArgument` for one that SageMaker does not use."""
        path = os.path.normpath(url)
        if self._url.fullmatch(path) is None:
            raise InvalidArgument(
                f"Invalid \"url\" '{url}': expected a path of the form {self._models}/<hash>/model[/<subdir>]"
            )
        return path


def _target(scope: Scope, alias: str) -> str:
    """The name of the model at the server."""
    name: bytes | None = dict(scope["headers"]).get(TARGET_MODEL)
    return alias if name is None else name.decode("utf-8", "replace")


def _read_load(body: bytes) -> tuple[str, str]:
    """`model_name` and `url` of a load request. Raises `CharoniaError`."""
    document = parse_json(body) if body else {}
    if not isinstance(document, dict):
        raise InvalidArgument("expected a JSON object with 'model_name' and 'url'")
    values = document.get("model_name", ""), document.get("url", "")
    for value in values:
        if not isinstance(value, str):
            raise InvalidArgument(NOT_STRING)
    return values


def _status(text: str) -> int:
    return 507 if _NO_MEMORY.search(text) else 400


def _entry(alias: str, key: str) -> dict[str, str]:
    return {"modelName": alias, "modelUrl": namespace_of(key)}


async def _reply_json(send: Send, document: Mapping[str, object]) -> None:
    await reply_whole(send, 200, [JSON_CONTENT_TYPE], orjson.dumps(document))
