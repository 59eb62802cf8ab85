"""One owned model: feeds its pure scheduler with what the log says and carries out what the scheduler decides.

A queue entry stays in the log until every request it carries is settled; so the queue alone is the truth a successor
recovers from, and deleting an entry is only tidying. Batches and replies are appended, never awaited in line.

Longer than most modules because it is one state: what was read, what was given out and what is settled must agree at
every await. What could leave has: reading (`windows`, `restoring`), `executor_capacity`, `sending` and `dispatching`,
`given` batches, `held_replies`, `refusals`, `recovery`, `upkeep` and all decisions (`scheduling`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any

from batcher.entries.bursting import Bursting
from batcher.entries.carriers import CarrierEntry, Deletions, carrier_of
from batcher.entries.early_cancels import EarlyCancels
from batcher.entries.entry_arrivals import arrivals
from batcher.entries.held_replies import HeldReplies
from batcher.entries.refusals import Refusals, Refused
from batcher.entries.windows import Windows
from batcher.scheduling import observations as seen
from batcher.scheduling.decisions import (
    BurstWave,
    CondemnRequest,
    Decision,
    DispatchBatch,
    ForgetSequences,
    RejectRequest,
    ReleaseReplies,
    StopExecution,
)
from batcher.scheduling.sequences.sequence_scheduler import Delays
from batcher.scheduling.stateless.scheduler import ModelScheduler
from batcher.scheduling.verbs import Scheduler
from charonia import failpoints, keys
from charonia.catalog.catalog import ServedVersion
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError
from charonia.eventlog.control import facts_of
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.port import START, Entry, EventLog, Fields, Limits, StreamReader
from charonia.facts.events import (
    BatchDied,
    BatchDiedInCompany,
    BatchFinished,
    BatchReturned,
    Fact,
    LaneOpened,
    QueueCommanded,
    RequestCancelled,
    RequestsEnded,
    RequestsMoved,
    RequestsRescheduled,
    ResponsesBegun,
    ResponsesWanted,
    SlotFreed,
)
from charonia.models.interface import ModelInterface
from charonia.wire import PREFIX_BYTES, WAVE_BYTE

from .custom_strategies import strategy_of
from .demand import Demand
from .dispatching import Dispatcher
from .executor_capacity import Capacity
from .given import GivenBatches
from .notes import Notes
from .schedulers import is_sequential, scheduler_for
from .sending import Sending
from .timeline import tell_returned, waiting_jobs
from .turns_apart import TurnsApart

_log = logging.getLogger(__name__)

_RETRY_S = 0.2
_PAGE = 500
_WIDER_FOR_SEQUENCES = 8
_NO_LIMITS = Limits()
_numbers = itertools.count(1)
"""Batches are told apart by the number of their owner in its process: two models may have the same token."""


class OwnedModel:
    """The shell around one scheduler, of the kind that `interface` wants.

    `lost_ownership` is called when the log says another batcher owns it, and when the model wants another kind.
    `choose(model, executors)` says who loads a version on demand, `failure(model, version)` why no executor could.
    `lane_weights` and `gone`, the endpoints of gateways that left, may change while it is owned. `find_gone` adds those
    of the given ones that left unheard.
    """

    def __init__(
        self,
        log: EventLog,
        reader: StreamReader,
        model: str,
        token: int,
        incarnation: str,
        *,
        link: LocalLink | None,
        prefetch: int,
        window_requests: int,
        lane_weights: Mapping[int, int],
        gone: set[str],
        find_gone: Callable[[set[str]], Awaitable[None]],
        turns: TurnsApart,
        interface: ModelInterface | None,
        delays: Delays,
        choose: Callable[[str, Collection[str]], str],
        failure: Callable[[str, int], str],
        lost_ownership: Callable[[str], None],
    ) -> None:
        self.model = model
        self.token = token
        self.log = log
        self.is_sequential = is_sequential(interface)
        self.scheduler: Scheduler = scheduler_for(
            interface, f"{incarnation}-{next(_numbers)}", token, prefetch, lane_weights, delays
        )
        self.settled_requests = 0
        self.condemned = 0
        """Requests that became dead letters under this owner."""
        self.closed = self.has_stumbled = False
        self.given = GivenBatches(self._batch_ended)
        local_executor = link.executor if link is not None else ""
        self.notes = Notes(log, model, local_executor)
        self._turns = turns
        # who waits for a slot must not hide what is next of those that have one
        window_requests *= _WIDER_FOR_SEQUENCES if self.is_sequential else 1
        self.windows = Windows(reader, window_requests)
        self.dispatcher = Dispatcher(log, model, token, link)
        self.demand = Demand(model, self.dispatcher, choose, self.spawn)
        self._failure = failure
        self._reader = reader
        self._link = link
        self._gone = gone
        self.find_gone = find_gone
        self._lost_ownership = lost_ownership
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ns = 0
        self._deletions = Deletions(log)
        self.held_replies = HeldReplies(log, self._deletions, self.spawn, self._keeps)
        self._refusals = Refusals(log, model, gone, self._request_settled)
        self._sending = Sending(self, local_executor, self._refusals, turns, lost_ownership)
        self._early_cancels = EarlyCancels()
        self._bursting = Bursting(log, model)
        self.wanted: dict[bytes, int] = {}
        """How many responses are wanted of requests whose callers say so (S55)."""
        self._facts_after = START
        self._keeps_facts: bool | None = None
        self.streams = self.streams_once = False
        """Its requests may have several responses; they are not run again once one was seen."""
        self._policy_hash = ""
        self._capacity = Capacity()
        self._arrived: list[seen.RequestQueued] = []
        """What came in this tick and the scheduler has not seen."""
        self.called: dict[bytes, seen.RequestQueued] = {}
        """Requests that models made, by id; who looks at them forgets those that have ended (`deadlock_watch`)."""
        self.on_blocking: Callable[[], None] = lambda: None
        """Told when requests came that their callers do nothing without."""
        self.on_behind: Callable[[], None] = lambda: None
        """Told when a stream is read no further for a while."""

    # -- life ---------------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """What else is to be read before it hears of capacity; the queue is restored. Raises what the log raises."""

    async def look_after(self) -> None:
        """What else is looked after now and then. Raises what the log raises."""

    def on_related(self, model: str) -> None:
        """The catalog has news about another model."""

    def _follow_facts(self, keep: bool) -> None:
        """Read the facts. `keep`: one is deleted from the log only when the replies it may hold are sent (S6)."""
        if self._keeps_facts is None and self._link is not None:
            self._link.reports[self.model].follow(self._on_report)
        if self._keeps_facts is None or (keep and not self._keeps_facts):
            self._reader.remove(self.dispatcher.facts)
            self._reader.add(self.dispatcher.facts, self._facts_after, consume=not keep)
            self._keeps_facts = keep

    def _keeps(self, stream: bytes) -> bool:
        return bool(self._keeps_facts) and stream == self.dispatcher.facts

    def close(self) -> None:
        """Stop deciding; what is queued stays in the log for the next owner."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.windows.close()
        if self._link is not None:
            self._link.reports[self.model].follow(None)
        for stream in self.fact_streams:
            self._reader.remove(stream)
        self._deletions.close()
        self.given.close()
        for task in self._tasks:
            task.cancel()

    def stumbled(self, error: BaseException) -> None:
        """An unforeseen error: what is known here may be wrong, so the model is taken again, from the log."""
        _log.error("model '%s' is taken anew after an error nobody foresaw", self.model, exc_info=error)
        if not self.closed:
            self.has_stumbled = True
            self.close()
            self._lost_ownership(self.model)

    async def settled(self) -> None:
        """Wait for the appends, settlements and deletions under way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._deletions.done()

    @property
    def fact_streams(self) -> tuple[bytes, ...]:
        """Where executors and gateways report to this model's owner."""
        return (self.dispatcher.facts,)

    def follows(self, stream: bytes) -> bool:
        return stream in self.windows

    # -- what the log says --------------------------------------------------------------------------------------------

    def on_entries(self, stream: bytes, entries: list[Entry]) -> None:
        if self.closed:
            return
        if stream == self.dispatcher.facts:
            self._on_facts(stream, entries)
            self._facts_after = entries[-1].id
        else:
            failpoints.hit("batcher.picked")
            self.windows.read(stream, entries[-1].id)
            if self.windows.has_several:  # what comes on another level in this tick may be batched with it
                if not self._arrived:
                    self._loop.call_soon(self._see_arrived_soon)
                self._arrived += self._arrivals_in(stream, entries, None)
            else:
                self.queue(stream, entries, None)
            if self.windows.pause_if_full(stream):
                self.on_behind()
        self.arm()

    def _on_facts(self, stream: bytes, entries: list[Entry]) -> None:
        if self._arrived:
            self._see_arrived()  # these facts may be about them
        for entry in entries:
            keeper = CarrierEntry(stream, entry.id, 1)
            for fact in facts_of(entry):
                self._on_fact(fact, keeper)
            self.held_replies.handled(keeper)

    def queue(self, stream: bytes, entries: list[Entry], attempts: dict[bytes, int] | None) -> list[seen.RequestQueued]:
        """Show the scheduler the requests of these entries at once: what arrived together may be batched together."""
        queued = self._arrivals_in(stream, entries, attempts)
        self._see(queued)
        return queued

    def _arrivals_in(
        self, stream: bytes, entries: list[Entry], attempts: dict[bytes, int] | None
    ) -> list[seen.RequestQueued]:
        known = len(self.called)
        queued = arrivals(stream, entries, attempts, self.windows, self._deletions, self.called)
        if len(self.called) > known:
            self.on_blocking()
        if not isinstance(self.scheduler, ModelScheduler):
            for request in [request for request in queued if request.wave]:
                queued.remove(request)
                self.spawn(self._burst(BurstWave(request)))
        return queued

    def _see_arrived_soon(self) -> None:
        try:
            self._see_arrived()
            if not self.closed:
                self.arm()
        except Exception as error:
            self.stumbled(error)

    def _see_arrived(self) -> None:
        """Show the scheduler what came on several levels in this tick."""
        if not self.closed:
            arrived, self._arrived = self._arrived, []
            if arrived:
                self._see(arrived)

    def _see(self, queued: list[seen.RequestQueued]) -> None:
        now = monotonic_ns()
        # suspects must be known for that before any of them is given out
        news = [*self._early_cancels.of(queued), *self._bursting.suspected(queued)]
        decisions = self.scheduler.observe_all([*queued, *news] if news else queued, now)
        if self._capacity.held is not None and not {request.version for request in queued} <= self._capacity.held:
            # accepted by a gateway that had not seen the unload yet
            decisions += self.scheduler.observe(self._abandoned(self._capacity.held), now)
        self._apply(decisions)
        if self._gone:
            self.drop_of_gone(queued)

    def _on_fact(self, fact: Fact, keeper: CarrierEntry) -> None:
        if isinstance(fact, BatchFinished):
            self.held_replies.hold(fact.batch_id, fact.replies, keeper)
            self.batch_finished(fact.batch_id, fact.executor, held=bool(fact.replies))
        elif isinstance(fact, BatchReturned):
            self.batch_returned(fact.batch_id, fact.executor, fact.reason)
        elif isinstance(fact, BatchDied | BatchDiedInCompany):
            self.on_death(fact)
        elif isinstance(fact, SlotFreed):
            self.observe(seen.SlotFreed(fact.batch_id, fact.executor))
        elif isinstance(fact, ResponsesBegun):
            self.observe(seen.ResponsesBegun(fact.batch_id, fact.executor, frozenset(_ids_of(fact.ids))))
        elif isinstance(fact, ResponsesWanted):
            self.on_wanted(fact)
        elif isinstance(fact, RequestsRescheduled):
            self.observe(seen.RequestsRescheduled(fact.batch_id, fact.executor, frozenset(_ids_of(fact.ids))))
        elif isinstance(fact, RequestCancelled):
            if self.scheduler.find(fact.id) is not None:
                self.observe(seen.RequestCancelled(fact.id))
                return
            if not self._stop_in_wave(fact.id):
                self._early_cancels.note(fact.id)
            wave_id = fact.id[:PREFIX_BYTES] + WAVE_BYTE
            if self.scheduler.find(wave_id) is not None:
                self.observe(seen.WaveOpened(wave_id))
        elif isinstance(fact, RequestsEnded):
            self._on_ended(_ids_of(fact.ids))
        elif isinstance(fact, RequestsMoved):
            self._on_moved(_ids_of(fact.ids))
        elif isinstance(fact, QueueCommanded):
            self.observe(seen.QueueHeld(fact.action == "pause"))
        elif isinstance(fact, LaneOpened):
            self.windows.open(keys.queue(self.model, fact.level, fact.lane), fact.lane)

    def _on_report(self, fields: Fields) -> None:
        """The executor in this process reports; the replies of a batch it has settled are sent."""
        if self.closed:
            return
        fact: Any = fields[1]
        try:
            if isinstance(fact, BatchFinished):
                self.batch_finished(fact.batch_id, fact.executor)
            else:
                self._on_facts(b"", [Entry(b"", list(fields))])
                self.arm()
        except Exception as error:  # the executor is not to blame
            self.stumbled(error)

    def on_wanted(self, fact: ResponsesWanted) -> None:
        """More responses of a request are wanted: the executor that runs it, now or later, is notified."""
        if self.scheduler.find(fact.id) is not None:
            self.wanted[fact.id] = max(fact.count, self.wanted.get(fact.id, 0))
            self.tell_wanted([fact.id])

    def tell_wanted(self, ids: Iterable[bytes]) -> None:
        """Tell who runs these requests how many responses of theirs are wanted."""
        for request_id in ids:
            count, holder = self.wanted.get(request_id), self.given.holder(request_id)
            if count is not None and holder is not None:
                self.spawn(self.dispatcher.tell_responses_wanted(*holder, request_id, count))

    def batch_finished(self, batch_id: str, executor: str, *, held: bool = False) -> None:
        """Every request of a batch is settled."""
        failpoints.hit("batcher.finished")
        self.requests_settled(self.given.end(batch_id))
        self.observe(seen.BatchFinished(batch_id, executor, held))

    def batch_returned(self, batch_id: str, executor: str, reason: str) -> None:
        """A batch did not run, and no request is to blame."""
        self._came_back(self.given.end(batch_id), executor, reason)
        self.observe(seen.BatchReturned(batch_id, executor))
        self._refuse_unheld()

    def _came_back(self, requests: list[seen.RequestQueued], executor: str, reason: str) -> None:
        for job_id in waiting_jobs(requests):
            self.spawn(tell_returned(self.log, self.model, job_id, executor, reason))

    def on_death(self, fact: BatchDied | BatchDiedInCompany) -> None:
        """A batch took its instance with it; those of its requests that have an outcome are not suspected."""
        ids = frozenset(_ids_of(fact.ids))
        members = self.given.end(fact.batch_id)
        self.requests_settled([request for request in members if request.id not in ids])
        reason = f"Stub process '{fact.instance}' is not healthy." if fact.instance else fact.reason  # P19
        self._came_back(members, fact.executor, reason)
        alone = isinstance(fact, BatchDied)
        blameless = isinstance(fact, BatchDied) and fact.blameless
        died = seen.BatchDied(fact.batch_id, fact.executor, ids, reason, fact.stderr, blameless, not alone)
        self._bursting.died(died, members)
        self.observe(died)
        self._refuse_unheld()

    def _on_ended(self, ids: list[bytes]) -> None:
        """These requests were settled from outside: they leave the queue, and executors that run them are notified."""
        found = []
        for request_id in ids:
            self._stop_in_wave(request_id)
            if (request := self.scheduler.find(request_id)) is not None:
                found.append(request)
        self._apply(self.scheduler.observe_all([seen.RequestSettled(r.id) for r in found], monotonic_ns()))
        self.requests_settled(found)

    def _stop_in_wave(self, request_id: bytes) -> bool:
        """Tell the executor of a running wave that one of its requests is not wanted; False when there is none."""
        wave = self.scheduler.find(request_id[:PREFIX_BYTES] + WAVE_BYTE)
        if wave is None or wave.state is not seen.RequestState.DISPATCHED:
            return False
        if (holder := self.given.holder(wave.id)) is not None:
            self.spawn(self.dispatcher.tell_unwanted(*holder, request_id))
        return True

    def _on_moved(self, ids: list[bytes]) -> None:
        """An operator carries these in another entry from now on: what is not given out is forgotten here."""
        for request_id in ids:
            request = self.scheduler.find(request_id)
            if request is not None and request.state is not seen.RequestState.DISPATCHED:
                self.observe(seen.RequestSettled(request_id))
                carrier = carrier_of(request)
                if not carrier.settled:
                    carrier.settled = True
                    carrier.entry.remaining -= 1
                    self.windows.settled(carrier.entry)

    def end_lease(self, holder: str) -> None:
        """Give back the room for waves that a gateway reserved which left without doing so."""
        if not self.closed:
            self.spawn(self._end_leases([holder]))

    async def end_leases_of_gone(self) -> None:
        """The same for all gateways that left before this owner could hear of it. Raises what the log raises."""
        holders = await self.log.waves.leases(self.model)
        if holders:
            await self.find_gone(set(holders))
            await self._end_leases([holder for holder in holders if holder in self._gone])

    async def _end_leases(self, holders: list[str]) -> None:
        while holders and not self.closed:
            try:
                await self.log.waves.lease(self.model, holders[-1], 0, 0, _NO_LIMITS)
                holders.pop()
            except CharoniaError as error:
                _log.warning("the lease of '%s' cannot be ended yet: %s", holders[-1], error)
                await asyncio.sleep(_RETRY_S)

    def unwatched(self) -> list[seen.RequestQueued]:
        """The requests that are not worth going on with once their responses have no reader."""
        # what answers once is soon done; what answers again and again may go on for ever
        return self.scheduler.unended() if self.streams else self.scheduler.waiting()

    def instances(self) -> dict[int, dict[str, int]]:
        """How many instances a version has at each executor, where any of them takes any request."""
        return {} if self.is_sequential else self._capacity.instances()

    def content_hashes(self) -> dict[int, str]:
        """By version what is served of it."""
        return self._capacity.content_hashes()

    def is_gone(self, endpoint: str) -> bool:
        return endpoint in self._gone

    def drop_of_gone(self, requests: Iterable[seen.RequestQueued]) -> None:
        """Of gateways that left: what only they wait for is not run."""
        over = (seen.RequestState.ENDED, seen.RequestState.DISPATCHED)
        records = [
            carrier_of(request).record
            for request in requests
            if request.state is not seen.RequestState.ENDED and not (request.wave and request.state in over)
        ]
        unwanted = [seen.RequestCancelled(r.id) for r in records if r.endpoint in self._gone and not r.is_job]
        if unwanted and not self.closed:
            self._apply(self.scheduler.observe_all(unwanted, monotonic_ns()))
            self.arm()

    def on_served(self, versions: dict[int, ServedVersion]) -> None:
        """The catalog's newest word about this model: policy and capacity."""
        if self.closed:
            return
        batching = versions[max(versions)].interface.dynamic_batching if versions else None
        several = bool(versions) and versions[max(versions)].interface.decoupled
        self._follow_facts(batching is not None and batching.preserve_ordering and not several)
        if versions:
            newest = versions[max(versions)]
            if is_sequential(newest.interface) is not self.is_sequential:
                # another kind of scheduler, which begins like that of another owner
                self._lost_ownership(self.model)
                return
            self.streams = self.dispatcher.begins_all = newest.interface.decoupled
            self.streams_once = self.streams and not newest.interface.repeatable
            if newest.content_hash != self._policy_hash:
                self._policy_hash = newest.content_hash
                self.observe(seen.PolicyChanged(newest.interface, strategy_of(newest.interface)))
        # at once: what was bound to the second executor must not be moved to the first
        self._apply(self.scheduler.observe_all(self._capacity.change(versions), monotonic_ns()))
        self.demand.on_served(versions)
        self._refuse_unheld()

    def _refuse_unheld(self) -> None:
        """What came back from an executor may be for a version that was unloaded meanwhile."""
        if self._capacity.held is not None:
            self.observe(self._abandoned(self._capacity.held))

    def _abandoned(self, held: frozenset[int]) -> seen.VersionsAbandoned:
        waiting = self.scheduler.queued_by_version()
        return seen.VersionsAbandoned(held, {v: self._failure(self.model, v) for v in waiting if v not in held})

    def on_executor_joined(self, executor: str) -> None:
        if not self.closed:
            self.observe(seen.ExecutorReturned(executor))

    def on_executor_lost(self, executor: str, *, drained: bool) -> None:
        if not self.closed:
            for batch_id in self.given.unsent(executor):
                self.batch_returned(batch_id, executor, "not sent")  # it never had these
            self._came_back(self.given.lose(executor), executor, "drained" if drained else "the executor was lost")
            self.observe(seen.ExecutorLost(executor, drained))
            self._refuse_unheld()

    # -- what the scheduler decides -----------------------------------------------------------------------------------

    def observe(self, event: seen.Observation) -> None:
        """Tell the scheduler one thing and do what it decides."""
        self._apply(self.scheduler.observe(event, monotonic_ns()))
        self.arm()

    def _apply(self, decisions: list[Decision]) -> None:
        refused: list[Refused] = []
        unwanted: dict[tuple[str, str], bytes] = {}
        for decision in decisions:
            if isinstance(decision, DispatchBatch):
                self.given.add(decision.batch_id, decision.executor, decision.requests)
                if not self._sending.hand_over(decision):
                    self.spawn(self._sending.send(decision))
            elif isinstance(decision, RejectRequest | CondemnRequest):
                refused.append(decision)
                self.condemned += isinstance(decision, CondemnRequest)
            elif isinstance(decision, BurstWave):
                self.spawn(self._burst(decision))
            elif isinstance(decision, StopExecution):
                running = (decision.executor, decision.batch_id)
                unwanted[running] = unwanted.get(running, b"") + decision.request.id
            elif isinstance(decision, ForgetSequences):
                self.spawn(self._forget(decision.runs))
            elif isinstance(decision, ReleaseReplies):
                self.held_replies.release(decision.batch_id)
        if refused:
            self.spawn(self._refusals.settle(refused))
        for (executor, batch_id), ids in unwanted.items():
            self.spawn(self.dispatcher.tell_unwanted(executor, batch_id, ids))

    async def _burst(self, decision: BurstWave) -> None:
        """Replace a wave by its requests; the reader brings them."""
        while not self.closed:
            try:
                await self._bursting.burst(decision)
                self.requests_settled((decision.request,))
                return
            except CharoniaError as error:
                _log.warning("a wave of '%s' cannot be burst yet: %s", self.model, error)
            await asyncio.sleep(_RETRY_S)

    async def _forget(self, runs: dict[bytes, bytes]) -> None:
        """End the records of sequences; until the log has done it, a new owner would take them for live."""
        while not self.closed:
            try:
                await self.log.forget_sequences(self.model, runs)
                return
            except CharoniaError as error:
                _log.warning("%d sequences of '%s' cannot be forgotten yet: %s", len(runs), self.model, error)
            await asyncio.sleep(_RETRY_S)

    def _batch_ended(self, batch_id: str) -> None:
        self._turns.give(batch_id)
        if self.notes.ended(batch_id) and not self.closed:
            self.spawn(self.notes.erase())

    # -- tidying and time ---------------------------------------------------------------------------------------------

    def requests_settled(self, requests: Iterable[seen.RequestQueued]) -> None:
        """The log has an outcome of these requests; saying so again changes nothing."""
        entries: list[CarrierEntry] = []
        for request in requests:
            carrier = request.carrier
            if carrier.settled:
                continue
            carrier.settled = True
            if request.wave:  # its entry is deleted by the settlement
                carrier.entry.remaining = 0
                self.settled_requests += request.count
                if not self.closed:
                    self.windows.settled(carrier.entry, request.count)
                continue
            if self.wanted:
                self.wanted.pop(request.id, None)
            entries.append(carrier.entry)
        if not entries:
            return
        settled = {entries[0]: len(entries)} if entries.count(entries[0]) == len(entries) else Counter(entries)
        for entry, count in settled.items():
            self.settled_requests += count
            entry.remaining -= count
            if entry.remaining == 0:
                self._deletions.add(entry.stream, entry.entry_id)
            if not self.closed:
                self.windows.settled(entry, count)

    def _request_settled(self, request: seen.RequestQueued) -> None:
        self.requests_settled((request,))

    def arm(self) -> None:
        """Set the timer to when something is due; called after whatever may have changed that."""
        if self.demand:
            self.demand.look(self.scheduler.queued_by_version())
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
            try:
                self._apply(self.scheduler.advance(monotonic_ns()))
                self.arm()
            except Exception as error:
                self.stumbled(error)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something until it is done or the model is given up."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, CharoniaError):  # what has to be in the log is insisted on where it is written
            _log.warning("something of model '%s' could not be written: %s", self.model, error)
        else:
            self.stumbled(error)


def _ids_of(joined: bytes) -> list[bytes]:
    return [joined[at : at + 16] for at in range(0, len(joined), 16)]
