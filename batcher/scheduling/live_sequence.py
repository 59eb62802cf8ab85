"""One sequence as its scheduler knows it: what waits, what runs, where it is bound. State only, no rules."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from charonia.sequences import SequenceAbout, sequence_key

from .observations import QueuedRequest

if TYPE_CHECKING:
    from .sequence_instances import SequenceInstance


class LiveSequence:
    """From its START to its end. Of its requests one runs at a time, the others wait in `queue`, in order.

    `run` is the id of the request that started it, b"" before that was given out; `former` those that the log may
    know instead, because the request that began the present run has not been answered. `closed`: its END has come, so
    that the id is free for another. `predecessor` is the sequence of the same id that has to be over before.
    `binding` is the number of its present place; `wanted` where a new owner found it: executor, instance, slot,
    content hash.
    """

    __slots__ = (
        "again",
        "binding",
        "closed",
        "done",
        "former",
        "instance",
        "key",
        "predecessor",
        "queue",
        "run",
        "running",
        "slot",
        "version",
        "wanted",
    )

    def __init__(self, version: int, key: bytes, predecessor: LiveSequence | None = None) -> None:
        self.version = version
        self.key = key
        self.predecessor = predecessor
        self.queue: deque[QueuedRequest] = deque()
        self.running: QueuedRequest | None = None
        self.again: QueuedRequest | None = None
        """The request at the head of the queue that has had a turn and wants another (S41)."""
        self.run = b""
        self.former: tuple[bytes, ...] = ()
        self.closed = False
        self.done = False
        self.instance: SequenceInstance | None = None
        self.slot = 0
        self.binding = 0
        self.wanted: tuple[str, int, int, str] | None = None

    @staticmethod
    def found(about: SequenceAbout, key: bytes) -> LiveSequence:
        """Of a predecessor's owner."""
        sequence = LiveSequence(about.version, key)
        sequence.run, sequence.binding = about.run, about.binding
        sequence.wanted = (about.executor, about.instance, about.slot, about.content_hash)
        return sequence

    def begin(self, run: bytes) -> None:
        """A START is given out."""
        if run != self.run:
            if self.run:
                self.former = (*self.former, self.run)
            self.run = run

    def unbegin(self) -> None:
        """The request that began the present run ended without having run, as far as is known."""
        last_known = self.former[0] if self.former else b""
        self.former = (*self.former[1:], self.run)
        self.run = last_known

    def waits_for(self) -> LiveSequence | None:
        """The sequence of the same id that has to be over before; those before it that were given up do not count."""
        before = self.predecessor
        while before is not None and before.done:
            before = before.predecessor
        self.predecessor = before
        return before

    @property
    def record_key(self) -> bytes:
        """Its name in the log."""
        return sequence_key(self.version, self.key)

    @property
    def is_ready(self) -> bool:
        """Whether a request of it may be given out."""
        return self.running is None and bool(self.queue) and self.instance is not None

    @property
    def rests(self) -> bool:
        """Whether nothing of it waits or runs."""
        return self.running is None and not self.queue
