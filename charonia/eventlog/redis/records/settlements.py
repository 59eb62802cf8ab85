"""A settlement as the call of a script: settle.lua, or settle_recorded.lua where jobs or sequences are in it, or some
requests are journalled and others not. Pure; what is sent along and what the answer means is `work`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

from charonia import keys
from charonia.eventlog.redis import scripts
from charonia.eventlog.redis.scripts import Script
from charonia.eventlog.redis.server.packing import LARGE_BYTES, Argument, pack, pack_pieces
from charonia.facts.jobs import JobEnd
from charonia.facts.journal import pack_ended
from charonia.facts.sequence_states import SequenceStep
from charonia.tensors import Buffer

from .groups import Groups
from .job_records import STATE_CODES, told
from .statistics import amounts_of

_LOST, _WON = b"01"
_NOT_JOURNALLED = ord("-")

_attempt = itemgetter(1)

Requests = Sequence[tuple[bytes, int]]
"""Id and attempt of each, in the order of their groups."""


def settle_call(
    model: str,
    requests: Requests,
    groups: Groups,
    statistics: tuple[bytes, Mapping[str, int]] | None,
    journal: tuple[bytes, tuple[str, str] | None],
    ends: Mapping[bytes, JobEnd] | None = None,
    sequences: Mapping[bytes, SequenceStep] | None = None,
) -> tuple[Script, Sequence[Buffer]]:
    """The script and its packed call. `journal` is the outcomes, as the port has them, and where the requests ran."""
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
    if not (ends or sequences or told_of):
        script = scripts.SETTLE
        if fact:
            names.append(keys.journal(model))
        plain = (b"EVALSHA", script.digest, len(names), *names, len(groups.names), attempts, sums, fact)
        return script, (pack((*plain, *groups.names, *groups.lasts, *amounts)),)
    script = scripts.SETTLE_RECORDED
    counts, more, large = _recorded(model, requests, names, ends or {}, sequences or {})
    command: list[Argument] = [b"EVALSHA", script.digest, len(names), *names, len(groups.names), attempts, sums]
    command += (counts[0], fact, told_of, counts[1], *groups.names, *groups.lasts, *more, *amounts)
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
    return (ended, len(more) // 5 - ended), more, size_bytes >= LARGE_BYTES


def _ended_fact(requests: Requests, outcomes: bytes, ran: tuple[str, str] | None) -> tuple[bytes, bytes]:
    """The fact about those that have an outcome, and which they are: b"" when all have, or none."""
    mask = b""
    if _NOT_JOURNALLED in outcomes:
        requests = [one for one, outcome in zip(requests, outcomes, strict=True) if outcome != _NOT_JOURNALLED]
        if not requests:
            return b"", b""
        mask = bytes([_LOST if outcome == _NOT_JOURNALLED else _WON for outcome in outcomes])
        outcomes = outcomes.replace(b"-", b"")
    return pack_ended([one[0] for one in requests], [one[1] for one in requests], outcomes, ran), mask


def _joined(attempts: list[int]) -> bytes:
    """One number when all are equal, else each after a comma."""
    if not attempts or attempts.count(attempts[0]) == len(attempts):
        return b"%d" % attempts[0] if attempts else b"0"
    return b",".join([b"%d" % attempt for attempt in attempts])
