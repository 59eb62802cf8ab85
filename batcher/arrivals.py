"""From queue entries to what the scheduler is shown: each readable request with its times on the monotonic clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from charonia.clock import monotonic_ns, wall_ns
from charonia.eventlog.port import Entry

from .carriers import Carried, CarrierEntry, Deletions, requests_of
from .scheduling.observations import RequestQueued
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
        records = requests_of(entry)
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
