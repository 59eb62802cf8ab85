"""Queue entries as a model's owner reads them: their requests, the read position of each stream, what is settled.

This module deletes a queue entry of single requests when all of them are settled, and a fact when the replies it holds
are sent. Deleting such a queue entry only saves space: a successor that finds an entry of settled requests deletes it.
The entry of a wave is not deleted by `Windows.settle`: its deletion is the settlement of the wave's requests
(docs/adr/0015). Decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from batcher.scheduling.observations import WAVE_BIT, RequestQueued
from charonia import keys
from charonia.calls.entry_packer import replies_of
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError, InvalidRecord
from charonia.eventlog.port import START, Entry, OnEntries, Reply, StreamReader, Streams
from charonia.tasks import insist
from charonia.wire import RequestRecord, Wave, records_of, requests_in, unpack_request, work_in

_log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Between two attempts of a batcher at what the log did not take."""
_GATHER_S = 0.05
_LEAST_PER_LANE = 128


# -- what an entry carries ---------------------------------------------------------------------------------------------


def requests_of(entry: Entry) -> list[RequestRecord]:
    """The requests of an entry, those of a wave one by one, without those that cannot be read."""
    try:
        return requests_in(entry.fields)
    except InvalidRecord:
        return _readable(entry)


def work_of(entry: Entry) -> list[RequestRecord | Wave]:
    """The work of an entry: requests and whole waves, without those that cannot be read."""
    try:
        return work_in(entry.fields)
    except InvalidRecord:
        return [*_readable(entry)]


def _readable(entry: Entry) -> list[RequestRecord]:
    found: list[RequestRecord] = []
    name = entry.id.decode(errors="replace")
    try:
        records = records_of(entry.fields)
    except InvalidRecord as error:
        _log.error("entry %s carries no readable records: %s", name, error)
        return found
    for record in records:
        try:
            found.append(unpack_request(record))
        except InvalidRecord as error:
            _log.error("dropped an unreadable request in %s: %s", name, error)
    return found


class CarrierEntry(Struct, eq=False, gc=False):
    """A queue entry and how many of its requests are not settled yet."""

    stream: bytes
    entry_id: bytes
    remaining: int


class Carried(Struct, eq=False, gc=False):
    """What the scheduler returns with a request: its record (for a wave, the wave) and its queue entry. `begun` is the
    highest attempt in the log: a settlement with a lower one would be fenced. `restored`: it was found at takeover, so
    every attempt is recorded, the first as well.
    """

    record: RequestRecord
    entry: CarrierEntry
    begun: int
    restored: bool = False
    settled: bool = False


def carried_of(request: RequestQueued) -> Carried:
    """What the batcher itself attached to the request."""
    carried = request.carrier
    assert isinstance(carried, Carried)
    return carried


class Deletions:
    """Deletes entries: gathers them for 50 ms (one command each costs two more wake-ups) and repeats until done."""

    def __init__(self, log: Streams) -> None:
        self._log = log
        self._wanted: dict[bytes, list[bytes]] = {}
        self._task: asyncio.Task[None] | None = None
        self.closed = False

    def add(self, stream: bytes, entry_id: bytes) -> None:
        self._wanted.setdefault(stream, []).append(entry_id)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._delete(), name="deletions")

    async def _delete(self) -> None:
        while self._wanted and not self.closed:
            await asyncio.sleep(_GATHER_S)
            wanted, self._wanted = self._wanted, {}
            failed = False
            for stream, ids in wanted.items():
                try:
                    await self._log.delete_entries(stream, ids)
                except CharoniaError:
                    # the settlements are recorded; the deletion waits until the log is back
                    self._wanted.setdefault(stream, []).extend(ids)
                    failed = True
            if failed:
                await asyncio.sleep(RETRY_S)

    async def done(self) -> None:
        """Wait until all requested deletions are done."""
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def close(self) -> None:
        self.closed = True
        if self._task is not None:
            self._task.cancel()


# -- how far it is read ------------------------------------------------------------------------------------------------


class QueueLane:
    """One queue stream. `entries` are those read and not finished, oldest first; `unsettled` counts their requests."""

    __slots__ = ("after", "behind", "catching_up", "entries", "followed", "number", "unsettled")

    def __init__(self, number: int) -> None:
        self.number = number
        self.after = START
        self.followed = False
        self.behind = False
        self.catching_up = False
        self.unsettled = 0
        self.entries: dict[bytes, None] = {}


