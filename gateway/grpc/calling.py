"""What a server of gRPC and the calls of this service have in common, and what every call reads of its context.

A server moves bytes: it finds the method of a path, gives it messages and takes messages and, in the end, a `Refusal`
or none. Methods raise nothing but `asyncio.CancelledError`, when their caller has gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from charonia.tensors import Buffer

from .statuses import Refusal


class Context(Protocol):
    """What is known of a call beside its messages."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        """The caller's metadata; values of keys that end in `-bin` are bytes."""

    def time_remaining(self) -> float | None:
        """Seconds until the call's deadline; None without one."""


Write = Callable[[bytes], Awaitable[None]]
"""Sends a message and returns when the transport took it; raises `asyncio.CancelledError` when the client has left."""


@dataclass(frozen=True, slots=True)
class LargeReply:
    """A serialised message in parts, of which some are tensors where they lie: joining them would copy them."""

    parts: Sequence[Buffer]

    def joined(self) -> bytes:
        return b"".join(self.parts)


@dataclass(frozen=True, slots=True)
class Unary:
    """A method of one message each way. With `takes_views` a large message may come as a view of shared memory."""

    call: Callable[[bytes | memoryview, Context], Awaitable[bytes | LargeReply | Refusal]]
    takes_views: bool = False


@dataclass(frozen=True, slots=True)
class Streaming:
    """A method of any number of messages each way."""

    call: Callable[[AsyncIterator[bytes], Write, Context], Awaitable[Refusal | None]]


Methods = dict[str, Unary | Streaming]
"""By path: `/service/method`."""


def metadata_of(context: Context) -> list[tuple[str, str | bytes]]:
    return list(context.invocation_metadata() or ())


def headers_of(context: Context) -> list[tuple[bytes, bytes]]:
    return raw_headers(metadata_of(context))


def raw_headers(metadata: Sequence[tuple[str, str | bytes]]) -> list[tuple[bytes, bytes]]:
    """Metadata as the headers it came in."""
    return [
        (name.encode("latin-1", "replace"), value if isinstance(value, bytes) else value.encode())
        for name, value in metadata
    ]
