"""An owner's periodic checks: batches that no process reports, jobs the log lost, the seals and length of the journal.

A killed log server forgets its last writes, and an operator may delete a stream: requests that are in no stream any
more would wait for ever. This is rare, and is found by counting rather than by reading.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from batcher.entries.bursting import burst_wave
from batcher.entries.carriers import carried_of, requests_of, work_of
from batcher.owner.owned import OwnedModel
from batcher.scheduling.observations import RequestQueued
from batcher.takeover.recovery import visible_requests
from charonia import keys
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import InternalError
from charonia.eventlog.port import START
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobRecord, JobState
from charonia.wire import FIELD_WAVE, Wave, pack_failure

from .adaptive_report import AdaptiveReport
from .journal_sealing import JournalSealing
from .left_steps import cancel_left_steps
from .stream_trimming import trim_dead_letters

_log = logging.getLogger(__name__)

_PAGE = 500
_HEAD = 16
_LOOK_NS = 10_000_000_000
_TRIM_NS = 30_000_000_000
_YOUNG_US = 5_000_000
"""Jobs younger than this may still be in transit."""
_MARKED_US = 300_000_000
"""Marks (`keys.visible`) younger than this are removed by the process that ends their requests."""
_SKEW_MS = 60_000
"""Max difference between a gateway's clock, which stamps jobs, and the log's, which numbers entries."""
LOST = "the log lost this request"
NOTHING_UNFINISHED = b"+"


async def verify(owned: OwnedModel, min_age_ns: int) -> None:
    """Compare the batches sent at least `min_age_ns` ago with those in the log. The log may have lost a batch or the
    fact that it finished, and a former owner that stalled may have read a fact meant for this one.
    """
    for executor, batch_ids in owned.dispatched.older_than(min_age_ns).items():
        held = await owned.dispatched.held(executor)
        for batch_id in batch_ids:
            if batch_id in held:
                owned.dispatched.verified(batch_id)
                continue
            if batch_id not in owned.dispatched or owned.closed:
                continue
            is_left = await _is_left(owned, owned.dispatched.requests(batch_id))
            if owned.closed or batch_id not in owned.dispatched:
                continue
            if not is_left:
                owned.batch_finished(batch_id, executor)
            else:
                _log.warning("batch %s of model '%s' was lost on its way: it is sent again", batch_id, owned.model)
                owned.batch_returned(batch_id, executor, "lost on its way")


async def _is_left(owned: OwnedModel, requests: Sequence[RequestQueued]) -> bool:
    """Whether the log has any of these requests or waves as unsettled."""
    waves: dict[bytes, list[bytes]] = {}
    for request in requests:
        if request.wave:
            entry = carried_of(request).entry
            waves.setdefault(entry.stream, []).append(entry.entry_id)
    for stream, entry_ids in waves.items():
        if any(await owned.log.waves.waiting(stream, entry_ids)):
            return True
    ids = [request.id for request in requests if not request.wave]
    return any(attempt >= 0 for attempt in await owned.log.unsettled(owned.model, ids))


class ModelChecks:
    """The rarer checks of one model; `look` may be called at any rate. `letters_size_bytes` bounds its dead letters, 0
    for no bound. `seal_s` is the time between seals of its journal, 0 for none.
    """

    def __init__(self, owned: OwnedModel, letters_size_bytes: int = 0, seal_s: int = 0) -> None:
        self._owned = owned
        self._letters_size_bytes = letters_size_bytes
        self._letters_seen = -1
        self.sealing = JournalSealing(owned.log, owned.model) if seal_s else None
        """None if the journal is not sealed."""
        self._seal_every_ns = seal_s * 1_000_000_000
        self._look_ns = self._trim_ns = self._seal_ns = monotonic_ns()
        self._waves_ns = self._look_ns + _LOOK_NS
        self._doubted = self._hold_doubted = False
        self._overlooked: set[bytes] = set()
        self._forgotten: set[tuple[bytes, bytes]] = set()
        self._adaptive = AdaptiveReport(owned.log, owned.model)
        self._ended_after: tuple[int, bytes] | None = None

    def look_for_waves(self) -> None:
        """An executor left, perhaps with answers that it had announced and not sent: check soon."""
        self._waves_ns = 0

    async def look(self) -> None:
        """Run the checks that are due. Raises what the log raises."""
        await self._adaptive.look(self._owned.scheduler)
        now = monotonic_ns()
        if self._forgotten or now >= self._waves_ns:
            self._waves_ns = now + _LOOK_NS
            await self.burst_forgotten()
        if now >= self._look_ns + _LOOK_NS:
            self._look_ns = now
            await self.compare_hold()
            await self.find_lost()
            await self._forget_expired()
            await cancel_left_steps(self._owned)
        if self.sealing is not None and now >= self._seal_ns + self._seal_every_ns and not await self.sealing.seal():
            self._seal_ns = now
        if now >= self._trim_ns + _TRIM_NS:
            self._trim_ns = now
            if self._owned.dispatched.streams_once:
                await visible_requests(self._owned.log, self._owned.model, wall_ns() // 1000 - _MARKED_US)
            if self._owned.dispatched.resumable:
                await self._drop_progress()
            oldest = await self._oldest_unfinished()
            sealed = self.sealing is not None and not self.sealing.refused
            await self._owned.log.trim_journal(self._owned.model, oldest, sealed=sealed)
            condemned = self._owned.condemned
            if self._letters_size_bytes and condemned != self._letters_seen:
                await trim_dead_letters(self._owned.log, self._owned.model, self._letters_size_bytes)
                self._letters_seen = condemned

    async def _drop_progress(self) -> None:
        """Delete the progress of requests that a process of an older release has settled."""
        log, model = self._owned.log, self._owned.model
        ids = await log.progress_ids(model)
        attempts = await log.unsettled(model, ids)
        await log.drop_progress(model, [one for one, attempt in zip(ids, attempts, strict=True) if attempt < 0])

    async def _forget_expired(self) -> None:
        """Read on among the ended jobs: reading deletes expired ones. Settlements check the oldest only, and one with a
        long retention may stand before many expired ones. These would count against the model's bound, and jobs that
        are still wanted would be deleted for them.
        """
        log, model = self._owned.log, self._owned.model
        page = await log.jobs(model, ended=True, after=self._ended_after, count=_PAGE)
        self._ended_after = (page[-1].ended_us, page[-1].id) if len(page) == _PAGE else None

    async def _oldest_unfinished(self) -> bytes:
        """The oldest part of the journal that must stay. Ids are milliseconds and a number, which each stream counts
        for itself. A job's entry in the queue may be much younger than its beginning in the journal, if it was moved.
        """
        oldest = self._owned.windows.oldest()
        kept_ms = [int(oldest.partition(b"-")[0])] if oldest is not None else []
        for job in await self._owned.log.jobs(self._owned.model, ended=False, count=1):
            kept_ms.append(max(0, job.accepted_us // 1000 - _SKEW_MS))
        return b"%d-0" % min(kept_ms) if kept_ms else NOTHING_UNFINISHED

    async def burst_forgotten(self) -> int:
        """Burst waves that were read and that this owner does not know, if two checks in a row find them; returns how
        many. Their executor was lost after it reported their end and before it deleted them, or a killed log lost the
        deletion. Most were answered; their gateway then drops the new answers. Only the oldest entries are checked: the
        others follow with the next checks.
        """
        owned = self._owned
        found: dict[tuple[bytes, bytes], Wave] = {}
        for stream in list(owned.windows.lanes):
            for entry in await owned.log.range(stream, START, _HEAD):
                entry_id = bytes(entry.id)
                if FIELD_WAVE not in entry.fields or not owned.windows.has_read(stream, entry_id):
                    continue
                if entry_id not in owned.windows.lanes[stream].entries:
                    (wave,) = work_of(entry) or (None,)
                    if isinstance(wave, Wave):
                        found[stream, entry_id] = wave
        again, self._forgotten = found.keys() & self._forgotten, set(found)
        for stream, entry_id in again:
            _log.warning("a wave of model '%s' is in the log and not known to its owner: it is burst", owned.model)
            await burst_wave(owned.log, owned.model, stream, entry_id, found[stream, entry_id])
        return len(again)

    async def compare_hold(self) -> None:
        """Hold the queue back as the log says, if it says otherwise in two checks in a row: a former owner that had not
        yet learnt of its end may have read the command, and a fact that was read is deleted.
        """
        paused = await self._owned.log.paused(self._owned.model)
        differs = paused is not self._owned.is_held
        if differs and self._hold_doubted and not self._owned.closed:
            self._owned.hold(paused)
        self._hold_doubted = differs

    async def _open_lanes(self) -> bool:
        """Read lanes of which this owner was not told: a former owner may have read the fact. Whether there are any."""
        owned = self._owned
        lanes = [(keys.queue(owned.model, level, lane), lane) for level, lane in await owned.log.lanes(owned.model)]
        unread = [(stream, lane) for stream, lane in lanes if stream not in owned.windows.lanes]
        for stream, lane in unread:
            if not owned.closed:
                owned.windows.open(stream, lane)
        return bool(unread)

    async def find_lost(self) -> int:
        """End requests that the log counts and no stream has, if two checks in a row find too many; returns how many.
        Jobs fail. Other callers get their error from their gateway, which sees that the request is over without an
        answer. Entries behind the window cannot be counted, so such a model is checked after they were read. Entries of
        a stream that were read and are unknown here belong to another owner, which reads them again.
        """
        owned = self._owned
        windows = owned.windows
        known = windows.unsettled - windows.in_waves
        pending, _ = await owned.log.pending(owned.model)
        known = max(known, windows.unsettled - windows.in_waves)
        doubted, self._doubted = self._doubted, windows.all_read and pending > known
        if not (doubted and self._doubted):
            self._overlooked.clear()
            return 0
        if await self._open_lanes():
            return 0
        jobs = await self._unheard()
        unsettled = await owned.log.unsettled_ids(owned.model)
        missing = jobs.keys() | {i for i in unsettled if owned.scheduler.find(i) is None}
        if missing:
            overlooked = await self._forget_found(missing)
            again, self._overlooked = overlooked & self._overlooked, overlooked
            if again:
                owned.failed(InternalError(f"{len(again)} requests were read and are not known, as {min(again).hex()}"))
                return 0
        lost = [job for job in jobs.values() if job.id in missing]
        if lost and not owned.closed:
            await self._fail(lost)
        return len(lost) + await self._end_others(list(missing - jobs.keys())[:_PAGE])

    async def _unheard(self) -> dict[bytes, JobRecord]:
        """Active jobs the scheduler does not know."""
        owned = self._owned
        until_us = wall_ns() // 1000 - _YOUNG_US
        found: dict[bytes, JobRecord] = {}
        after: tuple[int, bytes] | None = None
        while page := await owned.log.jobs(owned.model, ended=False, after=after, count=_PAGE):
            found |= {j.id: j for j in page if j.accepted_us <= until_us and owned.scheduler.find(j.id) is None}
            after = (page[-1].accepted_us, page[-1].id)
        return found

    async def _forget_found(self, missing: set[bytes]) -> set[bytes]:
        """Remove those that a queue stream has after all: they are being read or settled. Returns those it read. Lanes
        are those of the log: one may be so young that this owner has not read of it.
        """
        read: set[bytes] = set()
        windows, model = self._owned.windows, self._owned.model
        for level, lane in await self._owned.log.lanes(model):
            stream, after = keys.queue(model, level, lane), START
            while entries := await self._owned.log.range(stream, after, _PAGE):
                for entry in entries:
                    found = {record.id for record in requests_of(entry)} & missing
                    missing -= found
                    if stream in windows.lanes and windows.has_read(stream, entry.id):
                        read |= found
                after = entries[-1].id
        return {request_id for request_id in read if self._owned.scheduler.find(request_id) is None}

    async def _fail(self, jobs: list[JobRecord]) -> None:
        owned = self._owned
        _log.error("%d jobs of model '%s' are in no stream of the log: they are failed", len(jobs), owned.model)
        attempts = await owned.log.unsettled(owned.model, [job.id for job in jobs])
        left = [(job, attempt) for job, attempt in zip(jobs, attempts, strict=True) if attempt >= 0]
        ends = {}
        for job, _ in left:
            version = job.about.get("version")
            answer = pack_failure(job.id, owned.model, version if type(version) is int else 0, InternalError(LOST))
            ends[job.id] = JobEnd(JobState.FAILED, answer, {"error": LOST})
        requests = [(job.id, max(1, attempt)) for job, attempt in left]
        failed = OUTCOME_CODES[JobState.FAILED]
        outcomes = b"".join([b"-" if job.about.get("unjournalled") else failed for job, _ in left])
        outcomes = outcomes if outcomes.strip(b"-") else b""
        await owned.log.settle(owned.model, requests, None, [], ends=ends, outcomes=outcomes)

    async def _end_others(self, ids: list[bytes]) -> int:
        """End lost requests that are not jobs; returns how many."""
        owned = self._owned
        ids = [request_id for request_id in ids if await owned.log.job(owned.model, request_id) is None]
        attempts = await owned.log.unsettled(owned.model, ids)
        left = [(i, max(1, attempt)) for i, attempt in zip(ids, attempts, strict=True) if attempt >= 0]
        if not left or owned.closed:
            return 0
        _log.error("%d requests of model '%s' are in no stream of the log: they are ended", len(left), owned.model)
        return sum(await owned.log.settle(owned.model, left, None, []))
