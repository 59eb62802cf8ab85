"""Writes the states of sequences before they leave this executor, so that what ends in order loses none (S39).

While all is well a state may be written only now and then (`charonia.checkpoint_every`). Before others are told that a
version goes, or some of its instances, what is not in the log yet is written there; from then on every step is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from charonia.errors import CharoniaError
from charonia.eventlog.port import EventLog

from .loading import Incarnation
from .sequences import Sequences

_log = logging.getLogger(__name__)

_MOST_AT_ONCE_BYTES = 1 << 20
_PATIENCE_S = 5.0


class Checkpoints:
    """`settled` waits for the settlements there are when it is called."""

    def __init__(self, log: EventLog, settled: Callable[[], Awaitable[None]]) -> None:
        self._log = log
        self._settled = settled

    async def write(self, incarnation: Incarnation) -> None:
        """Write what the log does not know of a version's sequences. Problems are logged: who leaves leaves anyhow."""
        sequences = incarnation.pool.sequences
        if sequences is None or not sequences.checkpoints:
            return
        sequences.writes_all = True
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._write(incarnation.model, sequences)
                if sequences.unwritten():
                    # the log does not have the last steps of these yet
                    await self._settled()
                    await self._write(incarnation.model, sequences)
        except (CharoniaError, TimeoutError) as error:
            left = len(sequences.unwritten())
            _log.error("the states of %d sequences of '%s' were not written: %s", left, incarnation.model, error)

    async def _write(self, model: str, sequences: Sequences) -> None:
        names = sequences.unwritten()
        while names:
            states: dict[bytes, tuple[bytes, bytes]] = {}
            size_bytes = 0
            while names and size_bytes < _MOST_AT_ONCE_BYTES:
                key = names.pop()
                if (newest := sequences.newest(key)) is not None:
                    states[key] = newest
                    size_bytes += len(newest[1])
            written = await self._log.keep_states(model, states)
            for (key, (about, _)), is_written in zip(states.items(), written, strict=True):
                if is_written:
                    sequences.wrote(key, about)
