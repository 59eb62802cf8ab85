"""Large payloads by the process that lends them, so that those of a lost process are deleted at once, not after a day.

The log has a process's names before there are blobs with these names; they are drawn by the dozen, so that a payload
costs no further command. The payloads of a lost process may be deleted: its requests are dropped before they run. A
process that was presumed dead and is not lends under new names once it has joined again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Container

from charonia import keys
from charonia.clock import wall_ns
from charonia.eventlog.payloads import new_blob
from charonia.eventlog.port import EventLog, Notes

_DRAWN = 48
_FAR_US = 2**53
_PAGE = 500


class LentBlobs:
    """The names one process lends blobs under."""

    def __init__(self, log: Notes, lender: str) -> None:
        self._log = log
        self._lender = lender
        self._drawn: dict[bool, deque[str]] = {False: deque(), True: deque()}
        self._ended: list[bytes] = []
        self._drawing = asyncio.Lock()
        self._known = False

    async def next(self, *, durable: bool) -> str:
        """A name that the log knows to be this process's. Raises `LogUnavailable`."""
        drawn = self._drawn[durable]
        while not drawn:
            async with self._drawing:
                if not drawn:
                    await self._draw(durable)
        return drawn.popleft()

    async def _draw(self, durable: bool) -> None:
        names = [new_blob(0, durable=durable).name for _ in range(_DRAWN)]
        now_us = wall_ns() // 1000
        if not self._known:
            await self._log.set_times(keys.LENDERS, {self._lender.encode(): now_us})
            self._known = True
        await self._log.set_times(keys.lent(self._lender), {name.encode(): now_us for name in names})
        ended, self._ended = self._ended, []
        await self._log.drop_times(keys.lent(self._lender), ended)
        self._drawn[durable].extend(names)

    def ended(self, name: str) -> None:
        """There is no blob of this name any more."""
        self._ended.append(name.encode())

    def begin_anew(self) -> None:
        """Others may presume this process dead and sweep its payloads, or the log is another one."""
        for drawn in self._drawn.values():
            drawn.clear()
        self._known = False


async def sweep_lent(log: EventLog, present: Container[str]) -> int:
    """Delete the blobs of lenders that have left or were lost; how many names. `present` are those that have not.

    Raises what the log raises.
    """
    swept = 0
    lenders = [name.decode() for name in await log.due(keys.LENDERS, _FAR_US, _PAGE)]
    for lender in [lender for lender in lenders if lender not in present]:
        role = lender.partition("-")[0]
        while not (await log.alive(role, [lender]))[0]:
            names = await log.due(keys.lent(lender), _FAR_US, _PAGE)
            # names of one that has come back were drawn after its beat: it is seen here then
            if (await log.alive(role, [lender]))[0]:
                break
            if not names:
                await log.drop_times(keys.LENDERS, [lender.encode()])
                break
            await log.delete_keys([keys.blob(name.decode()) for name in names])
            await log.drop_times(keys.lent(lender), names)
            swept += len(names)
    return swept
