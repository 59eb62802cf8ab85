"""One request in the lane and one wave of them, and what the lane asks of the front that requests came through.

`Expiry` ends requests at their deadlines. Most are answered long before theirs, and a timer for each would cost more
than the request's place in a wave: there is one for all, set to the earliest deadline outstanding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from charonia.clock import monotonic_ns, wall_ns

if TYPE_CHECKING:
    from charonia.catalog.served import ServedVersion
    from charonia.errors import CharoniaError
    from charonia.tensors import Buffer
    from charonia.wire import Reference, ResponseRecord, WaveReply
    from gateway.metrics import RequestCounts


class Call:
    """A recognised request. `data` holds the raw bytes of its inputs, in the order of the signature.

    `deadline_ns` is wall clock, 0 for none.
    `wave` is None until it has left its door, `index` its place there; `gone` once its caller has gone.
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

    @property
    def is_open(self) -> bool:
        """Whether its caller still waits for an answer."""
        return not self.gone

    def abandon(self) -> None:
        """Its caller has gone: it is taken out of its door, or cancelled where its wave has not begun."""
        if not self.gone:
            self.gone = True
            self.signature.door.abandoned(self)


class Entrance(Protocol):
    """Where calls wait, and what their waves come back to (`door.Door`)."""

    served: ServedVersion
    counts: RequestCounts
    waiting: list[Call]

    def abandoned(self, call: Call) -> None: ...

    def answered(self, wave: PendingWave, reply: WaveReply) -> None: ...

    def ended(self, count: int) -> None: ...


class Signature(Protocol):
    """What requests that look alike have in common, as one front sees it."""

    counts_itself: bool
    """Whether the lane counts these requests in the gateway's metrics: no one else does."""

    @property
    def door(self) -> Entrance: ...

    def answer(self, calls: list[Call], start: int, reply: WaveReply) -> None:
        """Answer calls that are neighbours in a wave, the first at index `start`; those gone get none."""

    def respond(self, call: Call, record: ResponseRecord) -> None:
        """Answer one call by itself, with an error or with outputs unlike the others'."""

    def fail(self, call: Call, error: CharoniaError) -> None:
        """End a call of which nothing is known but an error of this gateway's."""

    def leave(self, call: Call) -> None:
        """Send a call the full way: nothing of it is in the log."""


class PendingWave:
    """One wave under way. `left` counts the requests without an answer, `gone` those whose callers have gone."""

    __slots__ = (
        "accepted",
        "burst",
        "calls",
        "door",
        "entry_id",
        "gone",
        "left",
        "model",
        "pieces",
        "prefix",
        "references",
        "reply",
        "sent_ns",
        "size_bytes",
        "stream",
        "was_missing",
    )

    def __init__(
        self, prefix: bytes, door: Entrance, calls: list[Call], size_bytes: int, references: Sequence[Reference]
    ) -> None:
        self.prefix = prefix
        self.references = references
        """Where the tensors of its requests lie, unless they are in its record."""
        self.door = door
        self.model = door.served.model
        self.calls = calls
        self.size_bytes = size_bytes
        self.left = len(calls)
        self.gone = 0
        self.sent_ns = monotonic_ns()
        self.accepted = False
        self.entry_id = b""
        self.stream = b""
        self.pieces: list[Buffer] | None = None
        """The record in pieces, where it may have to be taken apart here."""
        self.burst: asyncio.Future[None] | None = None
        self.reply: WaveReply | None = None
        """Its reply, while it is not known to have reached its durability level."""
        self.was_missing = False


def values_of(calls: list[Call], start: int, reply: WaveReply, *, with_ids: bool) -> Iterable[tuple[bytes, ...]]:
    """What is its own of each answer to calls that are neighbours in a wave: its id, if they have one, and outputs."""
    columns = []
    for column, place in zip(reply.columns, reply.outputs, strict=True):
        size = place.size_bytes
        columns.append([column[at * size : (at + 1) * size] for at in range(start, start + len(calls))])
    if with_ids:
        columns.insert(0, [call.client_id for call in calls])
    return zip(*columns, strict=True)


class Expiry:
    """Calls `expire` once for each call whose deadline has passed.

    `outstanding` gives the calls that wait for an answer; one without a deadline has `deadline_ns` 0.
    """

    def __init__(self, outstanding: Callable[[], Iterable[Call]], expire: Callable[[Call], None]) -> None:
        self._outstanding = outstanding
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None
        self._next_ns = 0
        """The deadline that the timer is set to, 0 without one."""

    def watch(self, deadline_ns: int) -> None:
        """A call with this deadline is outstanding from now on."""
        if not self._next_ns or deadline_ns < self._next_ns:
            self._set(deadline_ns)

    def _set(self, deadline_ns: int) -> None:
        self.close()
        self._next_ns = deadline_ns
        delay_s = max(0.0, (deadline_ns - wall_ns()) / 1e9)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._check)

    def _check(self) -> None:
        self._timer, self._next_ns = None, 0
        now_ns, next_ns = wall_ns(), 0
        late: list[Call] = []
        for call in self._outstanding():
            deadline_ns = call.deadline_ns
            if not deadline_ns or call.gone:
                continue
            if deadline_ns <= now_ns:
                late.append(call)
            elif not next_ns or deadline_ns < next_ns:
                next_ns = deadline_ns
        for call in late:
            call.deadline_ns = 0
            self._expire(call)
        if next_ns:
            self.watch(next_ns)

    def close(self) -> None:
        """Stop watching; what is outstanding expires no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._next_ns = None, 0
