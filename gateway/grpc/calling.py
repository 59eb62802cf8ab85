"""The interface between a gRPC server and the methods that it serves, and how methods read a call's metadata.

A server moves bytes: it finds the method of a path, passes it messages and sends its messages, and ends the call with a
`Refusal` or with OK. Methods raise only `asyncio.CancelledError`, when the client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from charonia.inference import ParameterValue
from charonia.options.settings import GrpcDelays
from charonia.tensors import Buffer

from .statuses import Refusal

T = TypeVar("T")


class Context(Protocol):
    """A call without its messages: metadata and deadline."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        """The caller's metadata; values of keys that end in `-bin` are bytes."""

    def time_remaining(self) -> float | None:
        """Seconds until the call's deadline; None without one."""


@dataclass(frozen=True, slots=True)
class LargeReply:
    """A serialised message in parts, some of them large tensors: joining would copy them."""

    parts: Sequence[Buffer]

    def __len__(self) -> int:
        return sum(map(len, self.parts))


Reply = bytes | LargeReply
"""A serialised message."""

Write = Callable[[Reply], Awaitable[None]]
"""Sends a message; returns when the transport accepts it. Raises `asyncio.CancelledError` if the client has left."""

LARGEST_MESSAGE_BYTES = 0x7FFFFFFF
"""The limit of grpcio and Triton: protobuf can hold no larger message."""


@dataclass(frozen=True, slots=True)
class Unary:
    """A method with one request and one reply. A request has at most `largest_bytes`.

    With `takes_views` a large request may be a view of shared memory.
    """

    call: Callable[[bytes | memoryview, Context], Awaitable[Reply | Refusal]]
    takes_views: bool = False
    largest_bytes: int = LARGEST_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class Streaming:
    """A method with any number of messages in both directions; fields as in `Unary`."""

    call: Callable[[AsyncIterator[bytes | memoryview], Write, Context], Awaitable[Refusal | None]]
    takes_views: bool = False
    largest_bytes: int = LARGEST_MESSAGE_BYTES


def too_large(size_bytes: int, largest_bytes: int) -> str:
    """gRPC's text for a message that is too large."""
    return f"Received message larger than max ({size_bytes} vs. {largest_bytes})"


Methods = dict[str, Unary | Streaming]
"""Methods by path: `/service/method`."""


class Standing(NamedTuple):
    """What the metadata of inference calls says: the tenant, and the parameters forwarded to the model."""

    tenant: str
    forwarded: tuple[tuple[str, ParameterValue], ...]
    generation: int = 0
    """Number of changes of the tenants' keys before this was determined; an older one is outdated."""


USUAL = Standing("", ())


def metadata_of(context: Context) -> list[tuple[str, str | bytes]]:
    return list(context.invocation_metadata() or ())


def headers_of(context: Context) -> list[tuple[bytes, bytes]]:
    return raw_headers(metadata_of(context))


def raw_headers(metadata: Iterable[tuple[str, str | bytes]]) -> list[tuple[bytes, bytes]]:
    """Metadata as HTTP headers."""
    return [
        (name.encode("latin-1", "replace"), value if isinstance(value, bytes) else value.encode())
        for name, value in metadata
    ]


def delayed(methods: Methods, delays: GrpcDelays, service: str) -> Methods:
    """The methods with the delays that tests of clients ask for (G33); unchanged if there are none."""
    if delays == GrpcDelays():
        return methods
    changed: Methods = {}
    for path, method in methods.items():
        if isinstance(method, Unary):
            is_inference = path == f"/{service}/ModelInfer"
            after_s = delays.answer_s if is_inference else delays.control_s
            call = partial(_delayed_call, method.call, delays, delays.request_s if is_inference else 0.0, after_s)
            changed[path] = replace(method, call=call)
        elif path == f"/{service}/ModelStreamInfer":
            changed[path] = replace(method, call=partial(_delayed_stream, method.call, delays))
        else:
            changed[path] = method
    return changed


async def _delayed_call(
    call: Callable[[bytes | memoryview, Context], Awaitable[Reply | Refusal]],
    delays: GrpcDelays,
    before_s: float,
    after_s: float,
    data: bytes | memoryview,
    context: Context,
) -> Reply | Refusal:
    await asyncio.sleep(before_s)
    reply = await _not_cancelled_for(delays.cancellation_s, call(data, context))
    await asyncio.sleep(after_s)
    return reply


async def _delayed_stream(
    call: Callable[[AsyncIterator[bytes | memoryview], Write, Context], Awaitable[Refusal | None]],
    delays: GrpcDelays,
    messages: AsyncIterator[bytes | memoryview],
    write: Write,
    context: Context,
) -> Refusal | None:
    async def late_messages() -> AsyncIterator[bytes | memoryview]:
        async for message in messages:
            await asyncio.sleep(delays.request_s)
            yield message

    async def late_write(reply: Reply) -> None:
        await asyncio.sleep(delays.response_s)
        await write(reply)

    return await _not_cancelled_for(delays.cancellation_s, call(late_messages(), late_write, context))


async def _not_cancelled_for(delay_s: float, call: Awaitable[T]) -> T:
    """Await a call, and cancel it only this long after the caller's cancellation."""
    running = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        asyncio.get_running_loop().call_later(delay_s, running.cancel)
        raise
