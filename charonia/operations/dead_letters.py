"""Dead letters: requests that were given up, with what is needed to understand and repeat them: `charonia dlq`.

A letter is an entry of `dlq:{m}`: `r` the request record, `m` a msgpack map (`_dead_letter` in
`batcher/entries/refusals.py` makes it).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from charonia import keys
from charonia.errors import InvalidRecord, NotFound
from charonia.eventlog.port import START, Blobs, Entry, EventLog, JobLog, Limits, Streams
from charonia.facts.jobs import NewJob, parse_public_id, public_id
from charonia.tensors import Tensor
from charonia.wire import (
    BLOB,
    FIELD_ABOUT,
    FIELD_RECORD,
    FLAG_JOB,
    FLAG_JOURNALLED,
    RequestRecord,
    pack_request,
    record_fields,
    unpack_request,
)

from .job_commands import plain
from .queued import known_models
from .text.tensor_text import described, saved_all

RETENTION_S = 86_400
_NO_LIMITS = Limits()
_PAGE = 100
_ENTRY = re.compile(r"(\d{1,19})-(\d{1,19})")
_LAST_OF_MS = 2**64 - 1


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One letter in the log. `record` is None if a newer release wrote it in an unknown form."""

    model: str
    entry_id: bytes
    about: dict[str, Any]
    record: RequestRecord | None

    @property
    def id(self) -> bytes:
        known = self.about.get("id")
        return known if isinstance(known, bytes) else self.record.id if self.record is not None else b""

    def named(self, text: str) -> bool:
        """Whether `text` identifies this letter: its request id in hex, its public id, or its entry's id."""
        return text in (self.id.hex(), public_id(self.model, self.id), self.entry_id.decode())

    def number(self, name: str) -> int:
        value = self.about.get(name, 0)
        return value if isinstance(value, int) else 0


class LetterPlace(NamedTuple):
    """Of a letter in a list."""

    model: str
    entry_id: bytes


async def letters(log: Streams, model: str, after: bytes = START) -> AsyncIterator[DeadLetter]:
    """The letters, oldest first, each once: a new owner may repeat those that its predecessor wrote."""
    seen: set[bytes] = set()
    async for letter in _entries(log, model, after):
        if not letter.id or letter.id not in seen:
            seen.add(letter.id)
            yield letter


async def _entries(log: Streams, model: str, after: bytes = START) -> AsyncIterator[DeadLetter]:
    while entries := await log.range(keys.dead_letters(model), after, _PAGE):
        after = entries[-1].id
        for entry in entries:
            yield _letter(model, entry)


def _letter(model: str, entry: Entry) -> DeadLetter:
    fields = {bytes(entry.fields[at]): entry.fields[at + 1] for at in range(0, len(entry.fields) - 1, 2)}
    about: Any = None
    record: RequestRecord | None = None
    try:
        about = msgpack.unpackb(fields.get(FIELD_ABOUT, b"\x80"))
    except Exception:
        about = None
    try:
        record = unpack_request(fields[FIELD_RECORD]) if FIELD_RECORD in fields else None
    except InvalidRecord:
        record = None
    return DeadLetter(model, entry.id, about if isinstance(about, dict) else {}, record)


async def list_letters(log: JobLog, models: Sequence[str], now_us: int, limit: int) -> dict[str, Any]:
    """A row for each letter, oldest first within a model."""
    rows, last = await read_letters(log, models, now_us, limit)
    return {"letters": rows, "more": last is not None}


async def read_letters(
    log: JobLog, models: Sequence[str], now_us: int, limit: int, tenant: str | None = None, *,
    after: LetterPlace | None = None, scan: int = 0,
) -> tuple[list[dict[str, Any]], LetterPlace | None]:  # fmt: skip
    """The rows of `list_letters` after a place, and the place after which the list goes on, None at its end.

    `scan` is how many letters may be read, 0 for any number: that place may be of one that is not listed then.
    """
    rows: list[dict[str, Any]] = []
    read, last, listed = 0, after, after
    names = list(models or await known_models(log))
    if after is not None:
        names = names[names.index(after.model) :] if after.model in names else []
    for model in names:
        begin = after.entry_id if after is not None and after.model == model else START
        async for letter in letters(log, model, begin):
            if scan and read >= scan:
                return rows, last
            read, last = read + 1, LetterPlace(model, letter.entry_id)
            row = _summary(letter, now_us)
            if tenant is not None and row["tenant"] != tenant:
                continue
            if len(rows) == limit:
                return rows, listed
            rows.append(row)
            listed = last
    return rows, None


async def show_letter(log: Blobs, letter: DeadLetter, now_us: int, directory: Path | None) -> dict[str, Any]:
    """All information about a letter. With a directory its inputs are written there as files."""
    about = {name: plain(value) for name, value in letter.about.items() if name not in ("id", "stderr")}
    stderr = plain(letter.about.get("stderr") or "")
    shown = {**_summary(letter, now_us), "about": about, "stderr": str(stderr).splitlines()}
    record = letter.record
    if record is None:
        return {**shown, "inputs": [], "inputs_missing": "the request record cannot be read"}
    shown["parameters"] = plain(record.meta.parameters)
    shown["requested_outputs"] = list(record.meta.outputs)
    inputs = await _inputs(log, record)
    if inputs is None:
        places = [{"name": p.name, "datatype": p.datatype.value, "shape": list(p.shape)} for p in record.meta.inputs]
        return {**shown, "inputs": places, "inputs_missing": "the inputs lay beside the log and are gone"}
    shown["inputs"] = [described(tensor) for tensor in inputs]
    if directory is not None:
        shown["files"] = saved_all(inputs, directory)
    return shown


