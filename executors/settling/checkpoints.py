"""Writes the states of sequences before they move to another executor, and reads the states of those that arrive (S39).

States may be written only every few steps (`charonia.checkpoint_every`), but an orderly shutdown loses none. Before an
executor announces that a version, or some of its instances, is leaving, it writes the states that the log lacks. From
then on it writes every step, including those of batches already on their way. When another executor loads a newer
version, sequences move there at once, and wait briefly for the states that are written here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from charonia.errors import CharoniaError
from charonia.eventlog import port
from charonia.tasks import insist
from charonia.wire import BatchHeader
from executors.batches.sequences import Sequences
from executors.running.instance_pool import LoadedVersion

_log = logging.getLogger(__name__)

_MAX_STATES = 1000
_MAX_WRITE_BYTES = 1 << 20
_TIMEOUT_S = 5.0
_PAUSES_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)


class Checkpoints:
    """Writes states of sequences. `settled` waits for the settlements that are pending when it is called."""

    def __init__(self, log: port.Sequences, settled: Callable[[], Awaitable[None]]) -> None:
        self._log = log
        self._settled = settled

    async def write(self, loaded: LoadedVersion) -> None:
        """Write the states of a version's sequences that the log lacks. Errors are logged: it leaves anyhow."""
        sequences = loaded.pool.sequences
        if sequences is None or not sequences.checkpoints:
            return
        sequences.leaving += 1
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._write(loaded.model, sequences)
                if sequences.unwritten():
                    # the last steps of these are not settled yet
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


async def restore(log: port.Sequences, loaded: LoadedVersion, names: Sequence[bytes]) -> None:
    """Read the states of sequences that this executor takes over.

    Tries several times: the executor that had them may be about to write them, as it hears of the newer version when
    their owner does.
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
    """Whether a batch was sent to an instance that has left, or to another load of the version.

    Its sequences may then have moved elsewhere.
    """
    sequences = header.sequences
    has_left = sequences is not None and sequences.instance >= loaded.pool.slots
    return has_left or header.content_hash != loaded.content_hash


def end_leaving(loaded: LoadedVersion) -> None:
    """Return to the usual checkpoint interval: the instances for which `write` was called have left, others stay."""
    sequences = loaded.pool.sequences
    if sequences is not None and sequences.leaving:
        sequences.leaving -= 1
