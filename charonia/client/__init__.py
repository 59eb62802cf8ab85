"""A client of any KServe v2 server, over HTTP or gRPC, blocking (`Client`) or for asyncio (`AsyncClient`).

May import of the kernel only `datatypes`, `errors` and `tensors`, and `protos`. Begin reading at `clients`: it runs the
procedures of `procedures`, which say what is asked and what is retried; `http_form` and `grpc_form` write requests and
read answers, `http_transport` and `grpc_transport` send them. How it is used: `docs/howto/python-client.md`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .backoff import RetryPolicy
from .clients import Client, Job
from .results import (
    ConnectionLost,
    Incomprehensible,
    JobEvent,
    JobNotEnded,
    JobStatus,
    NotConnected,
    OnlyCharonia,
    Refused,
    Result,
    SharedArray,
    Tls,
)
from .shared_region import SharedRegion

if TYPE_CHECKING:
    from .async_clients import AsyncClient, AsyncJob

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "Client",
    "ConnectionLost",
    "Incomprehensible",
    "Job",
    "JobEvent",
    "JobNotEnded",
    "JobStatus",
    "NotConnected",
    "OnlyCharonia",
    "Refused",
    "Result",
    "RetryPolicy",
    "SharedArray",
    "SharedRegion",
    "Tls",
]


def __getattr__(name: str) -> Any:
    """The names for asyncio when they are first used: loading it takes longer than all the rest."""
    if name in ("AsyncClient", "AsyncJob"):
        return getattr(import_module(".async_clients", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
