"""The fields of `job:{m}:<id>`: how a job's record is written and read. Pure.

Names and values are short because a server may hold a million queued jobs: a hash whose values have at most 64 bytes is
one piece of memory. So what a caller knows about its job is cut into several fields, the event `accepted` is not kept
(all of it is in the others), and defaults are left out.

    s  state: q r s f c x              t  microsecond accepted         u  microsecond ended
    a  attempts                        z  bytes of the request         y  bytes of the result
    k  seconds to keep it              n  tenant                       r  result: the response record
    d  durability, unless memory       i  digest of the idempotency key
    g  one above the last index kept in jr:{m}:<id>, f their bytes; only of models that answer more than once
    l  "<level>:<lane>" it waits at, unless 0:0
    x  microsecond of its deadline, if it has one; then it is the last of the fields written at first
    b, b1, b2, b3  `about` in msgpack  w  whether it has a webhook     v, e<n>  events, see job_events.lua
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from charonia.errors import InternalError
from charonia.eventlog.redis.server.transport import Argument
from charonia.facts.jobs import JobEvent, JobRecord, JobState, NewJob

STATE_CODES: Mapping[JobState, bytes] = {
    JobState.QUEUED: b"q",
    JobState.RUNNING: b"r",
    JobState.SUCCEEDED: b"s",
    JobState.FAILED: b"f",
    JobState.CANCELLED: b"c",
    JobState.EXPIRED: b"x",
}
_STATES = {code: state for state, code in STATE_CODES.items()}
_ABOUT = (b"b", b"b1", b"b2", b"b3")
_SHORT_BYTES = 64
_MEMORY = "memory"
FIRST_LINE = b"0:0"

FIELDS: Sequence[bytes] = (b"s", b"t", b"z", b"k", b"a", b"n", b"d", b"u", b"y", b"v", *_ABOUT)
"""What `record_of` wants."""

UNREADABLE = "the record of this job cannot be read"
_LAST_EVENT = FIELDS.index(b"v")
_MOST_EVENTS = 1_000_000


def fields_of(job: NewJob, durability: str, line: bytes = FIRST_LINE) -> list[Argument]:
    """The fields of a job that is accepted; `line` is its "<level>:<lane>"."""
    fields: list[Argument] = [b"s", b"q", b"t", job.accepted_us, b"z", job.size_bytes, b"k", job.retention_s]
    if job.tenant:
        fields += (b"n", job.tenant)
    if durability != _MEMORY:
        fields += (b"d", durability)
    if job.key:
        fields += (b"i", job.key)
    if job.about:
        about = msgpack.packb(dict(job.about))
        if len(about) > _SHORT_BYTES * len(_ABOUT):
            fields += (_ABOUT[0], about)
        else:
            for at in range(0, len(about), _SHORT_BYTES):
                fields += (_ABOUT[at // _SHORT_BYTES], about[at : at + _SHORT_BYTES])
        if job.about.get("webhook"):
            fields += (b"w", b"1")
    if line != FIRST_LINE:
        fields += (b"l", line)
    if job.deadline_us:
        fields += (b"x", job.deadline_us)
    return fields


def told(kind: str, detail: Mapping[str, Any]) -> bytes:
    """An event's kind and detail, one after the other, as the scripts want them."""
    return bytes(msgpack.packb(kind) + msgpack.packb(dict(detail)))


def record_of(
    model: str, job_id: bytes, values: Sequence[bytes | None], events: Sequence[bytes] | None = None
) -> JobRecord:
    """A job from the values of `FIELDS`; `events` are those from the second on, None for a record without events.

    Raises `InternalError` for what no script has written.
    """
    try:
        return _record_of(model, job_id, values, events)
    except Exception:
        raise InternalError(UNREADABLE) from None


def event_numbers(values: Sequence[bytes | None]) -> range:
    """The numbers of the events that a record with these values has fields for. Raises as `record_of`."""
    try:
        last = int(values[_LAST_EVENT] or 1)
    except ValueError:
        raise InternalError(UNREADABLE) from None
    if last > _MOST_EVENTS:
        raise InternalError(UNREADABLE)
    return range(2, last + 1)


def _record_of(model: str, job_id: bytes, values: Sequence[bytes | None], events: Sequence[bytes] | None) -> JobRecord:
    state, accepted, size, keep, attempts, tenant, durability, ended, result, _, *about = values
    joined = b"".join([part for part in about if part])
    accepted_us = int(accepted or 0)
    read: list[JobEvent] = []
    if events is not None:
        read.append(JobEvent(1, "accepted", accepted_us))
        for number, event in enumerate(events, 2):
            time_us, kind, detail = msgpack.unpackb(event)
            read.append(JobEvent(number, kind, time_us, detail))
    return JobRecord(
        model=model,
        id=job_id,
        state=_STATES[state or b"q"],
        tenant=(tenant or b"").decode(),
        attempts=int(attempts or 0),
        size_bytes=int(size or 0),
        result_size_bytes=int(result or 0),
        accepted_us=accepted_us,
        ended_us=int(ended or 0),
        retention_s=int(keep or 0),
        durability=(durability or b"").decode() or _MEMORY,
        about=_mapping(msgpack.unpackb(joined)) if joined else {},
        events=tuple(read),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(type(value))
    return value
