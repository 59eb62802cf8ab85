"""The stream of facts that executors and gateways write for the owner of a model.

Where answers have an order (S6), a fact may hold the replies of a batch: it is the only place where the answers of
settled requests are. So its entry is deleted when they are sent, and not when it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from charonia import keys
from charonia.calls.reporting import replies_of
from charonia.eventlog.port import START, Reply, StreamReader, Streams
from charonia.tasks import insist

from .carriers import RETRY_S, CarrierEntry, Deletions


class FactStream:
    """The facts of one model, and by batch id the replies they hold. `after` is the last entry that was read."""

    def __init__(
        self,
        log: Streams,
        reader: StreamReader,
        model: str,
        deletions: Deletions,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._log = log
        self._reader = reader
        self._deletions = deletions
        self._spawn = spawn
        self.stream = keys.facts(model)
        self.after = START
        self._keeps: bool | None = None
        """Whether entries are deleted here; None before they are read."""
        self.held: dict[str, tuple[tuple[tuple[str, bytes], ...], CarrierEntry]] = {}

    def follow(self, keep: bool) -> None:
        """Read on. `keep`: an entry is deleted from the log only when the replies it may hold are sent."""
        if self._keeps is None or (keep and not self._keeps):
            self._reader.remove(self.stream)
            self._reader.add(self.stream, self.after, consume=not keep)
            self._keeps = keep

    def hold(self, batch_id: str, replies: tuple[tuple[str, bytes], ...], keeper: CarrierEntry) -> None:
        """Keep (endpoint, response record) pairs until their batch is released; a repetition changes nothing."""
        if replies and batch_id not in self.held:
            self.held[batch_id] = (replies, keeper)
            keeper.remaining += 1

    def release(self, batch_id: str) -> None:
        """Send what is held of a batch."""
        replies, keeper = self.held.pop(batch_id, ((), None))
        if keeper is None:
            return
        found = replies_of(replies)
        keeper.remaining += len(found)
        for reply in found:
            self._spawn(self._send(reply, keeper))
        self.handled(keeper)

    async def _send(self, reply: Reply, keeper: CarrierEntry) -> None:
        """Send what was held; its requests are settled, so no other owner would."""
        append = partial(self._log.append, reply.stream, reply.fields)
        await insist(append, "a reply held for its order could not be sent", first_s=RETRY_S, last_s=RETRY_S)
        self.handled(keeper)

    def handled(self, keeper: CarrierEntry) -> None:
        """One reason less to keep an entry; those that the reader consumes are deleted by it."""
        keeper.remaining -= 1
        if keeper.remaining == 0 and self._keeps and keeper.stream == self.stream:
            self._deletions.add(keeper.stream, keeper.entry_id)
