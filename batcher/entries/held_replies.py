"""Replies of finished batches that wait for their order (S6): kept in the fact entries that brought them, then sent.

Such a fact is the only place where the answers of settled requests are, so its entry is deleted when they are sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from charonia import keys
from charonia.errors import CharoniaError
from charonia.eventlog.port import Streams
from charonia.tensors import Buffer
from charonia.wire import record_fields

from .carriers import CarrierEntry, Deletions

_log = logging.getLogger(__name__)

_RETRY_S = 0.2


class HeldReplies:
    """The held replies of one model. `keeps(stream)`: whether its entries are deleted here when they are done."""

    def __init__(
        self,
        log: Streams,
        deletions: Deletions,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        keeps: Callable[[bytes], bool],
    ) -> None:
        self._log = log
        self._deletions = deletions
        self._spawn = spawn
        self._keeps = keeps
        self._held: dict[str, tuple[tuple[tuple[str, bytes], ...], CarrierEntry]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, batch_id: str, replies: tuple[tuple[str, bytes], ...], keeper: CarrierEntry) -> None:
        """Keep (endpoint, response record) pairs until their batch is released; a repetition changes nothing."""
        if replies and batch_id not in self._held:
            self._held[batch_id] = (replies, keeper)
            keeper.remaining += 1

    def release(self, batch_id: str) -> None:
        """Send what is held of a batch."""
        replies, keeper = self._held.pop(batch_id, ((), None))
        if keeper is None:
            return
        by_endpoint: dict[str, list[Buffer]] = {}
        for endpoint, record in replies:
            by_endpoint.setdefault(endpoint, []).append(record)
        by_endpoint.pop("", None)
        keeper.remaining += len(by_endpoint)
        for endpoint, answers in by_endpoint.items():
            self._spawn(self._append(keys.replies(endpoint), record_fields(answers), keeper))
        self.handled(keeper)

    async def _append(self, stream: bytes, fields: list[Buffer], keeper: CarrierEntry) -> None:
        """Send what was held; its requests are settled, so no other owner would."""
        while True:
            try:
                await self._log.append(stream, fields)
                break
            except CharoniaError as error:
                _log.warning("a reply held for its order could not be sent, trying again: %s", error)
            await asyncio.sleep(_RETRY_S)
        self.handled(keeper)

    def handled(self, keeper: CarrierEntry) -> None:
        """One reason less to keep a fact entry; facts that the reader consumes are deleted by it."""
        keeper.remaining -= 1
        if keeper.remaining == 0 and self._keeps(keeper.stream):
            self._deletions.add(keeper.stream, keeper.entry_id)
