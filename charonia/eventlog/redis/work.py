"""Accepts, begins and settles requests and jobs, by calls of scripts.

`stored_records` groups ids, packs settlements and job records; `commands` sends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any
from urllib.parse import quote

from charonia import keys
from charonia.errors import CharoniaError
from charonia.eventlog.port import Fields, Limits, Reply, Settled
from charonia.eventlog.refusal_texts import key_reused, not_owner, over_limit
from charonia.facts.events import LaneOpened, pack_fact
from charonia.facts.jobs import JobEnd, JobTicket, NewJob
from charonia.facts.journal import Ran, pack_accepted, pack_batched
from charonia.facts.sequence_states import SequenceStep
from charonia.tensors import Buffer

from . import scripts
from .commands import Commands, is_large
from .server.transport import Argument, pack, pack_pieces
from .stored_records import Groups, attempt_in, fields_of, grouped, lasts_in, settle_call, told, value_of

_MOST_FIELDS = 7000
"""Max fields and values of one entry: a script can pass on a bounded number of arguments."""
_MOST_FORGOTTEN = 1000
_KEY_REUSED = 5
_FIRST_OF_MODEL = 6
_WON = ord("1")

_id = itemgetter(0)


class Work:
    """The port's methods about accepted work."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._lane_names: dict[tuple[str, int, int], tuple[tuple[bytes, ...], bytes, bytes]] = {}

    # -- accepting ----------------------------------------------------------------------------------------------------

    async def accept(
        self,
        model: str,
        level: int,
        lane: int,
        requests: Sequence[tuple[bytes, int]],
        fields: Fields,
        limits: Limits,
        *,
        tenant: str = "",
        journalled: bool = False,
        durability: str = "",
    ) -> None:
        _check(fields)
        names, lane_name, fact = self._lane(model, level, lane)
        ids = [one[0] for one in requests]
        sizes = [one[1] for one in requests]
        quoted = _quoted(tenant)
        groups = grouped(ids)
        if groups.order is not None:
            sizes = [sizes[place] for place in groups.order]
        command: list[Argument] = [b"EVALSHA", scripts.ACCEPT.digest]
        amounts = (limits.requests, limits.size_bytes, len(ids), sum(sizes), lane_name, fact, len(groups.names))
        if tenant or journalled:
            more = keys.tenant(model, tenant) if tenant else names[2]
            command += (7, *names, more, keys.journal(model), *amounts)
            command += (limits.tenant_requests, limits.tenant_size_bytes, pack_accepted(ids) if journalled else b"")
        else:
            command += (5, *names, *amounts)
        at = 0
        for name, lasts in zip(groups.names, groups.lasts, strict=True):
            end = at + len(lasts)
            command += (name, value_of(lasts, sizes[at:end], quoted))
            at = end
        command += fields
        pieces: Sequence[Buffer] = pack_pieces(command) if is_large(fields) else (pack(command),)
        writes = await self._commands.writes(durability)
        bound = await self._commands.accept(scripts.ACCEPT, pieces, writes)
        if bound:
            raise over_limit(model, bound, limits, tenant)
        await writes.reached()

    async def accept_job(
        self,
        model: str,
        level: int,
        lane: int,
        job: NewJob,
        fields: Fields,
        limits: Limits,
        *,
        journalled: bool = True,
        durability: str = "",
    ) -> JobTicket:
        _check(fields)
        writes = await self._commands.writes(durability)
        reached = writes.level.text
        names, lane_name, fact = self._lane(model, level, lane)
        job_names = [
            *names,
            keys.tenant(model, job.tenant) if job.tenant else names[2],
            keys.journal(model),
            keys.active_jobs(model),
            keys.job(model, job.id),
        ]
        if job.key:
            job_names.append(keys.idempotency(model, job.key))
        proven = writes.level_at_reply.text
        record = fields_of(job, proven, lane_name)
        command: list[Argument] = [b"EVALSHA", scripts.ACCEPT_JOB.digest, len(job_names), *job_names]
        command += (limits.requests, limits.size_bytes, limits.tenant_requests, limits.tenant_size_bytes)
        command += (job.size_bytes, lane_name, fact, job.id)
        command += (job.id[:-1], value_of(job.id[-1:], [job.size_bytes], _quoted(job.tenant)))
        command += (
            job.accepted_us,
            job.digest,
            pack_accepted([job.id]) if journalled else b"",
            len(record),
            *record,
            *fields,
        )
        pieces: Sequence[Buffer] = pack_pieces(command) if is_large(fields) else (pack(command),)
        result = await self._commands.accept(scripts.ACCEPT_JOB, pieces, writes)
        if result == _FIRST_OF_MODEL:
            await self.note_job_model(model)
            result = 0
        if result == 0:
            await writes.reached()
            if proven != reached:  # the record must not promise more than was reached
                await self.raise_level(model, job.id, reached)
            return JobTicket(job.id, True, reached)
        if result == _KEY_REUSED:
            raise key_reused()
        if isinstance(result, int):
            raise over_limit(model, result, limits, job.tenant)
        # the first call may have got no receipt: this one reports its own level
        await writes.cover_earlier(keys.fence(model))
        return JobTicket(bytes(result), False, reached)

    async def note_job_model(self, model: str) -> None:
        """Add a model to the list of those with jobs, in another slot; the model notes that only when it is done."""
        await self.name_job_model(model)
        await self.mark_job_model(model)

    async def name_job_model(self, model: str) -> None:
        await self._commands.execute("SADD", keys.JOB_MODELS, model)

    async def mark_job_model(self, model: str) -> None:
        await self._commands.execute("HSET", keys.counters(model), "jobs", 1)

    async def raise_level(self, model: str, job_id: bytes, level: str) -> None:
        """Update a job's record with the level reached since it was written."""
        await self._commands.script(scripts.RAISE_LEVEL, [keys.job(model, job_id)], [level])

    def _lane(self, model: str, level: int, lane: int) -> tuple[tuple[bytes, ...], bytes, bytes]:
        found = self._lane_names.get((model, level, lane))
        if found is None:
            if len(self._lane_names) > 10_000:  # bounds hostile variety
                self._lane_names.clear()
            names = (
                keys.queue(model, level, lane),
                keys.unsettled(model),
                keys.counters(model),
                keys.lanes(model),
                keys.facts(model),
            )
            found = names, b"%d:%d" % (level, lane), pack_fact(LaneOpened(level, lane))
            self._lane_names[(model, level, lane)] = found
        return found

    # -- settling -----------------------------------------------------------------------------------------------------

    async def settle(
        self,
        model: str,
        requests: Sequence[tuple[bytes, int]],
        statistics: tuple[bytes, Mapping[str, int]] | None,
        replies: Sequence[Reply],
        facts: Sequence[Reply] = (),
        *,
        ends: Mapping[bytes, JobEnd] | None = None,
        outcomes: bytes = b"",
        ran: Ran | None = None,
        sequences: Mapping[bytes, SequenceStep] | None = None,
        rows: Sequence[int] = (),
    ) -> list[bool]:
        groups = grouped(list(map(_id, requests)))
        if groups.order is not None:
            requests = [requests[place] for place in groups.order]
            outcomes = bytes([outcomes[place] for place in groups.order]) if outcomes else b""
            rows = [rows[place] for place in groups.order] if rows else rows
        script, pieces = settle_call(model, requests, groups, statistics, (outcomes, ran), rows, ends, sequences)
        result = await self._commands.settle(script, pieces, replies, facts)
        return _won(result, len(requests), groups)

    def settle_now(
        self,
        model: str,
        requests: Sequence[tuple[bytes, int]],
        statistics: tuple[bytes, Mapping[str, int]] | None,
        replies: Sequence[Reply],
        facts: Sequence[Reply],
        done: Settled,
        *,
        outcomes: bytes = b"",
        ran: Ran | None = None,
        rows: Sequence[int] = (),
    ) -> bool:
        groups = grouped(list(map(_id, requests)))
        if groups.order is not None:
            requests = [requests[place] for place in groups.order]
            outcomes = bytes([outcomes[place] for place in groups.order]) if outcomes else b""
            rows = [rows[place] for place in groups.order] if rows else rows
        script, pieces = settle_call(model, requests, groups, statistics, (outcomes, ran), rows)

        def answered(result: Any) -> None:
            done(result if isinstance(result, CharoniaError) else _won(result, len(requests), groups))

        return self._commands.settle_now(script, pieces, replies, facts, answered)

    async def begin_attempt(
        self,
        model: str,
        token: int,
        ids: Sequence[bytes],
        attempt: int,
        *,
        jobs: Sequence[bytes] = (),
        journalled: Sequence[bytes] = (),
        executor: str = "",
        batch_id: str = "",
    ) -> list[bool]:
        groups = grouped(ids)
        if groups.order is not None:
            ids = [ids[place] for place in groups.order]
        names = [keys.unsettled(model), keys.counters(model)]
        fact = mask = b""
        if jobs or journalled:
            names.append(keys.journal(model))
        if journalled:
            wanted = set(journalled)
            told_of = [one for one in ids if one in wanted]
            fact = pack_batched(told_of, attempt, executor, batch_id)
            if len(told_of) < len(ids):
                mask = b"".join([b"1" if one in wanted else b"0" for one in ids])
        arguments: tuple[Argument, ...] = (token, attempt, len(groups.names), fact, mask, *groups.names, *groups.lasts)
        script = scripts.BEGIN_REQUESTS
        if jobs:
            script = scripts.BEGIN_ATTEMPT
            names += [keys.job(model, job_id) for job_id in jobs]
            event = told("batched", {"executor": executor, "batch_id": batch_id} if executor else {})
            places = {one: number for number, one in enumerate(ids, 1)}
            arguments = (len(jobs), event, *arguments, *[places[job_id] for job_id in jobs])
        result = await self._commands.script(script, names, arguments)
        if result == 0:
            raise not_owner(model, token)
        if result == 1:
            return [True] * len(ids)
        going = [one == _WON for one in result]
        return going if groups.order is None else _in_order(going, groups.order)

    async def unsettled(self, model: str, ids: Sequence[bytes]) -> list[int]:
        if not ids:
            return []
        names = list({one[:-1]: None for one in ids})
        found = await self._commands.execute("HMGET", keys.unsettled(model), *names)
        values: dict[bytes, bytes | None] = dict(zip(names, found, strict=True))
        return [attempt_in(values[one[:-1]], one[-1]) for one in ids]

    async def unsettled_ids(self, model: str) -> list[bytes]:
        raw = await self._commands.execute("HGETALL", keys.unsettled(model))
        groups = zip(raw[::2], raw[1::2], strict=True)
        return [name + bytes((last,)) for name, value in groups for last in lasts_in(value)]

    # -- sequences ----------------------------------------------------------------------------------------------------

    async def sequences(self, model: str) -> dict[bytes, bytes]:
        raw = await self._commands.execute("HGETALL", keys.live_sequences(model))
        return dict(zip(raw[::2], raw[1::2], strict=True))

    async def sequence_states(self, model: str, names: Sequence[bytes]) -> list[tuple[bytes, bytes] | None]:
        if not names:
            return []
        about = await self._commands.execute("HMGET", keys.live_sequences(model), *names)
        states = await self._commands.execute("HMGET", keys.sequence_states(model), *names)
        return [None if a is None else (a, s or b"") for a, s in zip(about, states, strict=True)]

    async def keep_states(self, model: str, states: Mapping[bytes, tuple[bytes, bytes]]) -> list[bool]:
        if not states:
            return []
        names = [keys.live_sequences(model), keys.sequence_states(model)]
        arguments = [part for key, (about, state) in states.items() for part in (key, about, state)]
        return [bool(one) for one in await self._commands.script(scripts.KEEP_STATES, names, arguments)]

    async def forget_sequences(self, model: str, runs: Mapping[bytes, bytes]) -> None:
        names = [keys.live_sequences(model), keys.sequence_states(model)]
        pairs = list(runs.items())
        for at in range(0, len(pairs), _MOST_FORGOTTEN):
            arguments = [part for pair in pairs[at : at + _MOST_FORGOTTEN] for part in pair]
            await self._commands.script(scripts.FORGET_SEQUENCES, names, arguments)

    # -- counting -----------------------------------------------------------------------------------------------------

    async def pending(self, model: str) -> tuple[int, int]:
        requests, size_bytes = await self._commands.execute("HMGET", keys.counters(model), "requests", "bytes")
        return int(requests or 0), int(size_bytes or 0)

    async def pending_of_tenants(self, model: str, tenants: Sequence[str]) -> list[tuple[int, int]]:
        found = await self._commands.each([("HMGET", keys.tenant(model, one), "requests", "bytes") for one in tenants])
        return [(int(requests or 0), int(size_bytes or 0)) for requests, size_bytes in found]

    async def lanes(self, model: str) -> list[tuple[int, int]]:
        return await self._commands.lanes(model)


def _won(result: Any, count: int, groups: Groups) -> list[bool]:
    """Which requests were won, in the given order, by the script's reply."""
    if result == 1:
        return [True] * count
    won = [one == _WON for one in result]
    return won if groups.order is None else _in_order(won, groups.order)


def _in_order(results: list[bool], order: list[int]) -> list[bool]:
    back = [False] * len(results)
    for result, place in zip(results, order, strict=True):
        back[place] = result
    return back


def _quoted(tenant: str) -> bytes:
    return quote(tenant, safe="-_.~ ").encode() if tenant else b""


def _check(fields: Fields) -> None:
    if not fields or len(fields) % 2 or len(fields) > _MOST_FIELDS:
        raise ValueError("fields of an entry alternate names and values and are not too many")
