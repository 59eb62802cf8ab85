"""One request in the lane, and what the lane asks of the front that it came through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from charonia.errors import CharoniaError
    from charonia.tensors import Buffer
    from charonia.wire import ResponseRecord, WaveReply

    from .door import Door
    from .waves import PendingWave


class Call:
    """A recognised request. `data` holds the raw bytes of its inputs, in the order of the signature.

    `deadline_ns` is wall clock, 0 for none.
    `wave` is None until it has left its door, `index` its place there; `gone` once nobody waits for the answer.
    """

    __slots__ = ("client_id", "data", "deadline_ns", "gone", "index", "signature", "wave")

    def __init__(self, signature: Signature, data: tuple[Buffer, ...], client_id: bytes = b"") -> None:
        self.signature = signature
        self.data = data
        self.client_id = client_id
        self.gone = False
        self.deadline_ns = 0
        self.index = 0
        self.wave: PendingWave | None = None

    def abandon(self) -> None:
        """Its caller has gone: it is taken out of its door, or cancelled where its wave has not begun."""
        if not self.gone:
            self.gone = True
            self.signature.door.abandoned(self)


class Signature(Protocol):
    """What requests that look alike have in common, as one front sees it."""

    door: Door
    counts_itself: bool
    """Whether the lane counts these requests in the gateway's metrics: no one else does."""

    def answer(self, calls: list[Call], start: int, reply: WaveReply) -> None:
        """Answer calls that are neighbours in a wave, the first at index `start`; those gone get none."""

    def respond(self, call: Call, record: ResponseRecord) -> None:
        """Answer one call by itself, with an error or with outputs unlike the others'."""

    def fail(self, call: Call, error: CharoniaError) -> None:
        """End a call of which nothing is known but an error of this gateway's."""

    def leave(self, call: Call) -> None:
        """Send a call the full way: nothing of it is in the log."""


def values_of(calls: list[Call], start: int, reply: WaveReply, *, with_ids: bool) -> Iterable[tuple[bytes, ...]]:
    """What is its own of each answer to calls that are neighbours in a wave: its id, if they have one, and outputs."""
    columns = []
    for column, place in zip(reply.columns, reply.outputs, strict=True):
        size = place.size_bytes
        first = start * size
        columns.append([column[at : at + size] for at in range(first, first + len(calls) * size, size)])
    if with_ids:
        columns.insert(0, [call.client_id for call in calls])
    return zip(*columns, strict=True)
