"""The models of the OpenAI API: `/v1/models`, and whether the server is healthy."""

from __future__ import annotations

from .api_calls import ApiCall, OpenAiContext, RouteTable


def add_models(routes: RouteTable, context: OpenAiContext) -> None:
    """Add the paths of this module."""
    handler = context.handler

    async def models(call: ApiCall) -> None:
        names = {entry.name for entry in handler.repository_index(ready=True)}
        await call.reply({"object": "list", "data": [{"id": name, "object": "model"} for name in sorted(names)]})

    async def health(call: ApiCall) -> None:
        await call.reply_bytes(b"", headers=[], status=200 if handler.ready() else 503)

    routes.add("GET", "/v1/models", models, group="metadata")
    routes.add("GET", "/health", health, group="health", is_open=True)
