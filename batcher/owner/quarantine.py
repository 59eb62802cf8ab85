"""Runs one batch of possible poison requests at an executor at a time, and keeps a note of it in the log.

`scheduling.poison` decides which requests are suspects, and how they are divided.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgpack

from batcher.scheduling.decisions import DispatchBatch
from batcher.scheduling.observations import BatchLost, RequestQueued
from charonia import keys
from charonia.errors import CharoniaError
from charonia.eventlog.port import Notes

_KEPT_S = 3600


class Quarantine:
    """Runs one quarantined batch per executor at a time, across the models of a batcher.

    So a crash has one batch of suspects. A batch enters before it is sent and leaves when it ends.
    """

    def __init__(self) -> None:
        self.holders: dict[str, str] = {}
        """The batch in quarantine at each executor."""
        self._waiting: dict[str, list[tuple[str, asyncio.Future[None]]]] = {}

    async def enter(self, executor: str, batch_id: str) -> None:
        """Wait for the executor. The batch may have been given up in the meantime: check afterwards."""
        if executor not in self.holders:
            self.holders[executor] = batch_id
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(executor, []).append((batch_id, turn))
        await turn

    def leave(self, batch_id: str) -> None:
        """A batch ended, or will not be sent; a batch that never entered changes nothing."""
        for executor, waiting in list(self._waiting.items()):
            for entry in [entry for entry in waiting if entry[0] == batch_id]:
                waiting.remove(entry)
                if not entry[1].done():
                    entry[1].set_result(None)
            if not waiting:
                del self._waiting[executor]
        for executor in [executor for executor, holder in self.holders.items() if holder == batch_id]:
            del self.holders[executor]
            if executor in self._waiting:
                successor, turn = self._waiting[executor].pop(0)
                if not self._waiting[executor]:
                    del self._waiting[executor]
                self.holders[executor] = successor
                if not turn.done():
                    turn.set_result(None)


class SuspectNote:
    """A co-located batcher's note for its successor: a request that ends the executor ends its batcher, too.

    It says which batches of suspects, and of requests found at takeover, `local_executor` has ("" keeps none). It is
    written before such a batch is handed over, and only then, so it costs nothing while no request is suspected.
    """

    def __init__(self, log: Notes, model: str, local_executor: str) -> None:
        self._log = log
        self._key = keys.suspicions(model)
        self._executor = local_executor
        self.aboard: dict[str, list[Any]] = {}
        """The content of the note by batch id."""

    async def write(self, decision: DispatchBatch) -> None:
        """Note a batch. Raises what the log raises."""
        members = [(request.id, request.losses_apart) for request in decision.requests]
        self.aboard[decision.batch_id] = [decision.executor, decision.suspects, members]
        await self._put()

    async def _put(self) -> None:
        await self._log.put_note(self._key, bytes(msgpack.packb(list(self.aboard.values()))), _KEPT_S)

    async def clear(self, batch_id: str, ids: frozenset[bytes]) -> None:
        """Requests of a batch are not suspected any more: they gave a response that no earlier run gave."""
        if batch_id not in self.aboard:
            return  # it has ended meanwhile
        executor, suspects, members = self.aboard[batch_id]
        left = [member for member in members if member[0] not in ids]
        if len(left) == len(members):
            return
        if left:
            self.aboard[batch_id] = [executor, suspects, left]
        else:
            del self.aboard[batch_id]
        with contextlib.suppress(CharoniaError):
            if self.aboard:
                await self._put()
            else:
                await self._log.delete_keys([self._key])

    async def read(self, queued: dict[bytes, RequestQueued]) -> list[BatchLost]:
        """The batches of a predecessor's note that have unsettled members among `queued`, and its end."""
        (note,) = await self._log.notes([self._key])
        found = []
        for executor, suspects, members in _unpack(note):
            requests = [queued[request_id] for request_id, _ in members if request_id in queued]
            for request_id, losses in members:
                if request_id in queued:
                    queued[request_id].losses_apart = losses
            if requests:
                found.append(BatchLost(executor, requests, len(members), suspects, executor == self._executor))
        return found

    async def erase(self) -> None:
        """No such batch is with the executor any more, or it leaves in order."""
        if not self.aboard:
            with contextlib.suppress(CharoniaError):
                await self._log.delete_keys([self._key])


def _unpack(note: bytes | None) -> list[tuple[str, str, Sequence[tuple[bytes, int]]]]:
    """A note's batches; none for a note of another release."""
    try:
        batches = msgpack.unpackb(note, use_list=False) if note else ()
        return [
            (str(executor), str(suspects), [(bytes(i), int(n)) for i, n in members])
            for executor, suspects, members in batches
        ]
    except Exception:
        return []