class Windows:
    """The queue streams of one model: how far each is read, and what of it is unsettled.

    Every stream, that is every lane, has a window of its own: one with thousands of requests is left alone for a while,
    and another with one is still read. A stream that was longer than its window at takeover is `behind`: what follows
    was written before this owner, so it is read by pages that ask which requests are settled. `catch_up(stream)` reads
    on there; the owner sets it. `take` gets the entries that are read.
    """

    def __init__(self, reader: StreamReader, window_requests: int, deletions: Deletions, take: OnEntries) -> None:
        self._reader = reader
        self._take = take
        self._window = window_requests
        self._limit = window_requests
        """Max unsettled requests of one stream; beyond it, reading pauses."""
        self._deletions = deletions
        self.catch_up: Callable[[bytes], None] = lambda _stream: None
        self.lanes: dict[bytes, QueueLane] = {}
        self._joined: dict[bytes, list[RequestQueued]] = {}
        """By request id, what was read of requests with several entries."""
        self._following = False
        self.settled_requests = 0
        self.in_waves = 0
        """The unsettled requests that are in waves: the log does not count these."""

    @property
    def unsettled(self) -> int:
        """Requests that were read and are not settled."""
        return sum([lane.unsettled for lane in self.lanes.values()])

    @property
    def all_read(self) -> bool:
        """Whether every stream was read to its end."""
        return all(lane.followed for lane in self.lanes.values())

    def has_read(self, stream: bytes, entry_id: bytes) -> bool:
        """Whether an entry that is in a stream now was read."""
        return _place(entry_id) <= _place(self.lanes[stream].after)

    def oldest(self) -> bytes | None:
        """The id of the oldest entry that is, or may be, unfinished; None when nothing is."""
        found = [next(iter(lane.entries)) for lane in self.lanes.values() if lane.entries]
        found += [lane.after for lane in self.lanes.values() if not lane.followed and not lane.entries]
        return min(found, key=_place, default=None)

    def open(self, stream: bytes, lane: int) -> None:
        """Add a stream; `lane` is the number of its tenants."""
        if stream not in self.lanes:
            self.lanes[stream] = QueueLane(lane)
            self._limit = max(min(self._window, _LEAST_PER_LANE), self._window // len(self.lanes))
            if self._following:
                self._follow(stream)

    def follow(self) -> None:
        """Start reading all streams, each from where it was read to."""
        self._following = True
        for stream, lane in self.lanes.items():
            if lane.behind:
                # its requests may have been settled before this call, so that no settlement would resume it
                self._read_on(stream, lane)
            elif not lane.followed:
                self._follow(stream)

    def read(
        self,
        stream: bytes,
        entries: Sequence[Entry],
        attempts: Mapping[bytes, int] | None,
        called: set[bytes],
    ) -> list[RequestQueued]:
        """The requests of these entries, in order, with their times on the monotonic clock. `attempts`, for entries
        written before this owner, holds the attempt of each request and -1 for settled ones; these are left out. An
        empty entry is deleted. The ids of requests that models made go into `called`.
        """
        now = monotonic_ns()
        offset = now - wall_ns()
        lane = self.lanes[stream]
        queued: list[RequestQueued] = []
        for entry in entries:
            lane.after = entry.id
            try:
                work = work_in(entry.fields)
            except InvalidRecord:
                work = [*_readable(entry)]
            if len(work) == 1 and type(work[0]) is Wave:
                carrier = CarrierEntry(stream, entry.id, work[0].count)
                self.in_waves += carrier.remaining
                queued.append(_wave(work[0], carrier, lane.number, now, offset))
            else:
                records = [record for record in work if isinstance(record, RequestRecord)]
                if attempts is not None:
                    records = [record for record in records if attempts.get(record.id, -1) >= 0]
                if not records:
                    self._deletions.add(stream, entry.id)
                    continue
                carrier = CarrierEntry(stream, entry.id, len(records))
                for record in records:
                    begun = attempts[record.id] if attempts is not None else 0
                    enqueued_ns = record.accepted_ns + offset
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
                            lane.number,
                            record.sequence,
                            record.meta,
                        )
                    )
                    if record.lineage is not None and record.lineage.ancestors:
                        called.add(record.id)
            lane.unsettled += carrier.remaining
            lane.entries[entry.id] = None
        return queued

    def is_full(self, stream: bytes) -> bool:
        return self.lanes[stream].unsettled >= self._limit

    def pause_if_full(self, stream: bytes) -> bool:
        """Pause reading a stream whose window is full; returns whether it was being read."""
        lane = self.lanes[stream]
        if lane.followed and lane.unsettled >= self._limit:
            lane.followed = False
            self._reader.remove(stream)
            return True
        return False

    def fell_behind(self, stream: bytes, behind: bool) -> None:
        """Whether the unread rest of a stream was written before this owner."""
        lane = self.lanes[stream]
        lane.behind, lane.catching_up = behind, False
        if self._following and not behind:
            self._follow(stream)

    def settle(self, requests: Collection[RequestQueued]) -> None:
        """The log has an outcome of these requests; repeated calls change nothing."""
        for request in requests:
            carried = request.carrier
            if carried.settled:
                continue
            carried.settled = True
            entry, count = carried.entry, request.count
            lane = self.lanes[entry.stream]
            self.settled_requests += count
            lane.unsettled -= count
            entry.remaining -= count
            if entry.remaining == 0:
                lane.entries.pop(entry.entry_id, None)
                if request.wave:  # it is deleted by its settlement
                    self.in_waves -= count
                else:
                    self._deletions.add(entry.stream, entry.entry_id)
            if not lane.followed:
                self._read_on(entry.stream, lane)
        if self._joined:
            for request in requests:
                self._settle_joined(request.id)

    def join(self, known: RequestQueued, again: RequestQueued) -> None:
        """A request or wave was read from another entry, too: settle both together. The younger record is sent, and
        attempts are as they were in either.
        """
        one, other = carried_of(known), carried_of(again)
        one.record = other.record
        one.begun = other.begun = max(one.begun, other.begun)
        one.restored = other.restored = one.restored or other.restored
        self._joined.setdefault(known.id, [known]).append(again)
        if one.settled:
            self._settle_joined(known.id)

    def _settle_joined(self, request_id: bytes) -> None:
        for request in self._joined.pop(request_id, ()):
            self.settle((request,))
            if request.wave:  # the settlement has deleted one of its entries
                entry = carried_of(request).entry
                self._deletions.add(entry.stream, entry.entry_id)

    def close(self) -> None:
        self._following = False
        for stream in self.lanes:
            self._reader.remove(stream)

    def _read_on(self, stream: bytes, lane: QueueLane) -> None:
        """Resume reading a paused stream once half of its window is free."""
        if self._following and not lane.catching_up and lane.unsettled <= self._limit // 2:
            if lane.behind:
                lane.catching_up = True
                self.catch_up(stream)
            else:
                self._follow(stream)

    def _follow(self, stream: bytes) -> None:
        lane = self.lanes[stream]
        lane.followed = True
        self._reader.add(stream, lane.after, take=self._take)


