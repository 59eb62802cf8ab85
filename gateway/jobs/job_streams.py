"""A job's events and responses as one stream, which any number of readers can follow and resume.

Of a job with several responses the log keeps each by its index, except the last, which is the result. A follower reads
them page by page at its own pace; the log's streams only wake it. That an outcome was given to a caller is noted
(`JobDeliveries`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InternalError, InvalidRecord, NotFound, StreamInterrupted
from charonia.eventlog.port import Entry, JobLog, Notes
from charonia.facts.jobs import DeliveryNote, JobEvent, JobRecord, JobState
from charonia.tasks import Tasks
from charonia.wire import ResponseRecord, unpack_response
from gateway.requests.delivery import JOB_NOT_FOUND, Caller

from .job_views import outcome_of
from .job_watches import JobWatch, JobWatches

_PAGE = 32
"""Max responses that a follower holds: a page is read once the one before is taken."""
_MOST_AT_ONCE = 200
"""Max notes being written. While the log is slow, deliveries beyond that are not noted."""
_MOST_KNOWN = 1_000
"""Jobs remembered here, so that one whose result is asked for again and again costs the log nothing more."""
_LEAST_KEPT_S = 60
"""The minimum time that a note is kept, also of a job whose record goes at once."""
_PATIENCE_S = 1.0
"""How long a gateway that stops waits for its last notes."""


class JobDeliveries:
    """Writes the notes of one gateway that it first gave the outcome of a job to a caller (ADR 0070).

    A note is written by a task, for which the answer does not wait; if the log fails, the note is missing. A note says
    that the outcome was handed to the front of a caller. Whether it reached the client is not known.
    """

    def __init__(self, log: Notes, gateway: str) -> None:
        self._log = log
        self._gateway = gateway
        self._known: dict[bytes, None] = {}
        self._tasks = Tasks()

    def given(self, model: str, job_id: bytes, retention_s: int) -> None:
        """Note that a caller gets the outcome now; `retention_s` is how long the job's record stays after its end."""
        if job_id in self._known or len(self._tasks) >= _MOST_AT_ONCE:
            return
        self._known[job_id] = None
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        note = DeliveryNote(wall_ns() // 1000, self._gateway).pack()
        self._tasks.spawn(self._write(model, job_id, note, max(retention_s, _LEAST_KEPT_S)))

    async def _write(self, model: str, job_id: bytes, note: bytes, ttl_s: int) -> None:
        key = keys.job_delivery(model, job_id)
        try:
            if await self._log.notes([key]) == [None]:
                await self._log.put_note(key, note, ttl_s)
        except CharoniaError:
            self._known.pop(job_id, None)  # the next answer tries again

    async def close(self) -> None:
        """Wait for the notes being written, for a second at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._tasks.settled()
        await self._tasks.close()


class JobStreams:
    """The followers of one gateway."""

    def __init__(self, log: JobLog, watches: JobWatches, deliveries: JobDeliveries) -> None:
        self._log = log
        self._watches = watches
        self._deliveries = deliveries
        self._reader = log.reader()
        self._reading = False
        self._followers: dict[bytes, set[asyncio.Event]] = {}
        self._begins: dict[bytes, int] = {}
        """By stream: the index of the response after which it is read."""

    async def close(self) -> None:
        if self._reading:
            await self._reader.close()

    async def updates(
        self, record: JobRecord, caller: Caller, after_number: int = 0, after_index: int = -1
    ) -> AsyncGenerator[JobEvent | ResponseRecord]:
        """The events above `after_number` as they come, the terminal one last. Of a decoupled model also responses.

        Responses are those above `after_index`. Raises `StreamInterrupted` if one is missing, `ResourceExhausted` if
        too many follow jobs here. Ends at once if the log forgets the job.
        """
        woken = asyncio.Event()
        decoupled = bool(record.about.get("decoupled"))
        async with contextlib.AsyncExitStack() as following:
            watch: JobWatch | None = None
            known = record
            while True:
                ended = known.state.terminal
                for event in known.events[:-1] if ended else known.events:
                    if event.number > after_number:
                        after_number = event.number
                        yield event
                if decoupled:
                    async for index, response in self._kept(record, after_index):
                        after_index = index
                        yield response
                if ended:
                    break
                if watch is None:
                    watch = await following.enter_async_context(self._watches.watching(record.model, record.id, caller))
                    following.enter_context(self._waking(watch, woken, after_index, decoupled))
                    # what happened before did not wake this reader, and where the job has ended nothing will
                    if watch.gone:
                        return
                    known = watch.record or known
                    continue
                await woken.wait()
                woken.clear()
                watch.check()
                if watch.gone:
                    return
                known = watch.record or known
        last = await self._last(known) if decoupled else None
        if last is not None and (last.place is None or last.place[1] > after_index):
            yield last
        if known.events and known.events[-1].number > after_number:
            yield known.events[-1]

    async def responses(
        self, record: JobRecord, caller: Caller, after_index: int, *, noted: bool = True
    ) -> AsyncGenerator[ResponseRecord]:
        """Only the responses, also of a job with a single one. Raises the job's error at the end.

        The delivery is noted before the final response, after which a reader may not come again, and before the error.
        Without `noted`, only the delivery of an error is noted here, and the caller notes that of responses.
        """
        number = len(record.events)
        async with contextlib.aclosing(self.updates(record, caller, number, after_index)) as updates:
            async for update in updates:
                if isinstance(update, ResponseRecord):
                    if update.final and noted:
                        self._deliveries.given(record.model, record.id, record.retention_s)
                    yield update
        ended = await self._log.job(record.model, record.id)
        outcome = None if ended is None else await outcome_of(self._log, ended)
        if outcome is None:
            raise NotFound(JOB_NOT_FOUND)
        if noted or outcome.error is not None:
            self._deliveries.given(record.model, record.id, record.retention_s)
        if outcome.error is not None:
            raise outcome.error
        if not record.about.get("decoupled") and after_index < 0:
            yield outcome

    async def _kept(self, record: JobRecord, after_index: int) -> AsyncGenerator[tuple[int, ResponseRecord]]:
        while page := await self._log.job_responses(record.model, record.id, after_index, _PAGE):
            for _attempt, index, packed in page:
                if index != after_index + 1:
                    raise StreamInterrupted(f"response {after_index + 1} of the job is not kept any more")
                after_index = index
                yield index, _unpacked(packed)

    async def _last(self, record: JobRecord) -> ResponseRecord | None:
        """The last response of a job that succeeded."""
        if record.state is not JobState.SUCCEEDED or not record.result_size_bytes:
            return None
        result = await self._log.job_result(record.model, record.id)
        return _unpacked(result) if result else None

    @contextlib.contextmanager
    def _waking(self, watch: JobWatch, woken: asyncio.Event, after_index: int, decoupled: bool) -> Iterator[None]:
        """Set `woken` whenever the job's record changes, or it has a response."""
        watch.followers.add(woken)
        try:
            if not decoupled:
                yield
                return
            with self._reading_responses(watch, woken, after_index):
                yield
        finally:
            watch.followers.discard(woken)

    @contextlib.contextmanager
    def _reading_responses(self, watch: JobWatch, woken: asyncio.Event, after_index: int) -> Iterator[None]:
        stream = keys.job_responses(watch.model, watch.job_id)
        if not self._reading:
            self._reading = True
            self._reader.start(self._on_entries)
        followers = self._followers.setdefault(stream, set())
        begin = self._begins.get(stream)
        if begin is None or after_index < begin:  # the first one may have named a response that does not exist yet
            if begin is not None:
                self._reader.remove(stream)
            self._begins[stream] = after_index
            self._reader.add(stream, b"%d-0" % (after_index + 1))
        followers.add(woken)
        try:
            yield
        finally:
            followers.discard(woken)
            if not followers:
                self._followers.pop(stream, None)
                self._begins.pop(stream, None)
                self._reader.remove(stream)

    def _on_entries(self, stream: bytes, _entries: list[Entry]) -> None:
        for woken in self._followers.get(stream, ()):
            woken.set()


def _unpacked(packed: bytes) -> ResponseRecord:
    try:
        return unpack_response(packed)
    except InvalidRecord as error:
        raise InternalError(f"a response of this job cannot be read: {error}") from None
