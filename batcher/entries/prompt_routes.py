"""Routes of prompts that no gateway has tokenised, as it does for the OpenAI API: from the tensors of the request.

For models that are routed by prompts only (`scheduling.stateless.routed_dispatch`). The work grows with the prompt: a
microsecond for each 128 bytes at first, less for long ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from batcher.scheduling.observations import RequestQueued
from charonia.generation.prompt_keys import PromptRoute, route_of_packed, route_of_text
from charonia.wire import RequestRecord

from .carriers import carried_of

_LENGTH_BYTES = 4
"""Before an element of a BYTES tensor (T3)."""
_BYTES_OF_TOKEN = 4
"""Of an INT32 token, and about those of a text's."""


def complete_routes(requests: Iterable[RequestQueued]) -> None:
    """Add the routes that are missing. Of prompts that lie outside their records only the length is known."""
    for request in requests:
        meta = request.meta
        if request.wave or meta is None or meta.prompt is not None:
            continue
        prompt = _route_of(carried_of(request).record)
        if prompt is not None:
            request.meta = replace(meta, prompt=prompt)


def _route_of(record: RequestRecord) -> PromptRoute | None:
    places = {place.name: place for place in record.meta.inputs}
    if record.reference is not None:
        found = places.get("prompt_token_ids") or places.get("text_input")
        return PromptRoute(found.size_bytes // _BYTES_OF_TOKEN) if found is not None else None
    data = memoryview(record.data)
    if (tokens := places.get("prompt_token_ids")) is not None:
        return route_of_packed(data[tokens.offset : tokens.offset + tokens.size_bytes])
    if (text := places.get("text_input")) is not None:
        return route_of_text(data[text.offset + _LENGTH_BYTES : text.offset + text.size_bytes])
    return None
