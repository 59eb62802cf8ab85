"""One owned model: feeds its pure scheduler with what the log says and carries out what the scheduler decides.

A queue entry stays in the log until every request it carries is settled; so the queue alone is the truth a successor
recovers from, and deleting an entry is only tidying. Batches and replies are appended, never awaited in line.

Longer than most modules because it is one state: what was read, what was given out and what is settled must agree at
every await, and each part that could leave has (`carriers`, `dispatching`, `refusals`, `recovery`, `scheduling`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from charonia import keys
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import Cancelled, CharoniaError, InvalidRecord
from charonia.eventlog.control import facts_of
from charonia.eventlog.port import START, Entry, EventLog, StreamReader
from charonia.events import BatchFinished, BatchReturned, LaneOpened, RequestCancelled
from charonia.models.catalog import ServedVersion
from charonia.tensors import Buffer
from charonia.wire import (
    BatchHeader,
    RequestRecord,
    record_fields,
    unpack_request,
)

from .carriers import Carried, CarrierEntry, Deletions, HeldReplies, carried, carrier_of
from .dispatching import Dispatcher
from .refusals import refuse
from .scheduling import observations as seen
from .scheduling.decisions import Decision, DispatchBatch, RejectRequest, ReleaseReplies
from .scheduling.scheduler import ModelScheduler

_log = logging.getLogger(__name__)

_RETRY_S = 0.2


class OwnedModel:
    """The shell around one `ModelScheduler`. `lost_ownership` is called when the log says somebody else owns it."""

    def __init__(
        self,
        log: EventLog,
        reader: StreamReader,
        model: str,
        token: int,
        incarnation: str,
        *,
        local_executor: str,
        prefetch: int,
        window_requests: int,
        lost_ownership: Callable[[str], None],
    ) -> None:
        self.model = model
        self.token = token
        self.scheduler = ModelScheduler(batch_prefix=f"{incarnation}-{token}", prefetch=prefetch)
        self.settled_requests = 0
        self._log = log
        self._reader = reader
        self._local_executor = local_executor
        self._window = window_requests
        self._lost_ownership = lost_ownership
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ns = 0
        self._streams: dict[bytes, bytes] = {}
        self._paused = False
        self._deletions = Deletions(log)
        self._held_replies: dict[str, HeldReplies] = {}
        self._batches: dict[str, tuple[str, list[seen.RequestQueued]]] = {}
        self._sent: dict[str, int] = {}
        """When each batch now with an executor of another process was given to it."""
        self._facts_after = START
        self._keeps_facts: bool | None = None
        self._policy_hash = ""
        self._held: frozenset[int] | None = None
        self._capacity: dict[tuple[str, int], tuple[str, int]] = {}
        self._dispatcher = Dispatcher(log, model, token, local_executor=local_executor)
        self.closed = False

    # -- life ---------------------------------------------------------------------------------------------------------

    def follow(self, lanes: Iterable[tuple[bytes, bytes]]) -> None:
        """Start reading queue streams, each from after an entry id. Facts follow with the first `on_served`."""
        for stream, after in lanes:
            if stream not in self._streams:
                self._streams[stream] = after
                self._reader.add(stream, after)

    def _follow_facts(self, keep: bool) -> None:
        """Read the fact streams. `keep`: a shared fact is deleted only when the replies it may hold are sent (S6)."""
        if self._keeps_facts is None and self._local_executor:
            self._reader.add(self._dispatcher.facts_local, consume=True)
        if self._keeps_facts is None or (keep and not self._keeps_facts):
            self._reader.remove(self._dispatcher.facts_shared)
            self._reader.add(self._dispatcher.facts_shared, self._facts_after, consume=not keep)
            self._keeps_facts = keep

    def close(self) -> None:
        """Stop deciding; what is queued stays in the log for the next owner."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for stream in (*self._streams, *self.fact_streams):
            self._reader.remove(stream)
        self._deletions.close()
        for task in self._tasks:
            task.cancel()

    async def settled(self) -> None:
        """Wait for the appends, settlements and deletions under way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._deletions.done()

    # -- what the log says --------------------------------------------------------------------------------------------

    def on_entries(self, stream: bytes, entries: list[Entry]) -> None:
        if self.closed:
            return
        if stream in (self._dispatcher.facts_shared, self._dispatcher.facts_local):
            for entry in entries:
                self._on_facts(stream, entry)
            if stream == self._dispatcher.facts_shared:
                self._facts_after = entries[-1].id
        else:
            self._streams[stream] = entries[-1].id
            self._queue(stream, entries, None)
            if not self._paused and self.scheduler.pending_count() >= self._window:
                self._pause()
        self._arm()

    def restore(
        self, stream: bytes, entries: list[Entry], attempts: dict[bytes, int]
    ) -> dict[bytes, seen.RequestQueued]:
        """Recovery: queue what is unsettled of entries written before this owner; settled entries are deleted.

        Returns what was queued, by request id.
        """
        return {request.id: request for request in self._queue(stream, entries, attempts)}

    def restore_running(self, header: BatchHeader, executor: str, requests: list[seen.RequestQueued]) -> None:
        """Recovery: an executor holds this batch of a former owner; `requests` are its unsettled members.

        A batch of settled requests is finished: only its entry is not deleted yet, and its slot is free.
        """
        if not requests:
            return
        self._batches[header.batch_id] = (executor, requests)
        self._sent[header.batch_id] = monotonic_ns()
        running = seen.BatchRunning(header.batch_id, executor, header.version, requests, header.via_owner)
        self._apply(self.scheduler.observe(running, monotonic_ns()))

    def _queue(
        self, stream: bytes, entries: list[Entry], attempts: dict[bytes, int] | None
    ) -> list[seen.RequestQueued]:
        """Show the scheduler the requests of these entries at once: what arrived together may be batched together."""
        now = monotonic_ns()
        offset = now - wall_ns()
        queued: list[seen.RequestQueued] = []
        for entry in entries:
            records = self._records(entry, attempts)
            if not records:
                self._deletions.add(stream, entry.id)
                continue
            carrier = CarrierEntry(stream, entry.id, len(records))
            for record in records:
                enqueued_ns = record.accepted_ns + offset
                begun = attempts[record.id] if attempts is not None else 0
                queued.append(
                    seen.RequestQueued(
                        record.id,
                        record.meta.version,
                        record.level,
                        record.rows,
                        record.signature,
                        record.timeout_us,
                        record.deadline_ns + offset if record.deadline_ns else 0,
                        enqueued_ns if enqueued_ns < now else now,
                        begun,
                        Carried(record, carrier, begun),
                    )
                )
        decisions = self.scheduler.observe_all(queued, now)
        if self._held is not None and any(request.version not in self._held for request in queued):
            # accepted by a gateway that had not seen the unload yet
            decisions += self.scheduler.observe(seen.VersionsAbandoned(self._held), now)
        self._apply(decisions)
        return queued

    @staticmethod
    def _records(entry: Entry, attempts: dict[bytes, int] | None) -> list[RequestRecord]:
        """The entry's requests, without those that `attempts` knows to be settled."""
        records: list[RequestRecord] = []
        for record in carried(entry):
            try:
                records.append(unpack_request(record))
            except InvalidRecord as error:
                _log.error("dropped an unreadable request in %s: %s", entry.id.decode(errors="replace"), error)
        if attempts is not None:
            return [r for r in records if attempts.get(r.id, -1) >= 0]
        return records

    def _on_facts(self, stream: bytes, entry: Entry) -> None:
        now = monotonic_ns()
        facts = facts_of(entry)
        keeper = CarrierEntry(stream, entry.id, 1)
        for fact in facts:
            if isinstance(fact, BatchFinished):
                if fact.replies and fact.batch_id not in self._held_replies:
                    self._held_replies[fact.batch_id] = HeldReplies(fact.replies, keeper)
                    keeper.remaining += 1
                self._batch_settled(fact.batch_id)
                finished = seen.BatchFinished(fact.batch_id, fact.executor, bool(fact.replies))
                self._apply(self.scheduler.observe(finished, now))
            elif isinstance(fact, BatchReturned):
                self._batches.pop(fact.batch_id, None)
                self._apply(self.scheduler.observe(seen.BatchReturned(fact.batch_id, fact.executor), now))
                self._refuse_unheld(now)
            elif isinstance(fact, RequestCancelled):
                self._apply(self.scheduler.observe(seen.RequestCancelled(fact.id), now))
            elif isinstance(fact, LaneOpened):
                stream = keys.queue(self.model, fact.level, fact.lane)
                if stream not in self._streams:
                    self._streams[stream] = b"0-0"
                    if not self._paused:
                        self._reader.add(stream)
        self._handled(keeper)

    def _handled(self, keeper: CarrierEntry) -> None:
        """One reason less to keep a fact entry; facts that the reader consumes are deleted by it."""
        keeper.remaining -= 1
        if keeper.remaining == 0 and self._keeps_facts and keeper.stream == self._dispatcher.facts_shared:
            self._deletions.add(keeper.stream, keeper.entry_id)

    @property
    def fact_streams(self) -> tuple[bytes, ...]:
        """Where executors and gateways report to this model's owner."""
        return (
            (self._dispatcher.facts_shared, self._dispatcher.facts_local)
            if self._local_executor
            else (self._dispatcher.facts_shared,)
        )

    def follows(self, stream: bytes) -> bool:
        return stream in self._streams

    def on_served(self, versions: dict[int, ServedVersion]) -> None:
        """The catalog's newest word about this model: policy and capacity."""
        if self.closed:
            return
        now = monotonic_ns()
        batching = versions[max(versions)].interface.dynamic_batching if versions else None
        self._follow_facts(batching is not None and batching.preserve_ordering)
        if versions:
            newest = versions[max(versions)]
            if newest.content_hash != self._policy_hash:
                self._policy_hash = newest.content_hash
                self._apply(self.scheduler.observe(seen.PolicyChanged(newest.interface), now))
        capacity = {
            (executor, version.version): (version.content_hash, slots)
            for version in versions.values()
            for executor, slots in version.slots.items()
        }
        for gone in self._capacity.keys() - capacity.keys():
            self._apply(self.scheduler.observe(seen.VersionWithdrawn(*gone), now))
        for (executor, version), (content_hash, slots) in capacity.items():
            if self._capacity.get((executor, version)) != (content_hash, slots):
                self._apply(self.scheduler.observe(seen.VersionServed(executor, version, content_hash, slots), now))
        self._capacity = capacity
        self._held = frozenset(versions)
        self._apply(self.scheduler.observe(seen.VersionsAbandoned(self._held), now))
        self._arm()

    def _refuse_unheld(self, now_ns: int) -> None:
        """What came back from an executor may be for a version that was unloaded meanwhile."""
        if self._held is not None:
            self._apply(self.scheduler.observe(seen.VersionsAbandoned(self._held), now_ns))

    def on_executor_lost(self, executor: str) -> None:
        if not self.closed:
            # a late report of these must not be taken for the end of the runs that follow
            for batch_id in [batch_id for batch_id, (holder, _) in self._batches.items() if holder == executor]:
                del self._batches[batch_id]
            now = monotonic_ns()
            self._apply(self.scheduler.observe(seen.ExecutorLost(executor), now))
            self._refuse_unheld(now)
            self._arm()

    async def verify(self, min_age_ns: int) -> None:
        """Compare the batches given away at least `min_age_ns` ago with what the log knows of them.

        A log server that was killed forgets its last writes, perhaps a batch or the fact that one has finished, and a
        former owner that stalled may have read a fact meant for us: nobody would ever speak of those batches again.
        """
        for gone in self._sent.keys() - self._batches.keys():
            del self._sent[gone]
        before_ns = monotonic_ns() - min_age_ns
        suspects: dict[str, list[str]] = {}
        for batch_id, sent_ns in self._sent.items():
            if sent_ns <= before_ns and batch_id in self._batches:
                suspects.setdefault(self._batches[batch_id][0], []).append(batch_id)
        for executor, batch_ids in suspects.items():
            held = await self._dispatcher.held(executor)
            for batch_id in batch_ids:
                if batch_id not in held and batch_id in self._batches and not self.closed:
                    await self._resolve(batch_id, executor, self._batches[batch_id][1])

    async def _resolve(self, batch_id: str, executor: str, requests: list[seen.RequestQueued]) -> None:
        """A batch that its executor's stream does not hold: settled unheard, or lost."""
        attempts = await self._log.unsettled(self.model, [request.id for request in requests])
        if self.closed or batch_id not in self._batches:
            return
        now = monotonic_ns()
        self._sent.pop(batch_id, None)
        if all(attempt < 0 for attempt in attempts):
            self._batch_settled(batch_id)
            self._apply(self.scheduler.observe(seen.BatchFinished(batch_id, executor), now))
        else:
            _log.warning("batch %s of model '%s' was lost on its way: it is given out again", batch_id, self.model)
            self._batches.pop(batch_id)
            self._apply(self.scheduler.observe(seen.BatchReturned(batch_id, executor), now))
        self._arm()

    # -- what the scheduler decides -----------------------------------------------------------------------------------

    def _apply(self, decisions: list[Decision]) -> None:
        rejected: list[RejectRequest] = []
        for decision in decisions:
            if isinstance(decision, DispatchBatch):
                self._batches[decision.batch_id] = (decision.executor, decision.requests)
                self._spawn(self._dispatch(decision))
            elif isinstance(decision, RejectRequest):
                rejected.append(decision)
            elif isinstance(decision, ReleaseReplies):
                self._release(decision.batch_id)
        if rejected:
            self._spawn(self._reject(rejected))

    async def _dispatch(self, decision: DispatchBatch) -> None:
        try:
            if max(decision.attempts) > 1:
                decision, settled = await self._dispatcher.begin_attempts(decision)
                for request in settled:
                    self._request_settled(request)
                if decision.batch_id in self._batches:
                    self._batches[decision.batch_id] = (decision.executor, decision.requests)
                if not decision.requests:
                    self._finished_without_run(decision)
                    return
            await self._dispatcher.send(decision)
            if decision.executor != self._local_executor and decision.batch_id in self._batches:
                self._sent[decision.batch_id] = monotonic_ns()
        except Cancelled:
            self._lost_ownership(self.model)
        except CharoniaError as error:
            # not dispatched, or not known to be: a duplicate run is settled once
            _log.warning("batch %s could not be dispatched: %s", decision.batch_id, error)
            self._loop.call_later(_RETRY_S, self._returned, decision)

    def _returned(self, decision: DispatchBatch) -> None:
        if not self.closed:
            self._batches.pop(decision.batch_id, None)
            now = monotonic_ns()
            self._apply(self.scheduler.observe(seen.BatchReturned(decision.batch_id, decision.executor), now))
            self._refuse_unheld(now)
            self._arm()

    def _finished_without_run(self, decision: DispatchBatch) -> None:
        self._batches.pop(decision.batch_id, None)
        now = monotonic_ns()
        self._apply(self.scheduler.observe(seen.BatchFinished(decision.batch_id, decision.executor), now))
        self._arm()

    async def _reject(self, rejected: list[RejectRequest]) -> None:
        try:
            await refuse(self._log, self.model, rejected)
        except CharoniaError as error:
            _log.warning("%d refusals could not be recorded, trying again: %s", len(rejected), error)
            self._loop.call_later(_RETRY_S, self._reject_again, rejected)
            return
        for decision in rejected:
            self._request_settled(decision.request)

    def _reject_again(self, rejected: list[RejectRequest]) -> None:
        if not self.closed:
            self._spawn(self._reject(rejected))

    def _release(self, batch_id: str) -> None:
        held = self._held_replies.pop(batch_id, None)
        if held is None:
            return
        by_endpoint: dict[str, list[Buffer]] = {}
        for endpoint, record in held.replies:
            by_endpoint.setdefault(endpoint, []).append(record)
        held.entry.remaining += len(by_endpoint)
        for endpoint, answers in by_endpoint.items():
            self._spawn(self._append_reply(keys.replies(endpoint), record_fields(answers), held.entry))
        self._handled(held.entry)

    async def _append_reply(self, stream: bytes, fields: list[Buffer], keeper: CarrierEntry) -> None:
        """Send what was held; its requests are settled, so nobody else ever would."""
        while True:
            try:
                await self._log.append(stream, fields)
                break
            except CharoniaError as error:
                _log.warning("a reply held for its order could not be sent, trying again: %s", error)
            await asyncio.sleep(_RETRY_S)
        self._handled(keeper)

    # -- tidying ------------------------------------------------------------------------------------------------------

    def _batch_settled(self, batch_id: str) -> None:
        batch = self._batches.pop(batch_id, None)
        self._sent.pop(batch_id, None)
        if batch is not None:
            for request in batch[1]:
                self._request_settled(request)

    def _request_settled(self, request: seen.RequestQueued) -> None:
        carried = carrier_of(request)
        if carried.settled:
            return
        carried.settled = True
        self.settled_requests += 1
        self._deletions.add_handled(carried.entry)
        if self._paused and not self.closed and self.scheduler.pending_count() <= self._window // 2:
            self._resume()

    def _pause(self) -> None:
        self._paused = True
        for stream in self._streams:
            self._reader.remove(stream)

    def _resume(self) -> None:
        self._paused = False
        for stream, after in self._streams.items():
            self._reader.add(stream, after)

    # -- time ---------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        wakeup_ns = self.scheduler.next_wakeup()
        if wakeup_ns is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        if self._timer is not None:
            if self._timer_at_ns == wakeup_ns:
                return
            self._timer.cancel()
        self._timer_at_ns = wakeup_ns
        self._timer = self._loop.call_later(max(0, wakeup_ns - monotonic_ns()) / 1e9, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if not self.closed:
            self._apply(self.scheduler.advance(monotonic_ns()))
            self._arm()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