def _wave(wave: Wave, carrier: CarrierEntry, lane: int, now_ns: int, offset_ns: int) -> RequestQueued:
    """A wave as one queue item. Its signature differs from that of its requests: they do not share batches with it."""
    enqueued_ns = wave.accepted_ns + offset_ns
    deadline_ns = min([one for one in wave.deadlines if one], default=0) if wave.deadlines else 0
    return RequestQueued(
        wave.id,
        wave.meta.version,
        wave.level,
        wave.rows * wave.count,
        wave.signature ^ WAVE_BIT,
        wave.timeout_us,
        deadline_ns + offset_ns if deadline_ns else 0,
        enqueued_ns if enqueued_ns < now_ns else now_ns,
        0,
        Carried(wave, carrier, 0),  # type: ignore[arg-type]
        lane,
        None,
        wave.meta,
        wave.count,
        True,
    )


def _place(entry_id: bytes) -> tuple[int, int]:
    time, _, number = entry_id.partition(b"-")
    return int(time), int(number or 0)


class FactStream:
    """The facts that executors and gateways write for the owner of a model. `after` is the last entry that was read.

    Where answers have an order (S6), a fact may hold the replies of a batch, and is the only copy of these answers. So
    its entry is deleted when they are sent, not when it was read. `held` are those replies by batch id.
    """

    def __init__(
        self,
        log: Streams,
        reader: StreamReader,
        model: str,
        deletions: Deletions,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        take: OnEntries,
    ) -> None:
        self._log = log
        self._reader = reader
        self._take = take
        self._deletions = deletions
        self._spawn = spawn
        self.stream = keys.facts(model)
        self.after = START
        self._keeps: bool | None = None
        """Whether entries are deleted here; None before they are read."""
        self.held: dict[str, tuple[tuple[tuple[str, bytes], ...], CarrierEntry]] = {}

    def follow(self, keep: bool) -> None:
        """Read on. `keep`: delete an entry from the log only when the replies it may hold are sent."""
        if self._keeps is None or (keep and not self._keeps):
            self._reader.remove(self.stream)
            self._reader.add(self.stream, self.after, consume=not keep, take=self._take)
            self._keeps = keep

    def hold(self, batch_id: str, replies: tuple[tuple[str, bytes], ...], keeper: CarrierEntry) -> None:
        """Keep (endpoint, response record) pairs until their batch is released; a repeated call changes nothing."""
        if replies and batch_id not in self.held:
            self.held[batch_id] = (replies, keeper)
            keeper.remaining += 1

    def release(self, batch_id: str) -> None:
        """Send the held replies of a batch."""
        replies, keeper = self.held.pop(batch_id, ((), None))
        if keeper is None:
            return
        found = replies_of(replies)
        keeper.remaining += len(found)
        for reply in found:
            self._spawn(self._send(reply, keeper))
        self.handled(keeper)

    async def _send(self, reply: Reply, keeper: CarrierEntry) -> None:
        """Send all held replies; their requests are settled, so no other owner would."""
        append = partial(self._log.append, reply.stream, reply.fields)
        await insist(append, "a reply held for its order could not be sent", first_s=RETRY_S, last_s=RETRY_S)
        self.handled(keeper)

    def handled(self, keeper: CarrierEntry) -> None:
        """Drop one reference to an entry; its reader deletes entries that it consumes."""
        keeper.remaining -= 1
        if keeper.remaining == 0 and self._keeps and keeper.stream == self.stream:
            self._deletions.add(keeper.stream, keeper.entry_id)
