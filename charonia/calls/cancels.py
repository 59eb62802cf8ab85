"""Cancels requests that no caller wants: notifies the owner of their model, and repeats that until they are settled.

Once is not enough. A batcher that was presumed dead may read a cancel after another one took the model over, and keep
it from the new owner. A new owner does not know the cancels of waves that ran under the former one: it bursts them, and
their requests run again. And the log may refuse the fact. So the part that sent a request repeats its cancel.

The next owner of an ensemble does not know which cancels of steps were repeated. So the owner of a decoupled step's
model cancels it once its ensemble's request has ended (`batcher.housekeeping.left_steps`). A step with one answer runs
to its end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from msgspec import Struct

from charonia import keys
from charonia.errors import CharoniaError
from charonia.eventlog.port import QueueLog
from charonia.facts.events import FIELD_FACT, RequestCancelled, pack_fact
from charonia.tensors import Buffer

from .entry_packer import Spawn

_MOST = 16_384
"""Cancelled requests without a known outcome; the oldest are not repeated any more."""
_MAX_IDS = 1000
_FIRST_PAUSE = 2
"""Checks before the first repetition, so that the log has both a request that was on its way and the outcome that the
owner wrote at once."""
_LONGEST_PAUSE = 64
"""A model may run on for hours after its request was cancelled."""


class _Cancel(Struct, gc=False):
    """`left` checks until it is repeated; the pause after that is twice the last one."""

    model: str
    gentle: bool
    pause: int = _FIRST_PAUSE
    left: int = _FIRST_PAUSE


class Cancels:
    """The cancels of one endpoint. `repeat` is called about once a second. `spawn` runs writes as tasks."""

    def __init__(self, log: QueueLog, spawn: Spawn, most: int = _MOST) -> None:
        self._log = log
        self._spawn = spawn
        self._most = most
        self._open: dict[bytes, _Cancel] = {}
        self._last: dict[str, bytes] = {}
        """By model the last entry with repetitions."""

    def __len__(self) -> int:
        return len(self._open)

    def send(self, model: str, request_id: bytes, *, gentle: bool = False) -> None:
        """Notify the owner, and repeat that. `gentle`: the caller reads on (P13)."""
        self._spawn(self._tell(model, request_id, gentle))
        self.keep(model, request_id, gentle=gentle)

    def keep(self, model: str, request_id: bytes, *, gentle: bool = False) -> None:
        """Repeat the cancel of a request that the owner has been notified of."""
        known = self._open.get(request_id)
        if known is None or (known.gentle and not gentle):
            self._open[request_id] = _Cancel(model, gentle)
            if len(self._open) > self._most:
                del self._open[next(iter(self._open))]

    def drop(self, request_id: bytes) -> None:
        """A request is wanted after all."""
        self._open.pop(request_id, None)

    def forget(self) -> None:
        """The log was replaced: it knows none of these requests."""
        self._open.clear()
        self._last.clear()

    async def repeat(self) -> None:
        """Notify the owners again of those that are unsettled; forget the others."""
        due: dict[str, dict[bytes, _Cancel]] = {}
        for request_id, cancel in self._open.items():
            cancel.left -= 1
            if cancel.left <= 0:
                due.setdefault(cancel.model, {})[request_id] = cancel
        for model, cancels in due.items():
            with contextlib.suppress(CharoniaError):  # a part of the log is away: they are still due at the next check
                await self._look(model, cancels)

    async def _look(self, model: str, cancels: Mapping[bytes, _Cancel]) -> None:
        is_unread = await self._is_unread(model)
        ids = list(cancels)
        for at in range(0, len(ids), _MAX_IDS):
            unsettled = await self._unsettled(model, ids[at : at + _MAX_IDS])
            if is_unread:
                for one in unsettled:
                    cancels[one].left = cancels[one].pause
            elif unsettled:
                await self._repeat(model, {one: cancels[one] for one in unsettled})

    async def _unsettled(self, model: str, ids: list[bytes]) -> list[bytes]:
        """Those of these ids that are unsettled, and not wanted after all; the others are forgotten."""
        unsettled: list[bytes] = []
        for request_id, attempt in zip(ids, await self._log.unsettled(model, ids), strict=True):
            if attempt < 0:
                self._open.pop(request_id, None)
            elif request_id in self._open:
                unsettled.append(request_id)
        return unsettled

    async def _repeat(self, model: str, cancels: Mapping[bytes, _Cancel]) -> None:
        self._last[model] = await self._append(model, [(one, it.gentle) for one, it in cancels.items()])
        for cancel in cancels.values():
            cancel.left = cancel.pause = min(2 * cancel.pause, _LONGEST_PAUSE)

    async def _is_unread(self, model: str) -> bool:
        """Whether the last repetitions wait for an owner: it will read those, and more would only fill the log."""
        last = self._last.get(model)
        if last is None:
            return False
        (is_there,) = await self._log.waves.waiting(keys.facts(model), [last])
        if not is_there:
            self._last.pop(model, None)
        return is_there

    async def _tell(self, model: str, request_id: bytes, gentle: bool) -> None:
        with contextlib.suppress(CharoniaError):  # it is repeated
            await self._append(model, [(request_id, gentle)])

    async def _append(self, model: str, cancelled: Iterable[tuple[bytes, bool]]) -> bytes:
        fields: list[Buffer] = []
        for request_id, gentle in cancelled:
            fields += (FIELD_FACT, pack_fact(RequestCancelled(request_id, gentle)))
        return await self._log.append(keys.facts(model), fields)
