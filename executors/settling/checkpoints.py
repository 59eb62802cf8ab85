"""Writes the states of sequences before they leave this executor, and reads those that come (S39).

While all is well a state may be written only now and then (`charonia.checkpoint_every`), but what ends in order loses
none. Before others are told that a version goes, or some of its instances, what is not in the log yet is written there;
from then on every step is, and so is what was on its way to those that left. When another executor has a newer
incarnation of a version, sequences go there at once, and wait a little for what is written here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from charonia.errors import CharoniaError
from charonia.eventlog.port import EventLog
from charonia.wire import BatchHeader
from executors.announcing import insist
from executors.batches.sequences import Sequences
from executors.running.loaded_version import LoadedVersion

_log = logging.getLogger(__name__)

_MAX_STATES = 1000
_MAX_WRITE_BYTES = 1 << 20
_TIMEOUT_S = 5.0
_PAUSES_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)


class Checkpoints:
    """`settled` waits for the settlements there are when it is called."""

    def __init__(self, log: EventLog, settled: Callable[[], Awaitable[None]]) -> None:
        self._log = log
        self._settled = settled

    async def write(self, loaded: LoadedVersion) -> None:
        """Write what the log does not know of a version's sequences. Problems are logged: who leaves leaves anyhow."""
        sequences = loaded.pool.sequences
        if sequences is None or not sequences.checkpoints:
            return
        sequences.leaving += 1
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._write(loaded.model, sequences)
                if sequences.unwritten():
                    # the log does not have the last steps of these yet
                    await self._settled()
                    await self._write(loaded.model, sequences)
        except Exception as error:
            foreseen = isinstance(error, CharoniaError | TimeoutError)
            left, why = len(sequences.unwritten()), str(error) or type(error).__name__
            message = "the states of %d sequences of '%s' were not written: %s"
            _log.error(message, left, loaded.model, why, exc_info=None if foreseen else error)

    async def _write(self, model: str, sequences: Sequences) -> None:
        names = sequences.unwritten()
        while names:
            states: dict[bytes, tuple[bytes, bytes]] = {}
            size_bytes = 0
            while names and len(states) < _MAX_STATES and size_bytes < _MAX_WRITE_BYTES:
                key = names.pop()
                if (newest := sequences.newest(key)) is not None:
                    states[key] = newest
                    size_bytes += len(newest[1])
            written = await self._log.keep_states(model, states)
            for (key, (about, _)), is_written in zip(states.items(), written, strict=True):
                if is_written:
                    sequences.mark_written(key, about)


async def restore(log: EventLog, loaded: LoadedVersion, names: Sequence[bytes]) -> None:
    """Read the states of sequences that this executor takes over; returns when the log has answered.

    Who had them may be about to write them: it hears of a newer incarnation when their owner does.
    """
    sequences = loaded.pool.sequences
    assert sequences is not None
    left, behind = names, dict[bytes, bytes]()

    async def read() -> None:
        nonlocal behind
        behind = sequences.restore(left, await log.sequence_states(loaded.model, left))

    for pause_s in (0.0, *_PAUSES_S):
        await asyncio.sleep(pause_s)
        await insist(read, f"states of sequences of '{loaded.model}' cannot be read")
        left = [*behind]
        if not left:
            return
    sequences.stop_waiting(behind)


def is_late(loaded: LoadedVersion, header: BatchHeader) -> bool:
    """Whether a batch was sent to an instance that has left, or to another incarnation: its sequences may have lost
    their places here by now.
    """
    sequences = header.sequences
    has_left = sequences is not None and sequences.instance >= loaded.pool.slots
    return has_left or header.content_hash != loaded.content_hash


def end_leaving(loaded: LoadedVersion) -> None:
    """What `write` was called for has gone, and others are still here: theirs are written as seldom as before."""
    sequences = loaded.pool.sequences
    if sequences is not None and sequences.leaving:
        sequences.leaving -= 1
