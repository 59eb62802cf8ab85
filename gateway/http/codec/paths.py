"""Routes of the paths that are answered before FastAPI, and the restricted-API group of every path. Pure.

Names may hold any character but "/", versions are digits only (H3, H10).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

INFER = "infer"
GENERATE_STREAM = "generate_stream"
LIVE = "live"
READY = "ready"
MODEL_READY = "model_ready"

_MODEL = re.compile(r"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(infer|ready|generate|generate_stream))?")

_FIXED_GROUPS = {"/v2": "metadata", "/v2/models/stats": "statistics", "/v2/logging": "logging"}
_TAIL_GROUPS = {
    "infer": "inference",
    "generate": "inference",
    "generate_stream": "inference",
    "ready": "health",
    "config": "model-config",
    "stats": "statistics",
}


@dataclass(frozen=True, slots=True)
class Route:
    """The endpoint, model and version of a path; `group` is its restricted-API group (H53)."""

    kind: str
    method: str
    group: str
    model: str = ""
    version: str = ""


_FIXED_ROUTES = {
    "/v2/health/live": Route(LIVE, "GET", "health"),
    "/v2/health/ready": Route(READY, "GET", "health"),
}


def resolve(path: str) -> Route | None:
    """The route of a (percent-decoded) path, or None for one that FastAPI answers."""
    fixed = _FIXED_ROUTES.get(path)
    if fixed is not None:
        return fixed
    found = _MODEL.fullmatch(path)
    if found is None:
        return None
    model, version, action = found.group(1), found.group(2) or "", found.group(3)
    if action == "infer":
        return Route(INFER, "POST", "inference", model, version)
    if action == "ready":
        return Route(MODEL_READY, "GET", "health", model, version)
    if action is not None:
        return Route(action, "POST", "inference", model, version)
    return None


def group_of(path: str) -> str:
    """The restricted-API group of a path that FastAPI answers; "" for none (H53).

    A newline at its end counts for nothing: the end of FastAPI's patterns (`$`) lies before one.
    """
    path = path.removesuffix("\n")
    fixed = _FIXED_GROUPS.get(path)
    if fixed is not None:
        return fixed
    segments = path.split("/")[2:] if path.startswith("/v2/") else []
    match segments:
        case ["repository", *_]:
            return "model-repository"
        case ["systemsharedmemory" | "cudasharedmemory", *_]:
            return "shared-memory"
        case ["jobs", *_]:
            return "inference"
        case ["trace", "setting"] | ["models", _, "trace", "setting"]:
            return "trace"
        case ["models", _] | ["models", _, "versions", _]:
            return "metadata"
        case ["models", *_, tail]:
            return _TAIL_GROUPS.get(tail, "")
        case _:
            return ""
