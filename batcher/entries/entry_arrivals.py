"""From queue entries to what the scheduler is shown: each readable request with its times on the monotonic clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from batcher.scheduling.observations import RequestQueued
from charonia.clock import monotonic_ns, wall_ns
from charonia.eventlog.port import Entry
from charonia.wire import RequestRecord, Wave

from .carriers import Carried, CarrierEntry, Deletions, work_of
from .windows import Windows


def arrivals(
    stream: bytes,
    entries: Sequence[Entry],
    attempts: Mapping[bytes, int] | None,
    windows: Windows,
    deletions: Deletions,
    called: dict[bytes, RequestQueued],
) -> list[RequestQueued]:
    """The requests of these entries, in order; the entries count in the stream's window.

    `attempts`, of entries written before this owner, holds the attempt of each request and -1 for settled ones; these
    are left out. An entry that carries nothing any more is deleted. Requests that models made go into `called` as well.
    """
    now = monotonic_ns()
    offset = now - wall_ns()
    lane = windows.lane(stream)
    queued: list[RequestQueued] = []
    for entry in entries:
        work = work_of(entry)
        if len(work) == 1 and type(work[0]) is Wave:
            carrier = CarrierEntry(stream, entry.id, work[0].count)
            windows.took(carrier)
            queued.append(_wave(work[0], carrier, lane, now, offset))
            continue
        records = [record for record in work if isinstance(record, RequestRecord)]
        if attempts is not None:
            records = [record for record in records if attempts.get(record.id, -1) >= 0]
        if not records:
            deletions.add(stream, entry.id)
            continue
        carrier = CarrierEntry(stream, entry.id, len(records))
        windows.took(carrier)
        for record in records:
            enqueued_ns = record.accepted_ns + offset
            begun = attempts[record.id] if attempts is not None else 0
            queued.append(
                RequestQueued(
                    record.id,
                    record.meta.version,
                    record.level,
                    record.rows,
                    record.signature,
                    record.timeout_us,
                    record.deadline_ns + offset if record.deadline_ns else 0,
                    enqueued_ns if enqueued_ns < now else now,
                    begun,
                    Carried(record, carrier, begun, attempts is not None),
                    lane,
                    record.sequence,
                    record.meta,
                )
            )
            if record.lineage is not None and record.lineage.ancestors:
                called[record.id] = queued[-1]
    return queued


def _wave(wave: Wave, carrier: CarrierEntry, lane: int, now_ns: int, offset_ns: int) -> RequestQueued:
    """A wave as one item of the queue. Its signature is not that of its requests: they do not share batches with it."""
    enqueued_ns = wave.accepted_ns + offset_ns
    deadline_ns = min([one for one in wave.deadlines if one], default=0) if wave.deadlines else 0
    return RequestQueued(
        wave.id,
        wave.meta.version,
        wave.level,
        wave.rows * wave.count,
        wave.signature ^ 1,
        wave.timeout_us,
        deadline_ns + offset_ns if deadline_ns else 0,
        enqueued_ns if enqueued_ns < now_ns else now_ns,
        0,
        Carried(cast(RequestRecord, wave), carrier, 0),
        lane,
        None,
        wave.meta,
        wave.count,
        True,
    )
