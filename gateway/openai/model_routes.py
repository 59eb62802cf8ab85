"""The models of the OpenAI API, and their tokens: `/v1/models`, `/tokenize`, `/detokenize`, `/tokenizer_info`,
`/health`, `/version`.

The paths without `/v1` are vLLM's; `/v1/models/{model}/load` and `/unload` are those of Triton's OpenAI frontend.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version as package_version
from typing import Any

from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InvalidArgument, Unavailable
from gateway.http.codec.error_replies import JSON_CONTENT_TYPE
from gateway.http.openapi.document import build_document
from gateway.http.openapi.stored_operations import STORED_OPERATIONS, stored_schemas
from gateway.http.openapi.task_operations import OPENAI_OPERATIONS, openai_schemas

from .api_calls import ApiCall, OpenAiContext, RouteTable
from .shapes.api_errors import ApiError, json_bytes, long_field
from .shapes.chat_shapes import read_chat
from .shapes.sampling_fields import flag, text, token_ids
from .text_models import Asked, TextModel, TextModels, TextTools

DOCUMENT_PATH, METRICS_PATH = "/openapi.json", "/metrics"
REPOSITORY = "model-repository"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The class by which Hugging Face's transformers read a `tokenizer.json` alone."""
OWN_PATHS = frozenset((DOCUMENT_PATH, METRICS_PATH))
"""Only on the port of this API: the HTTP port has its own document."""


