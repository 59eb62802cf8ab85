"""Model serving over the KServe v2 / Triton protocols on a durable event log.

The names below are for programs that serve their own functions (`docs/howto/bind.md`). They are imported when first
used, so that importing a part of the kernel imports no service.

May import nothing outside the kernel, except `cli`, `composition` and `inprocess`. Begin reading at
`docs/architecture.md`, then `facts.events` and `eventlog.port`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executors.backends.bound import Request

    from .composition.binding import Binding, TensorSpec, bind
    from .composition.bound_server import Server, serve

_HOMES = {
    "Binding": "charonia.composition.binding",
    "TensorSpec": "charonia.composition.binding",
    "bind": "charonia.composition.binding",
    "Server": "charonia.composition.bound_server",
    "serve": "charonia.composition.bound_server",
    "Request": "executors.backends.bound",
}

__all__ = ["Binding", "Request", "Server", "TensorSpec", "bind", "serve"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