async def replay(
    log: EventLog, letter: DeadLetter, now_us: int, retention_s: int = RETENTION_S, limits: Limits = _NO_LIMITS
) -> dict[str, Any]:
    """Submit a letter's request again, as a new job without a deadline. The letter stays until it is dropped.

    Raises `NotFound` if its inputs are gone, and errors of accepting, as beyond `limits`.
    """
    record = letter.record
    inputs = await _inputs(log, record) if record is not None else None
    if record is None or inputs is None:
        raise NotFound(f"dead letter {letter.id.hex()} of model '{letter.model}' no longer has its inputs")
    job_id = secrets.token_bytes(16)
    flags = FLAG_JOB | (FLAG_JOURNALLED if record.journalled or not record.is_job else 0)
    packed = pack_request(
        job_id,
        b"",
        record.client_id.encode(),
        record.meta,
        [tensor.data for tensor in inputs],
        rows=record.rows,
        signature=record.signature,
        level=record.level,
        accepted_ns=now_us * 1000,
        timeout_us=record.timeout_us,
        flags=flags,
        sequence=record.sequence,
    )
    named = letter.about.get("tenant")
    tenant = named if isinstance(named, str) else ""
    job = NewJob(
        job_id,
        len(packed),
        now_us,
        retention_s,
        tenant,
        about={
            "replay_of": letter.id.hex(),
            "version": record.meta.version,
            "client_id": record.client_id,
            "outputs": list(record.meta.outputs),
        },
    )
    ticket = await log.accept_job(
        letter.model,
        record.level,
        keys.lane_of(tenant),
        job,
        record_fields([packed]),
        limits,
        journalled=bool(flags & FLAG_JOURNALLED),
    )
    return {"id": letter.id.hex(), "job": public_id(letter.model, ticket.id), "durability": ticket.durability}


async def drop(log: Streams, chosen: Sequence[DeadLetter]) -> list[str]:
    """Delete letters, with their repetitions; returns their ids."""
    for model in {letter.model for letter in chosen}:
        ids = {letter.id for letter in chosen if letter.model == model} - {b""}
        entries = {letter.entry_id for letter in chosen if letter.model == model}
        entries |= {letter.entry_id async for letter in _entries(log, model) if letter.id in ids}
        await log.delete_entries(keys.dead_letters(model), sorted(entries))
    return [letter.id.hex() for letter in chosen]


async def choose(log: JobLog, model: str, texts: Sequence[str], *, every: bool, scan: int = 0) -> list[DeadLetter]:
    """The letters that `texts` identify, or every one of a model ("" for all models). Raises `NotFound` for a text.

    A letter's entry is read alone, another id is looked for among `scan` letters, 0 for all.
    """
    if every:
        models = [model] if model else await known_models(log)
        return [letter for name in models for letter in [found async for found in letters(log, name)]]
    chosen: list[DeadLetter] = []
    for text in texts:
        parsed = parse_public_id(text)
        where = model or (parsed[0] if parsed is not None else "")
        found = await _named(log, where, text, scan)
        if found is None:
            raise NotFound(
                f"dead letter '{text}' is unknown" + (f" to model '{where}'" if where else "; name its model")
            )
        chosen.append(found)
    return chosen


async def _named(log: Streams, model: str, text: str, scan: int) -> DeadLetter | None:
    if not model:
        return None
    if place := _ENTRY.fullmatch(text):
        ms, number = int(place[1]), int(place[2])
        before = b"%d-%d" % ((ms, number - 1) if number else (max(0, ms - 1), _LAST_OF_MS))
        entries = await log.range(keys.dead_letters(model), before, 1)
        return next((_letter(model, entry) for entry in entries if entry.id == text.encode()), None)
    read = 0
    async for letter in letters(log, model):
        if letter.named(text):
            return letter
        read += 1
        if scan and read >= scan:
            break
    return None


async def _inputs(log: Blobs, record: RequestRecord) -> list[Tensor] | None:
    """The input tensors; None if they were outside the record and are gone."""
    data = record.data
    if record.reference is not None:
        blob = await log.blob(record.reference.name) if record.reference.kind == BLOB else None
        if blob is None or len(blob) != record.reference.size_bytes:
            return None
        data = memoryview(blob)
    return [Tensor(p.name, p.datatype, p.shape, data[p.offset : p.offset + p.size_bytes]) for p in record.meta.inputs]


def _summary(letter: DeadLetter, now_us: int) -> dict[str, Any]:
    about = letter.about
    time_us = letter.number("time_us")
    version = letter.number("version") or (letter.record.meta.version if letter.record is not None else 0)
    return {
        "id": letter.id.hex(),
        "model": letter.model,
        "version": version,
        "content_hash": str(plain(about.get("content_hash") or "")),
        "job": public_id(letter.model, letter.id) if about.get("job") else None,
        "tenant": str(plain(about.get("tenant") or "")),
        "attempts": letter.number("attempts"),
        "time_us": time_us,
        "age_s": (now_us - time_us) / 1e6 if time_us else None,
        "error": str(plain(about.get("error") or "")),
        "entry": letter.entry_id.decode(),
    }
