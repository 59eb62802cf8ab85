"""One call of the OpenAI API over an in-memory handler, for hostile bodies."""

from __future__ import annotations

import asyncio
from typing import Any

import text_handler

from charonia.options.settings import GatewaySettings, OpenAiSettings
from gateway.openai.openai_application import OpenAiInterface

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages"),
    *("/v1/rerank", "/v1/score", "/v1/moderations", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)

_runner = asyncio.Runner()
_made: list[OpenAiInterface] = []


def post(path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the reply."""
    return _runner.run(_post(path, body))


async def _post(path: str, body: bytes) -> tuple[int, bytes]:
    if not _made:
        settings = GatewaySettings(incarnation="test", http_max_input_size=1 << 20, openai=OpenAiSettings())
        _made.append(OpenAiInterface(settings, text_handler.TextHandler()))
    (interface,) = _made
    interface._handler.requests.clear()
    interface._handler.options.clear()
    status, parts = 0, []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(bytes(message.get("body", b"")))

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "state": {}}
    await interface.answer(scope, receive, send)  # type: ignore[arg-type]
    return status, b"".join(parts)
