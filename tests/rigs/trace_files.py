"""What a trace file says of an inference."""

from __future__ import annotations

import json
from typing import Any


def entries(stack: Any) -> list[dict[str, Any]]:
    text = stack.file.read_text() if stack.file.exists() else ""
    return json.loads(text) if text else []  # it is there before the first trace is


def traced(stack: Any, request_id: str) -> list[dict[str, Any]]:
    """What the file says of one request and of all that was made for it."""
    found: list[dict[str, Any]] = []
    ids: set[int] = set()
    for entry in entries(stack):
        if entry.get("request_id") == request_id or entry.get("parent_id") in ids:
            ids.add(entry["id"])
        if entry["id"] in ids:
            found.append(entry)
    return found


def names_of(found: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """(model, parent's place among them, -1 for none) of each."""
    named = [entry for entry in found if "model_name" in entry]
    places = {entry["id"]: place for place, entry in enumerate(named)}
    return [(entry["model_name"], places.get(entry.get("parent_id"), -1)) for entry in named]
