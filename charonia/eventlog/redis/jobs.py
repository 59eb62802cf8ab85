"""Reads jobs, keeps their events, and sets the journal's retention, with commands.

`work`'s scripts create and end jobs; `stored_records` decodes their records.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from charonia import keys
from charonia.errors import InternalError
from charonia.eventlog.port import Entry, kept_response
from charonia.facts.jobs import MOVED, JobPlace, JobRecord, Line
from charonia.tensors import Buffer

from . import scripts
from .commands import Commands
from .server.transport import Argument, pack_pieces
from .stored_records import FIELDS, event_numbers, record_of, told

_log = logging.getLogger(__name__)

_PAGE = 200
_MOST_LOOKED_AT = 500
_ID_BYTES = 16
_MOST_LINES = 1024
_MOST_AT_ONCE = 1000
"""Max responses in one script call, whose number of arguments is bounded."""


class Jobs:
    """The port's methods about jobs and the journal."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    async def set_retention(self, model: str, *, size_bytes: int, journal_s: int, journal_size_bytes: int) -> None:
        kept = ("keep_bytes", size_bytes, "keep_journal_s", journal_s, "keep_journal_bytes", journal_size_bytes)
        await self._commands.execute("HSET", keys.counters(model), *kept)

    async def job(self, model: str, job_id: bytes) -> JobRecord | None:
        key = keys.job(model, job_id)
        values = await self._commands.execute("HMGET", key, *FIELDS)
        if values[0] is None:
            return None
        # events are only ever added: those up to the number just read belong to the state just read
        numbers = event_numbers(values)
        events = await self._commands.execute("HMGET", key, *[b"e%d" % n for n in numbers]) if numbers else []
        if None in events:
            return None  # expired in the meantime
        return record_of(model, job_id, values, events)

    async def jobs_of_keys(self, model: str, key_digests: Sequence[bytes]) -> list[bytes | None]:
        known = await self._commands.each([("GET", keys.idempotency(model, key)) for key in key_digests])
        return [None if value is None else value[-_ID_BYTES:] for value in known]

    async def job_result(self, model: str, job_id: bytes) -> bytes | None:
        result: bytes | None = await self._commands.execute("HGET", keys.job(model, job_id), "r")
        return result

    async def add_job_responses(
        self, model: str, job_id: bytes, attempt: int, first_index: int, records: Sequence[Buffer]
    ) -> bool:
        script = scripts.ADD_JOB_RESPONSES
        for at in range(0, len(records), _MOST_AT_ONCE):
            some = records[at : at + _MOST_AT_ONCE]
            names = (keys.job_responses(model, job_id), keys.job(model, job_id))
            command = (b"EVALSHA", script.digest, len(names), *names, attempt, first_index + at, *some)
            if not await self._commands.run(script, pack_pieces(command)):
                return False
        return True

    async def job_responses(
        self, model: str, job_id: bytes, after_index: int = -1, count: int = 100
    ) -> list[tuple[int, int, bytes]]:
        after = b"(%d-0" % (after_index + 1)
        raw = await self._commands.execute("XRANGE", keys.job_responses(model, job_id), after, "+", "COUNT", count)
        return [kept_response(Entry(entry_id, fields)) for entry_id, fields in raw]

    async def add_job_event(self, model: str, job_id: bytes, kind: str, detail: Mapping[str, object]) -> bool:
        names: tuple[bytes, ...] = (keys.job(model, job_id),)
        arguments: tuple[Argument, ...] = (kind, told(kind, detail))
        if kind == MOVED:
            names += (keys.active_jobs(model),)
            arguments += (job_id, str(detail["level"]))
        return bool(await self._commands.script(scripts.ADD_JOB_EVENT, names, arguments))

    async def jobs(
        self, model: str, *, ended: bool, after: tuple[int, bytes] | None = None, count: int = 100
    ) -> list[JobRecord]:
        found: list[JobRecord] = []
        key = keys.ended_jobs(model) if ended else keys.active_jobs(model)
        bound = (b"+inf" if ended else b"-inf") if after is None else b"%d" % after[0]
        order = (bound, b"-inf", b"BYSCORE", b"REV") if ended else (bound, b"+inf", b"BYSCORE")
        skipped, size = 0, min(count + 1, _PAGE)
        while len(found) < count:
            raw = await self._commands.execute("ZRANGE", key, *order, "LIMIT", skipped, size, "WITHSCORES")
            page = [(int(float(score)), member) for member, score in zip(raw[::2], raw[1::2], strict=True)]
            if after is not None:
                wanted = [one for one in page if _beyond((one[0], one[1][:_ID_BYTES]), after, ended)]
            else:
                wanted = page
            gone = await self._read(model, wanted, ended, found)
            if len(page) < size:
                break
            skipped += len(page) - gone
        return found[:count]

    async def _read(self, model: str, members: Sequence[tuple[int, bytes]], ended: bool, found: list[JobRecord]) -> int:
        """Add the jobs of members to those found; returns how many members had no record and were forgotten."""
        ids = [member[:_ID_BYTES] for _, member in members]
        names = [keys.job(model, job_id) for job_id in ids]
        records = await self._commands.each([("HMGET", name, *FIELDS) for name in names])
        expired: list[int] = []
        for place, (job_id, values) in enumerate(zip(ids, records, strict=True)):
            if values[0] is not None:
                try:
                    record = record_of(model, job_id, values)
                except InternalError as error:
                    _log.warning("job %s is left out of a list: %s", job_id.hex(), error)
                    continue
                if record.state.terminal == ended:  # an active one may have ended since it was listed
                    found.append(record)
            elif ended:
                expired.append(place)
        if not expired:
            return 0
        forgotten: int = await self._commands.script(
            scripts.FORGET_ENDED,
            (keys.ended_jobs(model), keys.counters(model), *[names[place] for place in expired]),
            [members[place][1] for place in expired],
        )
        return forgotten

    async def job_position(self, model: str, job_id: bytes) -> JobPlace | None:
        names = (keys.active_jobs(model), keys.lanes(model), keys.job(model, job_id), keys.counters(model))
        found = await self._commands.script(scripts.JOB_POSITION, names, (job_id, _MOST_LINES))
        if found is None:
            return None
        rank, requests, paused, owner, own, *counts = found
        lines = {line_of(line): count for line, count in zip(counts[::2], counts[1::2], strict=True)}
        return JobPlace(line_of(own), rank, lines, int(requests), bool(paused), owner.decode())

    async def job_models(self) -> list[str]:
        return sorted(name.decode() for name in await self._commands.execute("SMEMBERS", keys.JOB_MODELS))

    async def trim_journal(self, model: str, oldest_unfinished: bytes, *, sealed: bool = False) -> int:
        names = (keys.journal(model), keys.counters(model), keys.journal_seals(model))
        about = (oldest_unfinished, _MOST_LOOKED_AT, int(sealed))
        trimmed: int = await self._commands.script(scripts.TRIM_JOURNAL, names, about)
        return trimmed

    async def last_seal(self, model: str) -> Entry | None:
        found = await self._commands.execute("XREVRANGE", keys.journal_seals(model), "+", "-", "COUNT", 1)
        return Entry(*found[0]) if found else None

    async def seal_journal(self, model: str, after: bytes, seal_id: bytes, record: bytes) -> bool:
        names = (keys.journal_seals(model),)
        return bool(await self._commands.script(scripts.SEAL_JOURNAL, names, (after, seal_id, record)))

    async def journal_complete(self, model: str) -> bool:
        return await self._commands.execute("HGET", keys.counters(model), "journal_trimmed") is None

    async def set_paused(self, model: str, paused: bool) -> None:
        if paused:
            await self._commands.execute("HSET", keys.counters(model), "paused", 1)
        else:
            await self._commands.execute("HDEL", keys.counters(model), "paused")

    async def paused(self, model: str) -> bool:
        return await self._commands.execute("HGET", keys.counters(model), "paused") is not None


def line_of(text: bytes) -> Line:
    level, _, lane = text.partition(b":")
    return int(level), int(lane)


def _beyond(one: tuple[int, bytes], after: tuple[int, bytes], ended: bool) -> bool:
    return one < after if ended else one > after
