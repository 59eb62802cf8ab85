"""What a batcher inside an executor's process leaves to its successor, should a request end both (`isolation`).

The note of a model says which batches of suspects, and of requests found at takeover, the executor has. It is written
before such a batch is handed over and not touched when nothing is suspected, so it costs nothing in ordinary times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgpack

from batcher.entries.carriers import carrier_of
from batcher.scheduling.decisions import DispatchBatch
from batcher.scheduling.observations import BatchLost, RequestQueued
from charonia import keys
from charonia.errors import CharoniaError
from charonia.eventlog import port

_KEPT_S = 3600


class Notes:
    """The note of one model, kept by the owner `local_executor` goes with; "" keeps none."""

    def __init__(self, log: port.Notes, model: str, local_executor: str) -> None:
        self._log = log
        self._key = keys.suspicions(model)
        self._executor = local_executor
        self._aboard: dict[str, list[object]] = {}

    def concern(self, decision: DispatchBatch) -> bool:
        """Whether a batch has to be noted before it is handed over."""
        if decision.executor != self._executor or not self._executor:
            return False
        return bool(decision.suspects) or any(carrier_of(request).restored for request in decision.requests)

    async def write(self, decision: DispatchBatch) -> None:
        """Note a batch. Raises what the log raises."""
        members = [(request.id, request.losses_apart) for request in decision.requests]
        self._aboard[decision.batch_id] = [decision.executor, decision.suspects, members]
        await self._log.put_note(self._key, bytes(msgpack.packb(list(self._aboard.values()))), _KEPT_S)

    def ended(self, batch_id: str) -> bool:
        """A batch ended one way or another; the next note leaves it out. Whether the note is to be erased."""
        return self._aboard.pop(batch_id, None) is not None and not self._aboard

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
        """Nothing of the kind is with the executor any more, or it leaves in peace."""
        if not self._aboard:
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
