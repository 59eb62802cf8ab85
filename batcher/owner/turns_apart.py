"""One suspect at a time runs apart at an executor, whichever model it is of: else two of two models could be taken for
each other's culprit. Holds for the models of one batcher.
"""

from __future__ import annotations

import asyncio


class TurnsApart:
    """Turns by executor. Taken by a batch before it is sent, given back when it ends."""

    def __init__(self) -> None:
        self._holders: dict[str, str] = {}
        self._waiting: dict[str, list[tuple[str, asyncio.Future[None]]]] = {}

    async def take(self, executor: str, batch_id: str) -> None:
        """Wait for the executor's turn. When this returns the batch may have been given up meanwhile: ask."""
        if executor not in self._holders:
            self._holders[executor] = batch_id
            return
        turn = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(executor, [])
        waiting.append((batch_id, turn))
        await turn

    def give(self, batch_id: str) -> None:
        """A batch ended, or is not to be sent any more; batches without a turn change nothing."""
        if not self._holders and not self._waiting:
            return
        for executor, waiting in list(self._waiting.items()):
            for entry in [entry for entry in waiting if entry[0] == batch_id]:
                waiting.remove(entry)
                if not entry[1].done():
                    entry[1].set_result(None)
            if not waiting:
                del self._waiting[executor]
        for executor in [executor for executor, holder in self._holders.items() if holder == batch_id]:
            del self._holders[executor]
            if executor in self._waiting:
                successor, turn = self._waiting[executor].pop(0)
                if not self._waiting[executor]:
                    del self._waiting[executor]
                self._holders[executor] = successor
                if not turn.done():
                    turn.set_result(None)
