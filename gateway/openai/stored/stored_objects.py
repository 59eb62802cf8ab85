"""Keeps files and batches of the OpenAI API in the log, each for a time. `batch_runs` executes the batches.

A file is a record (`keys.stored_file`) and its content in blobs of one MiB, written and read one after the other, so
that a gateway never holds a whole file. A batch is a stream of facts (`batch_facts`), and one of its lines' results.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import orjson

from charonia import keys
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import Cancelled, CharoniaError, Unavailable
from charonia.eventlog.port import START, Blobs, Leases, Notes, Streams
from gateway.openai.shapes.api_errors import ApiError

from .batch_facts import BatchState, Counts, fold

CHUNK_BYTES = 1 << 20
MAX_FILE_BYTES = 100 << 20
"""Half of OpenAI's limit: the log is in memory."""
MAX_FILES = 1000
MAX_TENANT_BYTES = 1 << 30
"""The files of one tenant."""
KEPT_S = 7 * 86_400
"""How long files and batches are kept, unless an upload says otherwise."""
MIN_KEPT_S, MAX_KEPT_S = 3600, 30 * 86_400
"""OpenAI's bounds of `expires_after`."""
WINDOW_S = 86_400
FINALIZING_S = 3600
"""How long the input of a batch is kept after its window: then the lines without an answer are written from it."""
_DECIDED_S, _ENDING_S = 30, 60
"""An upload becomes a file this long after its entry at the latest, and counts so long. The difference is for writing
it, and for clocks that do not run alike."""
_STREAM_KEPT_S = 3600
"""How long a tenant's stream of such entries is kept after the last: an empty stream would stay for ever otherwise."""
_PAGE = 500
_RESULTS_PAGE = 32
"""Results read at a time: one may have a megabyte."""
_ALL = 100_000


class ObjectLog(Streams, Notes, Blobs, Leases, Protocol):
    """What of the log stored objects need."""


def now_s() -> int:
    return wall_ns() // 1_000_000_000


