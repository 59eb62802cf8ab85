"""The header of a batch: one dispatch decision as an executor receives it. The request records follow as they are."""

from __future__ import annotations

import msgpack
from msgspec import Struct

from charonia.errors import InvalidRecord
from charonia.tensors import Buffer

from .records import WIRE_VERSION
from .sequence_fields import BatchPlaces


class BatchHeader(Struct, frozen=True):
    """One dispatch decision for an executor. The request records follow in the same entry, in order.

    `attempts[i]` belongs to the i-th record. `report_to` is the stream for `BatchFinished`, empty if the owner is in
    the executor's process (`charonia.eventlog.local_link`). With `via_owner` the executor sends the response records
    in that fact instead of to the endpoints (preserve_ordering, S6). `sequences` is set only for models with a
    sequence batcher.
    """

    batch_id: str
    model: str
    version: int
    content_hash: str
    token: int
    attempts: tuple[int, ...]
    report_to: bytes
    via_owner: bool = False
    sequences: BatchPlaces | None = None
    waves: tuple[tuple[bytes, bytes], ...] = ()
    """For a batch of waves: stream and id of each entry, whose deletion settles the wave."""

    def pack(self) -> bytes:
        fields: list[object] = [
            WIRE_VERSION,
            self.batch_id,
            self.model,
            self.version,
            self.content_hash,
            self.token,
            self.attempts,
            self.report_to,
            self.via_owner,
        ]
        if self.sequences is not None or self.waves:
            fields.append(self.sequences.packed() if self.sequences is not None else None)
        if self.waves:
            fields.append(self.waves)
        return bytes(msgpack.packb(fields))

    @staticmethod
    def unpack(data: Buffer | BatchHeader) -> BatchHeader:
        """A header that was passed within the process is returned as it is. Raises `InvalidRecord`."""
        if isinstance(data, BatchHeader):
            return data
        try:
            version, batch_id, model, model_version, content_hash, token, attempts, report_to, via_owner, *more = (
                msgpack.unpackb(data, use_list=False)
            )
        except Exception as error:
            raise InvalidRecord(f"batch header cannot be read: {error}") from None
        if version != WIRE_VERSION:
            raise InvalidRecord(f"batch header of version {version!r}, expected {WIRE_VERSION}")
        if not (
            type(batch_id) is type(model) is type(content_hash) is str
            and type(model_version) is type(token) is int
            and type(attempts) is tuple
            and all(type(attempt) is int for attempt in attempts)
            and type(report_to) is bytes
            and type(via_owner) is bool
        ):
            raise InvalidRecord("batch header has a field of another type")
        sequences = BatchPlaces.of(more[0]) if more and more[0] is not None else None
        if sequences is not None and len(sequences.places) != len(attempts):
            raise InvalidRecord(f"{len(sequences.places)} places for {len(attempts)} requests")
        waves = more[1] if len(more) > 1 else ()
        if type(waves) is not tuple or not all(_is_entry(wave) for wave in waves):
            raise InvalidRecord("the waves of a batch header are not pairs of a stream and an entry")
        return BatchHeader(
            batch_id, model, model_version, content_hash, token, attempts, report_to, via_owner, sequences, waves
        )


def _is_entry(wave: object) -> bool:
    return type(wave) is tuple and len(wave) == 2 and all(type(part) is bytes for part in wave)