def add_models(routes: RouteTable, context: OpenAiContext, models: TextModels) -> None:
    """Add the paths of this module."""
    handler = context.handler
    created_s = wall_ns() // 1_000_000_000

    async def context_of(model: TextModel) -> int | None:
        try:
            tools = await models.tools(model)
        except CharoniaError:
            return None
        return tools.context if tools is not None else None

    async def entry(model: TextModel) -> list[dict[str, Any]]:
        """The model and its adapters. Other names of an adapter are not listed."""
        length = await context_of(model)
        adapters = [models.adapter_name(model, adapter) for adapter in model.adapters]
        return [
            {
                "id": name,
                "object": "model",
                "created": created_s,
                "owned_by": "charonia",
                "root": model.name,
                "parent": None if name == model.name else model.name,
                "max_model_len": length,
            }
            for name in (model.name, *adapters)
        ]

    async def list_models(call: ApiCall) -> None:
        found = await asyncio.gather(*(entry(model) for model in models.all()))
        await call.reply({"object": "list", "data": [one for entries in found for one in entries]})

    async def one_model(call: ApiCall) -> None:
        name = call.arguments["model"]
        model = models.find(name)
        wanted = models.adapter_name(model, model.adapter) if model.adapter else model.name
        await call.reply(next(one for one in await entry(model) if one["id"] == wanted) | {"id": name})

    changing: set[str] = set()
    """Models that a call here loads or unloads."""

    def check_mode() -> None:
        if not handler.loads_by_call():
            raise ApiError("Model load/unload requires --model-control-mode=explicit")

    async def load(call: ApiCall) -> None:
        check_mode()
        await call.body()  # says nothing; one that is too large is refused
        name = call.arguments["model"]
        if models.served(name) is not None:
            raise ApiError(f"Model '{name[:256]}' is already loaded", param="model")
        with _one_at_a_time(changing, name):
            await handler.load_model(name, None, {})
        served = models.served(name)
        if served is None:  # unloaded again already
            raise Unavailable(f"Model '{name[:256]}' is not served any more")
        await call.reply((await entry(TextModel(served)))[0])

    async def unload(call: ApiCall) -> None:
        check_mode()
        await call.body()  # says nothing; one that is too large is refused
        name = call.arguments["model"]
        if models.served(name) is None:
            raise ApiError(f"Unknown model: {name[:256]}", param="model")
        with _one_at_a_time(changing, name):
            await handler.unload_model(name, unload_dependents=False)
        await call.reply({"status": "success", "model": name})

    async def tokenize(call: ApiCall) -> None:
        body = await call.json()
        tools = await needed(text(body, "model"), call.asked)
        if body.get("messages") is not None:
            prompt = await models.render(tools, read_chat(body))
            special = flag(body, "add_special_tokens")
        else:
            prompt = _prompt(body)
            special = flag(body, "add_special_tokens", True)
        with long_field("prompt" if body.get("messages") is None else "messages"):
            tokens = await models.encode(tools, prompt, special=special)
        strings = [tools.tokenizer.token_text(token) for token in tokens] if flag(body, "return_token_strs") else None
        await call.reply(
            {"count": len(tokens), "max_model_len": tools.context, "tokens": tokens, "token_strs": strings}
        )

    async def detokenize(call: ApiCall) -> None:
        body = await call.json()
        tools = await needed(text(body, "model"), call.asked)
        ids = token_ids(body.get("tokens"), "tokens", tools.context)
        try:
            prompt = tools.tokenizer.decode(ids).decode("utf-8", "replace")
        except InvalidArgument as error:
            raise ApiError(error.message, param="tokens") from None
        await call.reply({"prompt": prompt})

    async def tokenizer_info(call: ApiCall) -> None:
        """Of the model that the query names; without a name of the first one that has a tokenizer."""
        name = call.query.get("model", "")
        tools = await needed(name, call.asked) if name else await first_tools()
        assets = tools.assets
        await call.reply(
            {
                "tokenizer_class": TOKENIZER_CLASS,
                "model_max_length": tools.context,
                "chat_template": assets.chat_template or None,
                **assets.special_tokens,
            }
        )

    async def first_tools() -> TextTools:
        for model in models.all():
            if (tools := await models.tools(model)) is not None:
                return tools
        raise ApiError("no model here has a tokenizer", status=404)

    async def needed(name: str, asked: Asked) -> TextTools:
        tools = await models.tools(models.find(name, asked))
        if tools is None:
            raise ApiError(f"The model '{name}' has no tokenizer here", param="model")
        return tools

    async def health(call: ApiCall) -> None:
        await call.reply_bytes(b"", headers=[], status=200 if handler.ready() else 503)

    async def metrics(call: ApiCall) -> None:
        if handler.identifies and not _is_restricted(context, "statistics"):
            raise ApiError(
                "metrics name tenants: read them at the metrics port (--metrics-port), or restrict 'statistics' "
                "(--http-restricted-api)",
                status=403,
            )
        page = await context.metrics()
        if page is None:
            raise ApiError("metrics are off (--allow-metrics)", status=404)
        await call.reply_bytes(page, headers=[(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")])

    async def version(call: ApiCall) -> None:
        await call.reply({"version": handler.server_metadata().version})

    @cache  # its readers need no key
    def written() -> bytes:
        operations = (*OPENAI_OPERATIONS, *STORED_OPERATIONS)
        schemas = {**openai_schemas(), **stored_schemas()}
        whole = build_document(package_version("charonia"), operations, schemas)
        own = {operation.path for operation in operations} & {route.path for route in routes.routes}
        return json_bytes({**whole, "paths": {path: one for path, one in whole["paths"].items() if path in own}})

    async def document(call: ApiCall) -> None:
        await call.reply_bytes(written(), headers=[JSON_CONTENT_TYPE])

    routes.add("GET", DOCUMENT_PATH, document, group="metadata", is_open=True)
    routes.add("GET", "/v1/models", list_models, group="metadata")
    routes.add("GET", "/v1/models/{model}", one_model, group="metadata")
    routes.add("POST", "/v1/models/{model}/load", load, group=REPOSITORY)
    routes.add("POST", "/v1/models/{model}/unload", unload, group=REPOSITORY)
    routes.add("POST", "/tokenize", tokenize)
    routes.add("POST", "/detokenize", detokenize)
    routes.add("GET", "/tokenizer_info", tokenizer_info, group="metadata")
    routes.add("GET", "/health", health, group="health", is_open=True)
    routes.add("GET", "/health/ready", health, group="health", is_open=True)
    routes.add("GET", METRICS_PATH, metrics, group="statistics", is_open=True)
    routes.add("GET", "/version", version, group="metadata", is_open=True)


@contextlib.contextmanager
def _one_at_a_time(changing: set[str], name: str) -> Iterator[None]:
    """For a load or an unload. Raises a 400 `ApiError` where another call loads or unloads the model."""
    if name in changing:
        raise ApiError(f"Model '{name[:256]}' is being loaded or unloaded", param="model")
    changing.add(name)
    try:
        yield
    finally:
        changing.discard(name)


def _is_restricted(context: OpenAiContext, group: str) -> bool:
    return any(group in groups for groups, _, _ in context.settings.http_restricted_api)


def _prompt(body: Mapping[str, Any]) -> str:
    found = body.get("prompt")
    if not isinstance(found, str):
        raise ApiError("'prompt' must be a string", param="prompt")
    return found