def new_id(kind: str) -> str:
    return f"{kind}{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file. Times are seconds since the epoch."""

    id: str
    tenant: str
    filename: str
    purpose: str
    size_bytes: int
    created_s: int
    expires_s: int
    chunks: int

    def document(self) -> dict[str, Any]:
        """The file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileWriter:
    """Writes a new file. Without `end` there is none; what was written expires."""

    def __init__(self, log: ObjectLog, file_id: str, kept_s: int) -> None:
        self._log = log
        self._held = bytearray()
        self.id = file_id
        self.kept_s = kept_s
        self.size_bytes = self.chunks = 0

    async def write(self, data: bytes) -> None:
        self._held += data
        self.size_bytes += len(data)
        while len(self._held) >= CHUNK_BYTES:
            chunk = bytes(self._held[:CHUNK_BYTES])
            del self._held[:CHUNK_BYTES]
            await self._put(chunk)

    async def _put(self, chunk: bytes) -> None:
        await self._log.put_blob(_chunk(self.id, self.chunks), chunk, self.kept_s)
        self.chunks += 1

    async def flush(self) -> None:
        """Write the rest of the content."""
        if self._held:
            await self._put(bytes(self._held))
            self._held.clear()

    async def end(self, tenant: str, filename: str, purpose: str) -> FileRecord:
        """Make the file visible."""
        await self.flush()
        created_s = now_s()
        expires_s = created_s + self.kept_s
        record = FileRecord(self.id, tenant, filename, purpose, self.size_bytes, created_s, expires_s, self.chunks)
        await self._log.put_note(keys.stored_file(self.id), orjson.dumps(asdict(record)), self.kept_s)
        await self._log.set_times(keys.stored_files(tenant), {self.id.encode(): wall_ns() // 1000})
        return record

    async def abandon(self) -> None:
        """Delete what was written, also a chunk whose writing was cut off."""
        await self._log.delete_keys([keys.blob(_chunk(self.id, number)) for number in range(self.chunks + 1)])


class StoredFiles:
    """The files of all tenants."""

    def __init__(self, log: ObjectLog) -> None:
        self._log = log
        self._reserved: dict[str, list[int]] = {}
        """By tenant, what the uploads under way here may have, in bytes."""

    def writer(self, kept_s: int = KEPT_S, *, file_id: str = "") -> FileWriter:
        return FileWriter(self._log, file_id or new_id("file-"), kept_s)

    async def find(self, file_id: str, tenant: str) -> FileRecord:
        """A file of a tenant. Raises a 404 `ApiError`, the same for a file of another tenant."""
        record = (await self._records([file_id]))[0] if len(file_id) <= 128 else None
        if record is None or record.tenant != tenant:
            raise ApiError(f"No such File object: {file_id[:64]}", status=404, param="id")
        return record

    async def _records(self, file_ids: Sequence[str]) -> list[FileRecord | None]:
        notes = await self._log.notes([keys.stored_file(file_id) for file_id in file_ids])
        return [FileRecord(**orjson.loads(note)) if note is not None else None for note in notes]

    async def of_tenant(self, tenant: str) -> list[FileRecord]:
        """All files of a tenant, the oldest first. Forgets those that have expired."""
        index = keys.stored_files(tenant)
        names = [name.decode() for name in await self._log.due(index, wall_ns() // 1000 + 60_000_000, _ALL)]
        records = await self._records(names)
        gone = [name.encode() for name, record in zip(names, records, strict=True) if record is None]
        await self._log.drop_times(index, gone)
        return [record for record in records if record is not None]

    @contextlib.asynccontextmanager
    async def capacity(
        self, tenant: str, size_bytes: int | None = None, *, beside_bytes: int = 0
    ) -> AsyncGenerator[int]:
        """How many bytes an upload of a tenant may have. They are reserved in this gateway meanwhile, or as many as the
        upload says that it has. `beside_bytes` are the results of the tenant's batches. Raises a 429 `ApiError` when
        the tenant has too many files.
        """
        files = await self.of_tenant(tenant)
        reserved = self._reserved.get(tenant, [])
        left = MAX_TENANT_BYTES - sum(record.size_bytes for record in files) - sum(reserved) - beside_bytes
        if len(files) + len(reserved) >= MAX_FILES or left <= 0:
            raise _full(len(files), len(reserved), beside_bytes)
        limit = min(left, MAX_FILE_BYTES)
        own = limit if size_bytes is None else min(size_bytes, limit)
        self._reserved.setdefault(tenant, reserved).append(own)
        try:
            yield limit
        finally:
            reserved.remove(own)
            if not reserved:
                del self._reserved[tenant]

    async def end_upload(
        self, writer: FileWriter, tenant: str, filename: str, purpose: str, *, beside_bytes: int = 0
    ) -> FileRecord:
        """Make an uploaded file visible. Raises a 429 `ApiError`, and deletes it, when the tenant has too many with it.

        Uploads may end at several gateways at the same time. Then their order in the log decides which of them fit.
        """
        stream = keys.ending_files(tenant)
        fits = False
        try:
            await writer.flush()
            began_ns = monotonic_ns()
            entry_id = await self._log.append(stream, [b"f", writer.id.encode(), b"s", b"%d" % writer.size_bytes])
            try:
                await self._log.keep_until(stream, wall_ns() // 1000 + _STREAM_KEPT_S * 1_000_000)
                count = await self._count_before(tenant, entry_id, writer.size_bytes, beside_bytes)
                if count is not None:
                    raise _full(count, 0, beside_bytes)
                if monotonic_ns() - began_ns > _DECIDED_S * 1_000_000_000:
                    raise Unavailable("the upload could not be stored: the log was too slow, try again")
                fits = True
                return await writer.end(tenant, filename, purpose)
            finally:
                with contextlib.suppress(CharoniaError):
                    await self._log.delete_entries(stream, [entry_id])
        except BaseException:
            if not fits:  # otherwise it may be a file
                with contextlib.suppress(CharoniaError):
                    await writer.abandon()
            raise

    async def _count_before(self, tenant: str, entry_id: bytes, size_bytes: int, beside_bytes: int) -> int | None:
        """How many files a tenant has before an upload that does not fit; None for one that fits.

        An upload whose entry is in the stream and that is not a file yet counts if it fits itself behind those before
        it. Its own gateway decides the same: it sees the same entries before it.
        """
        stream = keys.ending_files(tenant)
        entries = await self._log.range(stream, START, _ALL)
        files = {record.id: record.size_bytes for record in await self.of_tenant(tenant)}  # after the entries
        count, total = len(files), sum(files.values()) + beside_bytes
        gone: list[bytes] = []
        for entry in entries:
            if entry.id == entry_id:
                break
            if _time_ms(entry_id) - _time_ms(entry.id) > _ENDING_S * 1000:
                gone.append(entry.id)  # its gateway has died
            elif bytes(entry.fields[1]).decode() not in files and _fits(count + 1, total + int(entry.fields[3])):
                count, total = count + 1, total + int(entry.fields[3])
        if gone:
            await self._log.delete_entries(stream, gone)
        return None if _fits(count + 1, total + size_bytes) else count

    async def check_batch(self, tenant: str, batches: int, result_bytes: int) -> None:
        """Raises a 429 `ApiError` if there is no space for the output of one more batch of a tenant.

        It has so many that have not ended, with results of so many bytes; each may write two files.
        """
        files = await self.of_tenant(tenant)
        total = sum(record.size_bytes for record in files) + result_bytes
        if not _fits(len(files) + 2 * (batches + 1), total + 1):
            raise _full(len(files), 0, result_bytes)

    async def left_bytes(self, tenant: str) -> int:
        """What a tenant may store beside its files; negative if it has more than it may."""
        return MAX_TENANT_BYTES - sum(record.size_bytes for record in await self.of_tenant(tenant))

    async def content(self, record: FileRecord) -> AsyncIterator[bytes]:
        """The content, in pieces. Raises a 404 `ApiError` when the file ends while it is read."""
        for number in range(record.chunks):
            chunk = await self._log.blob(_chunk(record.id, number))
            if chunk is None:
                raise ApiError(f"No such File object: {record.id}", status=404, param="id")
            yield chunk

    async def keep_until(self, record: FileRecord, until_s: int) -> None:
        """Keep a file until then, if it would expire before. Raises a 404 `ApiError` when it expires meanwhile."""
        if record.expires_s >= until_s:
            return
        kept_s, number = until_s - now_s(), 0
        async for chunk in self.content(record):
            await self._log.put_blob(_chunk(record.id, number), chunk, kept_s)
            number += 1
        note = orjson.dumps(asdict(replace(record, expires_s=until_s)))
        await self._log.put_note(keys.stored_file(record.id), note, kept_s)

    async def delete(self, record: FileRecord) -> None:
        chunks = [keys.blob(_chunk(record.id, number)) for number in range(record.chunks)]
        await self._log.delete_keys([keys.stored_file(record.id), *chunks])
        await self._log.drop_times(keys.stored_files(record.tenant), [record.id.encode()])


def _fits(files: int, size_bytes: int) -> bool:
    """Whether a tenant may have so much."""
    return files <= MAX_FILES and size_bytes <= MAX_TENANT_BYTES


def _time_ms(entry_id: bytes) -> int:
    """When the log took an entry, by its own clock."""
    return int(entry_id.partition(b"-")[0])


def _full(files: int, uploads: int, result_bytes: int) -> ApiError:
    meanwhile = f" and {uploads} uploads are under way" if uploads else ""
    results = f", batches that run have results of {result_bytes} bytes" if result_bytes else ""
    message = f"{files} files are stored{meanwhile}{results}: delete files first, or wait for batches to end"
    return ApiError(message, status=429, code="storage_exceeded")


def _chunk(file_id: str, number: int) -> str:
    return f"{file_id}.{number}"


class StoredBatches:
    """The batches of all tenants: their facts, and the results of their lines."""

    def __init__(self, log: ObjectLog) -> None:
        self._log = log

    async def create(self, batch_id: str, fact: Mapping[str, Any]) -> BatchState:
        """Record a batch, and that it has to be driven."""
        await self.add(batch_id, fact)
        at_us = wall_ns() // 1000
        await self._log.set_times(keys.BATCHES_EXPIRING, {batch_id.encode(): at_us + KEPT_S * 1_000_000})
        await self._log.set_times(keys.stored_batches(str(fact["tenant"])), {batch_id.encode(): at_us})
        await self._log.set_times(keys.BATCHES_ACTIVE, {batch_id.encode(): at_us})
        return await self.state(batch_id)

    async def add(self, batch_id: str, fact: Mapping[str, Any], token: int = 0) -> None:
        """Append a fact; `token` is of the gateway that drives the batch, 0 for a fact that any may write. Raises
        `Cancelled`, and appends nothing, when another gateway has taken the batch over.
        """
        fields = [b"f", orjson.dumps(fact)]
        if not token:
            await self._log.append(keys.batch_facts(batch_id), fields)
        elif not await self._fenced(batch_id, token, fields):
            raise Cancelled(f"another gateway drives batch {batch_id}")

    async def _fenced(self, batch_id: str, token: int, fields: Sequence[bytes] = ()) -> bool:
        stream, fence = keys.batch_facts(batch_id), keys.batch_fence(batch_id)
        return await self._log.append_fenced(stream, fence, token, fields, KEPT_S)

    async def state(self, batch_id: str) -> BatchState:
        """The state, without one that `exists` for an unknown batch."""
        entries = await self._log.range(keys.batch_facts(batch_id))
        return fold(batch_id, [orjson.loads(entry.fields[1]) for entry in entries])

    async def find(self, batch_id: str, tenant: str) -> BatchState:
        """A batch of a tenant. Raises a 404 `ApiError`."""
        state = await self.state(batch_id) if len(batch_id) <= 128 else BatchState(batch_id)
        if not state.exists or state.tenant != tenant:
            raise ApiError(f"No batch found with id '{batch_id[:64]}'", status=404)
        return state

    async def of_tenant(self, tenant: str) -> list[str]:
        """The ids of a tenant's batches, the oldest first; some may have expired."""
        until_us = wall_ns() // 1000 + 60_000_000
        return [name.decode() for name in await self._log.due(keys.stored_batches(tenant), until_us, _ALL)]

    async def unended(self, tenant: str) -> list[BatchState]:
        """A tenant's batches that have not ended."""
        active = set(await self.active())
        states = [await self.state(batch_id) for batch_id in await self.of_tenant(tenant) if batch_id in active]
        return [state for state in states if state.exists and not state.outcome]

    async def result_bytes(self, tenant: str, but: str = "") -> int:
        """The bytes of the results of a tenant's batches that have not ended, as of a moment ago, without one batch."""
        active = set(await self.active())
        found = [batch_id for batch_id in await self.of_tenant(tenant) if batch_id in active and batch_id != but]
        return sum(counts.result_bytes for counts in await self.progress(found) if counts is not None)

    async def forget(self, tenant: str, batch_ids: Sequence[str]) -> None:
        await self._log.drop_times(keys.stored_batches(tenant), [name.encode() for name in batch_ids])

    # -- driving ------------------------------------------------------------------------------------------------------

    async def active(self) -> list[str]:
        """The batches that have not ended."""
        return [name.decode() for name in await self._log.due(keys.BATCHES_ACTIVE, 1 << 62, _ALL)]

    async def ended(self, batch_id: str) -> None:
        """A batch has ended: nothing of it is needed but its facts."""
        await self._log.drop_times(keys.BATCHES_ACTIVE, [batch_id.encode()])
        counters = keys.counters(keys.batch_owner(batch_id))
        await self._log.delete_keys([keys.batch_results(batch_id), keys.batch_progress(batch_id), counters])

    async def take(self, batch_id: str, incarnation: str) -> int:
        """Own a batch if no other living gateway does: a new token, or 0. From then on the facts of all former owners
        are refused, but those of older releases, which write without a token.

        One that this gateway owns, and asks for, is one that it could not give back.
        """
        name = keys.batch_owner(batch_id)
        owner, _ = await self._log.owner(name)
        if owner and owner != incarnation and (await self._log.alive("gateway", [owner]))[0]:
            return 0
        token = await self._log.take_ownership(name, incarnation, owner)
        if token and not await self._fenced(batch_id, token):  # it ended meanwhile, and its tokens began again
            await self.release(batch_id, incarnation, token)
            return 0
        return token

    async def owns(self, batch_id: str, token: int) -> bool:
        return (await self._log.owner(keys.batch_owner(batch_id)))[1] == token

    async def release(self, batch_id: str, incarnation: str, token: int) -> None:
        await self._log.release_ownership(keys.batch_owner(batch_id), incarnation, token)

    async def add_result(
        self,
        batch_id: str,
        number: int,
        ok: bool,
        tokens: tuple[int, int],
        line: bytes,
        unstored: Sequence[str] = (),
    ) -> None:
        """Keep what became of a line. `unstored` are the ids of the jobs to delete after it."""
        about = orjson.dumps([number, ok, *tokens])
        jobs = [b"u", orjson.dumps(unstored)] if unstored else []
        await self._log.append(keys.batch_results(batch_id), [b"a", about, b"l", line, *jobs])

    async def results(self, batch_id: str) -> AsyncIterator[tuple[int, bool, tuple[int, int], bytes, list[str]]]:
        """What became of lines: number, ok, tokens, line, and the jobs to delete. The first result of a line is the one
        that counts.
        """
        after = START
        while entries := await self._log.range(keys.batch_results(batch_id), after, _RESULTS_PAGE):
            after = entries[-1].id
            for entry in entries:
                number, ok, prompt, answer = orjson.loads(entry.fields[1])
                unstored = orjson.loads(entry.fields[5]) if len(entry.fields) > 5 else []
                yield number, ok, (prompt, answer), bytes(entry.fields[3]), unstored

    async def report(self, batch_id: str, counts: Counts) -> None:
        """Publish how far a batch is."""
        await self._log.put_note(keys.batch_progress(batch_id), orjson.dumps(counts.note()), KEPT_S)

    async def progress(self, batch_ids: Sequence[str]) -> list[Counts | None]:
        notes = await self._log.notes([keys.batch_progress(batch_id) for batch_id in batch_ids])
        return [Counts.of_note(orjson.loads(note)) if note is not None else None for note in notes]

    async def sweep(self) -> None:
        """Delete the batches whose time is over."""
        over = await self._log.due(keys.BATCHES_EXPIRING, wall_ns() // 1000, _PAGE)
        for name in over:
            await self.ended(name.decode())
            await self._log.delete_stream(keys.batch_facts(name.decode()))
            await self._log.delete_keys([keys.batch_fence(name.decode())])
        await self._log.drop_times(keys.BATCHES_EXPIRING, over)
