"""What keys hold of accepted work, as arguments of commands and scripts and back: unsettled requests in groups
(`u:{m}`), statistics (`s:{m}`), jobs (`job:{m}:<id>`), and the call that settles requests and adds to the statistics.
Pure: of the other modules it imports `scripts`, and from `server.transport` how a command is packed.

A group are ids that differ in the last byte alone: the requests of one log entry have such, so that a whole entry is
one field of the hash and is counted, settled and deleted as one. What a group's value looks like is said in
charonia/eventlog/scripts/group_values.lua.

What one execution of a batch adds to statistics is always the same names: it goes as one packed field, `run:<rows>`,
which costs the server a tenth of what seventeen fields do. Anything else goes name by name (fold_statistics.lua).

The record of a job has short names and values because a server may hold a million queued jobs: a hash whose values
have at most 64 bytes is one piece of memory. So what a caller knows about its job is cut into several fields, the event
`accepted` is not kept (all of it is in the others), and defaults are left out.

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

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgpack

from charonia import keys
from charonia.errors import InternalError
from charonia.eventlog.redis import scripts
from charonia.eventlog.redis.scripts import Script
from charonia.eventlog.redis.server.transport import UNCOPIED_BYTES, Argument, pack, pack_pieces
from charonia.facts import counters
from charonia.facts.jobs import JobEnd, JobEvent, JobRecord, JobState, NewJob
from charonia.facts.journal import NOT_JOURNALLED, Ran, pack_ended
from charonia.facts.sequence_states import SequenceStep
from charonia.tensors import Buffer

_LOST, _WON = b"01"

_attempt = itemgetter(1)

Requests = Sequence[tuple[bytes, int]]
"""Id and attempt of each, in the order of their groups."""


def settle_call(
    model: str,
    requests: Requests,
    groups: Groups,
    statistics: tuple[bytes, Mapping[str, int]] | None,
    journal: tuple[bytes, Ran | None],
    rows: Sequence[int] = (),
    ends: Mapping[bytes, JobEnd] | None = None,
    sequences: Mapping[bytes, SequenceStep] | None = None,
) -> tuple[Script, Sequence[Buffer]]:
    """The script and its packed call: settle.lua, or settle_recorded.lua where jobs or sequences are in it, or some
    requests are journalled and others not. What is sent along and what the answer means is `work`'s.

    `journal` is the outcomes, as the port has them, and where the requests ran; `rows` are the port's.
    """
    fact, told_of = _ended_fact(requests, *journal) if journal[0] else (b"", b"")
    names = [keys.unsettled(model), keys.counters(model)]
    sums: Argument = 0
    amounts: list[Argument] = []
    if statistics is not None:
        names.append(statistics[0])
        sums, amounts = amounts_of(statistics[1])
    elif ends or sequences or fact:
        names.append(names[0])
    attempts = _joined(list(map(_attempt, requests)))
    weights = _joined(rows) if rows else b""
    if not (ends or sequences or told_of):
        script = scripts.SETTLE
        if fact:
            names.append(keys.journal(model))
        plain = (b"EVALSHA", script.digest, len(names), *names, len(groups.names), attempts, sums, fact, weights)
        return script, (pack((*plain, *groups.names, *groups.lasts, *amounts)),)
    script = scripts.SETTLE_RECORDED
    counts, more, large = _recorded(model, requests, names, ends or {}, sequences or {})
    command: list[Argument] = [b"EVALSHA", script.digest, len(names), *names, len(groups.names), attempts, sums]
    command += (counts[0], fact, told_of, counts[1], weights, *groups.names, *groups.lasts, *more, *amounts)
    return script, pack_pieces(command) if large else (pack(command),)


def _recorded(
    model: str,
    requests: Requests,
    names: list[bytes],
    ends: Mapping[bytes, JobEnd],
    sequences: Mapping[bytes, SequenceStep],
) -> tuple[tuple[int, int], list[Argument], bool]:
    """What settle_recorded.lua needs beyond settle.lua: adds to `names`; how many jobs and sequences, their arguments.

    The third is whether results and states are large.
    """
    names += (keys.journal(model), keys.active_jobs(model), keys.ended_jobs(model), keys.webhooks(model))
    names += (keys.live_sequences(model), keys.sequence_states(model))
    more: list[Argument] = []
    size_bytes = 0
    if ends:
        for number, (request_id, _) in enumerate(requests, 1):
            end = ends.get(request_id)
            if end is not None:
                names.append(keys.job(model, request_id))
                more += (number, request_id, STATE_CODES[end.state], told(end.state.value, end.detail), end.result)
                size_bytes += len(end.result)
    ended = len(more) // 5
    if sequences:
        for number, (request_id, _) in enumerate(requests, 1):
            step = sequences.get(request_id)
            if step is not None:
                state = b"" if step.state is None else step.state
                more += (number, step.key, step.about, b"" if step.state is None else b"1", state)
                size_bytes += len(state)
    return (ended, len(more) // 5 - ended), more, size_bytes >= UNCOPIED_BYTES


def _ended_fact(requests: Requests, outcomes: bytes, ran: Ran | None) -> tuple[bytes, bytes]:
    """The fact about those that have an outcome, and which they are: b"" when all have, or none."""
    mask = b""
    if NOT_JOURNALLED in outcomes:
        requests = [one for one, outcome in zip(requests, outcomes, strict=True) if outcome != NOT_JOURNALLED]
        if not requests:
            return b"", b""
        mask = bytes([_LOST if outcome == NOT_JOURNALLED else _WON for outcome in outcomes])
        outcomes = outcomes.replace(b"-", b"")
    return pack_ended([one[0] for one in requests], [one[1] for one in requests], outcomes, ran), mask


def _joined(numbers: Sequence[int]) -> bytes:
    """One number when all are equal, else each after a comma."""
    if not numbers or numbers.count(numbers[0]) == len(numbers):
        return b"%d" % numbers[0] if numbers else b"0"
    return b",".join([b"%d" % number for number in numbers])


_SETTLED = ord(".")
_FRESH = 128
_SEQUENCE = bytes(range(256))


@dataclass(slots=True)
class Groups:
    """Ids by group: `names[i]` begins all ids whose last bytes are `lasts[i]`.

    `order` is None when the ids follow one another as given, else the place each had before.
    """

    names: list[bytes]
    lasts: list[bytes]
    order: list[int] | None = None


def grouped(ids: Sequence[bytes]) -> Groups:
    """Ids by group, each group named once."""
    prefixes = [one[:-1] for one in ids]
    tails = bytes([one[-1] for one in ids])
    if ids and prefixes.count(prefixes[0]) == len(prefixes):  # most entries and batches
        return Groups(prefixes[:1], [tails])
    names: list[bytes] = []
    lasts: list[bytes] = []
    at = 0
    for name, members in groupby(prefixes):
        count = len(list(members))
        names.append(name)
        lasts.append(tails[at : at + count])
        at += count
    if len(names) > 1 and len(set(names)) < len(names):
        order = sorted(range(len(ids)), key=lambda place: ids[place][:-1])
        together = grouped([ids[place] for place in order])
        return Groups(together.names, together.lasts, order)
    return Groups(names, lasts)


def value_of(lasts: bytes, sizes: Sequence[int], tenant: bytes) -> bytes:
    """The value of a group whose requests were accepted just now; `tenant` is as `charonia.keys.tenant` quotes it."""
    count = len(sizes)
    text = b"%d" % sum(sizes)
    if count > 1 and sizes.count(sizes[0]) != count:
        text = b"%b,%b" % (text, b",".join([b"%d" % size for size in sizes]))
    if tenant:
        text = b"%b:%b" % (text, tenant)
    marks = b"\x80" * count
    if lasts == _SEQUENCE[:count]:
        return b"%b:%b" % (marks, text)
    return b"%b;%b%b" % (marks, lasts, text)


def attempt_in(value: bytes | None, last: int) -> int:
    """The attempt that the request with this last byte is at, -1 when it is not unsettled."""
    if value is None:
        return -1
    count = 0
    while value[count] >= _FRESH or value[count] == _SETTLED:
        count += 1
    place = last if value[count : count + 1] == b":" else value.find(last, count + 1, 2 * count + 1) - count - 1
    if not 0 <= place < count or value[place] == _SETTLED:
        return -1
    return value[place] - _FRESH


def lasts_in(value: bytes) -> bytes:
    """The last bytes of the requests of a group that are unsettled."""
    count = 0
    while value[count] >= _FRESH or value[count] == _SETTLED:
        count += 1
    lasts = _SEQUENCE[:count] if value[count : count + 1] == b":" else value[count + 1 : 2 * count + 1]
    return bytes([last for mark, last in zip(value[:count], lasts, strict=True) if mark != _SETTLED])


_FIELD = b"run:"
_RUN_NAMES = len(counters.of_execution(1))
_PACKED = struct.Struct(f"<{_RUN_NAMES}d")
_HIGHEST = 2**52
"""Sums up to here are exact in a packed field; the script moves what would pass it to fields of their own."""
_MOST_PLANS = 1000

_plans: dict[tuple[str, ...], bytes] = {}


def amounts_of(increments: Mapping[str, int]) -> tuple[Argument, list[Argument]]:
    """Increments as arguments of scripts: "run", its field and value; or how many are sums, all names, all values."""
    names = tuple(increments)
    # others than those of one execution are not kept: usage has new ones every second
    field = _plans.get(names) if len(names) == _RUN_NAMES else b""
    if field is None:
        if len(_plans) >= _MOST_PLANS:  # hostile variety
            _plans.clear()
        field = _plans[names] = _field_of(names)
    if field:
        values = increments.values()
        if min(values) >= 0 and max(values) <= _HIGHEST:
            return b"run", [field, _PACKED.pack(*values)]
    sums = [name for name, value in increments.items() if value and not name.startswith("last_")]
    added = sums + [name for name in increments if name.startswith("last_")]
    return len(sums), [*added, *[increments[name] for name in added]]


def statistics_of(raw: Sequence[bytes]) -> dict[str, int]:
    """The hash's fields, names and values alternating, with those of runs added to their names."""
    totals: dict[str, int] = {}
    for field, value in zip(raw[::2], raw[1::2], strict=True):
        if field.startswith(_FIELD):
            rows = int(field[len(_FIELD) :])
            added = dict(zip(counters.of_execution(rows), map(int, _PACKED.unpack(value)), strict=True))
        else:
            added = {field.decode(): int(value)}
        counters.add(totals, added)
    return totals


def _field_of(names: tuple[str, ...]) -> bytes:
    """The field of a run with these names (`_RUN_NAMES`), b"" when they are not those of one."""
    rows = names[len(counters.OF_REQUESTS)].removeprefix("b").removesuffix("_count")
    of_one = rows.isdecimal() and rows.isascii() and names == counters.of_execution(int(rows))
    return _FIELD + rows.encode() if of_one else b""


# -- jobs --------------------------------------------------------------------------------------------------------------


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
