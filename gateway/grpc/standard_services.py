"""gRPC's standard services of both servers: health watching, and reflection (G17, G37)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError

from charonia.errors import CharoniaError
from charonia.offload.pool import MAX_CONTROL_BYTES
from protos import health

from .calling import Context, Methods, Streaming, Write
from .statuses import INTERNAL, Refusal, Status, refusal
from .stream_requests import SHUTTING_DOWN

_log = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 0.25
"""Interval at which a watched status is checked for changes."""

REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""Two names of one protocol: their messages are identical."""

CHANNELZ = "grpc.channelz.v1.Channelz"
"""Only on the native server (`native.channelz`)."""


class StandardServices:
    """`allow(group, context)` raises if the caller may not use a restricted group; `status()` is the server's."""

    def __init__(
        self, services: tuple[str, ...], status: Callable[[], health.ServingStatus], is_draining: Callable[[], bool],
        allow: Callable[[str, Context], None],
    ) -> None:  # fmt: skip
        self._services = services
        self._status = status
        self._is_draining = is_draining
        self._allow = allow

    def methods(self) -> Methods:
        calls = {f"/{health.SERVICE_NAME}/Watch": self._watch}
        calls |= {f"/{name}/ServerReflectionInfo": self._reflect for name in REFLECTION}
        return {path: Streaming(call, largest_bytes=MAX_CONTROL_BYTES) for path, call in calls.items()}

    async def _watch(
        self, messages: AsyncIterator[bytes | memoryview], write: Write, context: Context
    ) -> Refusal | None:
        """Send the status now and at each change, until the client leaves or the server stops."""
        try:
            self._allow("health", context)
            async for message in messages:
                health.parse_request(bytes(message))
                break
            else:
                return Status.INVALID_ARGUMENT, "a HealthCheckRequest is missing", ()
        except ValueError as error:
            return Status.INTERNAL, str(error), ()
        except CharoniaError as error:
            return refusal(error)
        sent = None
        while True:
            status = self._status()
            if status is not sent:
                await write(health.serialize_response(status))
                sent = status
            if self._is_draining():
                return Status.UNAVAILABLE, SHUTTING_DOWN, ()
            await asyncio.sleep(_CHECK_INTERVAL_S)

    async def _reflect(
        self, messages: AsyncIterator[bytes | memoryview], write: Write, context: Context
    ) -> Refusal | None:
        """Describe the services and their messages, one answer for each request."""
        try:
            self._allow("metadata", context)
            servicers = _servicers(self._services)
            async for message in messages:
                if self._is_draining():
                    return Status.UNAVAILABLE, SHUTTING_DOWN, ()
                await write(_described(servicers, bytes(message)))
        except CharoniaError as error:
            return refusal(error)
        except DecodeError:
            return Status.INTERNAL, "failed to parse the ServerReflectionRequest message", ()
        except Exception:
            _log.exception("a call of reflection failed")
            return Status.INTERNAL, INTERNAL, ()
        return None


def _servicers(services: tuple[str, ...]) -> list[Any]:
    """One servicer for each descriptor pool: the messages of health have their own."""
    from grpc_reflection.v1alpha.reflection import ReflectionServicer  # imports grpcio, which few gateways need

    if CHANNELZ in services:
        import grpc_channelz.v1.channelz_pb2  # noqa: F401  (describes itself)

    names = (*services, health.SERVICE_NAME, *REFLECTION)
    return [ReflectionServicer(names, pool) for pool in (descriptor_pool.Default(), health.POOL)]


def _described(servicers: list[Any], message: bytes) -> bytes:
    from grpc_reflection.v1alpha import reflection_pb2

    request = reflection_pb2.ServerReflectionRequest.FromString(message)
    answer = None
    for servicer in servicers:
        (answer,) = servicer.ServerReflectionInfo(iter((request,)), None)
        if not answer.HasField("error_response"):
            break
    return answer.SerializeToString() if answer is not None else b""
