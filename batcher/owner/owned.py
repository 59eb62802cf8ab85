"""One owned model: feeds its pure scheduler with facts of the log and carries out the scheduler's decisions.

A queue entry stays in the log until all its requests are settled, so a successor recovers from the queue alone. The
owner deletes an entry of single requests after their settlement, which only saves space; a wave's entry is deleted by
the executor, and that deletion is the settlement. Batches and replies are appended by tasks, never awaited in line.

Which requests were read, dispatched and settled must agree at every await, so their facts and decisions meet here. Each
is tracked by a part with an interface: `carriers` (the queue and the facts), `dispatched_batches`, `refusals`, and
`scheduling`, which decides. `recovery` restores what a new owner needs, `model_checks` repairs it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from batcher.entries.bursting import Bursting
from batcher.entries.carriers import RETRY_S, CarrierEntry, Deletions, FactStream, Windows, carried_of
from batcher.entries.early_cancels import EarlyCancels
from batcher.entries.prompt_routes import complete_routes
from batcher.entries.refusals import Refusals, Refused
from batcher.scheduling import observations as seen
from batcher.scheduling.decisions import (
    BurstWave,
    CondemnRequest,
    Decision,
    DispatchBatch,
    ForgetSequences,
    JoinEntries,
    RejectRequest,
    ReleaseReplies,
    StopExecution,
)
from batcher.scheduling.sequences.sequence_dispatch import Delays
from batcher.scheduling.sequences.sequence_scheduler import SequenceScheduler
from batcher.scheduling.stateless.scheduler import ModelScheduler
from batcher.scheduling.verbs import Scheduler
from charonia import failpoints, keys
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.port import Entry, EventLog, Fields, Limits, StreamReader
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
    RequestsRescheduled,
    ResponsesBegun,
    ResponsesWanted,
    SlotFreed,
    facts_of,
)
from charonia.models.interface import ModelInterface
from charonia.models.text_routing import is_routed
from charonia.options.settings import BatcherSettings
from charonia.tasks import Tasks, insist
from charonia.wire import PREFIX_BYTES, WAVE_BYTE

from .demand import Demand, most_room
from .dispatched_batches import DispatchedBatches, without_outcome
from .executor_capacity import ExecutorCapacity
from .quarantine import Quarantine, SuspectNote
from .schedulers import is_sequential, scheduler_for, strategy_of

_log = logging.getLogger(__name__)

_WIDER_FOR_SEQUENCES = 8
_NO_LIMITS = Limits()
_numbers = itertools.count(1)
"""Distinguishes the batches of owners in one process: two models may have the same token."""


class DepartedEndpoints(Protocol):
    """The endpoints of gateways that left; `find` adds given endpoints that left before this batcher could know."""

    endpoints: set[str]

    async def find(self, endpoints: set[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class BatcherContext:
    """Shared by all owned models of one batcher. `link` leads to the executor in its process, if there is one."""

    log: EventLog
    reader: StreamReader
    catalog: Catalog
    settings: BatcherSettings
    link: LocalLink | None
    delays: Delays
    departed: DepartedEndpoints
    quarantine: Quarantine
    lost_ownership: Callable[[str], None]
    """Called when another batcher owns a model, and when this one has to take the model over again: because the model
    needs another kind of scheduler, or because the state here is in doubt after an unforeseen error."""
    on_blocking: Callable[[], None]
    """Called when requests arrived whose callers do nothing else until they are answered."""
    on_behind: Callable[[], None]
    """Called when reading of a stream pauses for a while."""


class OwnedModel:
    """The shell around one scheduler, of the kind that `interface` needs. `token` is of the ownership."""

    def __init__(self, batcher: BatcherContext, model: str, token: int, interface: ModelInterface | None) -> None:
        log, link, settings = batcher.log, batcher.link, batcher.settings
        self.model = model
        self.token = token
        self.log = log
        self._batcher = batcher
        self._reader = batcher.reader
        self._lost_ownership = batcher.lost_ownership
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks(self._task_failed)
        self.closed = self.has_failed = False
        self.is_held = False
        """An operator holds the queue back, as far as this owner has read."""
        self.scheduler: Scheduler = scheduler_for(
            interface,
            f"{settings.incarnation}-{next(_numbers)}",
            token,
            settings.prefetch,
            batcher.catalog.lane_weights,
            batcher.delays,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ns = 0
        # the queue and the facts
        self._deletions = Deletions(log)
        # sequences that wait for a slot must not hide the next requests of those that have one
        wider = _WIDER_FOR_SEQUENCES if is_sequential(interface) else 1
        self.windows = Windows(batcher.reader, wider * settings.window_requests, self._deletions, self.on_entries)
        self.facts = FactStream(log, batcher.reader, model, self._deletions, self.spawn, self.on_entries)
        self._early_cancels = EarlyCancels()
        self._bursting = Bursting(log, model, self.windows.has_read)
        self._arrived: list[seen.RequestQueued] = []
        """Requests that arrived in this tick and that the scheduler has not seen."""
        self._called: set[bytes] = set()
        """Requests that models made, by id; `unsettled_calls` removes settled ones."""
        # batches and ends
        self._refusals = Refusals(log, model, batcher.departed.endpoints, self.requests_settled)
        self.condemned = 0
        """Requests that became dead letters under this owner."""
        self.refused_unawaited = self._refusals.unawaited
        self.suspect_note = SuspectNote(log, model, link.executor if link is not None else "")
        self.dispatched = DispatchedBatches(
            self, log, link, model, token, self.suspect_note, batcher.quarantine, self._refusals
        )
        # what executors hold
        self._capacity = ExecutorCapacity()
        self._policy_hash = ""
        self._is_routed = interface is not None and is_routed(interface)
        self.demand = Demand(model, self.dispatched.ask_to_load, partial(most_room, batcher.catalog), self.spawn)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Hook: what else to read before the scheduler learns of capacity; the queue is restored. Raises what the log
        raises.
        """

    async def look_after(self) -> None:
        """Hook: what else to check periodically. Raises what the log raises."""

    def on_related(self, model: str) -> None:
        """Hook: the catalog has changed for another model."""

    def close(self) -> None:
        """Stop deciding; queued requests stay in the log for the next owner."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.windows.close()
        if self._batcher.link is not None:
            self._batcher.link.reports[self.model].follow(None)
        self._reader.remove(self.facts.stream)
        self._deletions.close()
        self.dispatched.close()
        self._tasks.cancel()

    def failed(self, error: BaseException) -> None:
        """After an unforeseen error the state here may be wrong, so the model is taken over again, from the log."""
        _log.error("model '%s' is taken again after an unforeseen error", self.model, exc_info=error)
        if not self.closed:
            self.has_failed = True
            self.close()
            self.step_down()

    def step_down(self) -> None:
        """Another batcher owns the model, or this one is to take it over again."""
        self._lost_ownership(self.model)

    async def settled(self) -> None:
        """Wait for the appends, settlements and deletions under way."""
        await self._tasks.settled()
        await self._deletions.done()

    # -- what the log says --------------------------------------------------------------------------------------------

    def on_entries(self, stream: bytes, entries: list[Entry]) -> None:
        """What was read of one of its streams. When that fails, the other models go on."""
        if self.closed:
            return
        try:
            if stream == self.facts.stream:
                self._on_facts(stream, entries)
                self.facts.after = entries[-1].id
            else:
                failpoints.hit("batcher.picked")
                queued = self._read(stream, entries, None)
                if len(self.windows.lanes) > 1:  # requests that arrive on another level in this tick may join the batch
                    if not self._arrived:
                        self._loop.call_soon(self._see_arrived_soon)
                    self._arrived += queued
                else:
                    self._see(queued)
                if self.windows.pause_if_full(stream):
                    self._batcher.on_behind()
            self.arm()
        except Exception as error:
            self.failed(error)

    def _on_facts(self, stream: bytes, entries: list[Entry]) -> None:
        if self._arrived:
            self._see_arrived()  # these facts may be about them
        for entry in entries:
            keeper = CarrierEntry(stream, entry.id, 1)
            for fact in facts_of(entry):
                self._on_fact(fact, keeper)
            self.facts.handled(keeper)

    def queue(self, stream: bytes, entries: list[Entry], attempts: dict[bytes, int] | None) -> list[seen.RequestQueued]:
        """Give the scheduler the requests of these entries at once, so that they may be batched together."""
        queued = self._read(stream, entries, attempts)
        self._see(queued)
        return queued

    def _read(self, stream: bytes, entries: list[Entry], attempts: dict[bytes, int] | None) -> list[seen.RequestQueued]:
        known = len(self._called)
        queued = self.windows.read(stream, entries, attempts, self._called)
        if self._is_routed:
            complete_routes(queued)
        if len(self._called) > known:
            self._batcher.on_blocking()
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
            self.failed(error)

    def _see_arrived(self) -> None:
        """Give the scheduler the requests that arrived on several levels in this tick."""
        if not self.closed:
            arrived, self._arrived = self._arrived, []
            if arrived:
                self._see(arrived)

    def _see(self, queued: list[seen.RequestQueued]) -> None:
        now = monotonic_ns()
        observed: list[seen.Observation] = [*queued]
        if self._early_cancels.ids:
            observed += self._early_cancels.of(queued)
        if self._bursting.suspects:
            # requests must be marked as suspects before any of them is dispatched
            observed += self._bursting.suspected(queued)
            if not self._arrived:
                self._bursting.forget_read()
        decisions = self.scheduler.observe_all(observed, now)
        held = self._capacity.held
        if held is not None:
            for request in queued:
                if request.version not in held:  # accepted by a gateway that had not seen the unload yet
                    decisions += self.scheduler.observe(self._abandoned(held), now)
                    break
        self._apply(decisions)
        if self._batcher.departed.endpoints:
            self.drop_of_gone(queued)

    def _on_fact(self, fact: Fact, keeper: CarrierEntry) -> None:
        if isinstance(fact, BatchFinished):
            if self.dispatched.puts_off(fact):
                return
            self.facts.hold(fact.batch_id, fact.replies, keeper)
            self.batch_finished(fact.batch_id, fact.executor, held=bool(fact.replies), tokens=fact.tokens)
        elif isinstance(fact, BatchReturned):
            self.batch_returned(fact.batch_id, fact.executor, fact.reason)
        elif isinstance(fact, BatchDied | BatchDiedInCompany):
            self.on_death(fact)
        elif isinstance(fact, SlotFreed):
            self.observe(seen.SlotFreed(fact.batch_id, fact.executor))
        elif isinstance(fact, ResponsesBegun):
            ids = frozenset(_ids_of(fact.ids))
            self.observe(seen.ResponsesBegun(fact.batch_id, fact.executor, ids))
            if self.dispatched.resumable and fact.batch_id in self.suspect_note.aboard:
                self.spawn(self.suspect_note.clear(fact.batch_id, ids))
        elif isinstance(fact, ResponsesWanted):
            self.on_wanted(fact)
        elif isinstance(fact, RequestsRescheduled):
            self.observe(seen.RequestsRescheduled(fact.batch_id, fact.executor, frozenset(_ids_of(fact.ids))))
        elif isinstance(fact, RequestCancelled):
            if self.scheduler.find(fact.id) is not None:
                self.observe(seen.RequestCancelled(fact.id, fact.gentle))
                return
            self._stop_in_wave(fact.id)
            self._early_cancels.note(fact.id)  # also of a running wave, which may come back
            wave_id = fact.id[:PREFIX_BYTES] + WAVE_BYTE
            if self.scheduler.find(wave_id) is not None:
                self.observe(seen.WaveOpened(wave_id))
        elif isinstance(fact, RequestsEnded):
            self._on_ended(_ids_of(fact.ids))
        elif isinstance(fact, QueueCommanded):
            self.hold(fact.action == "pause")
        elif isinstance(fact, LaneOpened):
            self.windows.open(keys.queue(self.model, fact.level, fact.lane), fact.lane)

    def _on_report(self, fields: Fields) -> None:
        """The executor in this process reports; send the replies of a batch that it has settled."""
        if self.closed:
            return
        fact: Any = fields[1]
        try:
            if isinstance(fact, BatchFinished):
                self.batch_finished(fact.batch_id, fact.executor, tokens=fact.tokens)
            else:
                self._on_facts(b"", [Entry(b"", list(fields))])
                self.arm()
        except Exception as error:  # the executor is not to blame
            self.failed(error)

    def hold(self, held: bool) -> None:
        """An operator holds the queue back, or releases it."""
        self.is_held = held
        self.observe(seen.QueueHeld(held))

    def on_wanted(self, fact: ResponsesWanted) -> None:
        """More responses of a request are wanted."""
        if self.scheduler.find(fact.id) is not None:
            self.dispatched.want_responses(fact.id, fact.count)

    @property
    def wanted(self) -> dict[bytes, int]:
        """How many responses are wanted, for requests whose callers limit them (S55)."""
        return self.dispatched.wanted

    def batch_finished(self, batch_id: str, executor: str, *, held: bool = False, tokens: int = 0) -> None:
        """Every request of a batch is settled; `tokens` is how many they had, of prompts and answers."""
        failpoints.hit("batcher.finished")
        members = self.dispatched.end(batch_id)
        if self._early_cancels.ids:
            self._early_cancels.forget_waves(members)
        self.requests_settled(members)
        self.observe(seen.BatchFinished(batch_id, executor, held, tokens))

    def batch_returned(self, batch_id: str, executor: str, reason: str) -> None:
        """A batch did not run, and no request is to blame."""
        self.dispatched.came_back(self.dispatched.end(batch_id), executor, reason)
        self.observe(seen.BatchReturned(batch_id, executor))
        self._refuse_unheld()

    def batch_too_large(self, batch_id: str, executor: str, message: str) -> None:
        """The log does not take a batch as one entry: its requests run in smaller ones."""
        _log.warning("batch %s is divided: %s", batch_id, message)
        self.dispatched.came_back(self.dispatched.end(batch_id), executor, "its batch was too large")
        self.observe(seen.BatchTooLarge(batch_id, executor, message))
        self._refuse_unheld()

    def on_death(self, fact: BatchDied | BatchDiedInCompany) -> None:
        """A batch ended its instance; its requests with an outcome are not suspected."""
        if self.dispatched.puts_off(fact):
            return
        members = self.dispatched.end(fact.batch_id)
        ids = without_outcome(fact, members)
        settled = [request for request in members if request.id not in ids]
        self._early_cancels.forget_waves(settled)
        self.requests_settled(settled)
        reason = f"Stub process '{fact.instance}' is not healthy." if fact.instance else fact.reason  # P19
        self.dispatched.came_back(members, fact.executor, reason)
        alone = isinstance(fact, BatchDied)
        blameless = isinstance(fact, BatchDied) and fact.blameless
        died = seen.BatchDied(fact.batch_id, fact.executor, ids, reason, fact.stderr, blameless, not alone)
        self._bursting.died(died, members)
        self.observe(died)
        self._refuse_unheld()

    def _on_ended(self, ids: list[bytes]) -> None:
        """These requests were settled from outside: remove them from the queue and notify executors that run them."""
        found = []
        for request_id in ids:
            self._stop_in_wave(request_id)
            if (request := self.scheduler.find(request_id)) is not None:
                found.append(request)
        self._apply(self.scheduler.observe_all([seen.RequestSettled(r.id) for r in found], monotonic_ns()))
        self.requests_settled(found)

    def _stop_in_wave(self, request_id: bytes) -> None:
        """If a wave with this request runs, notify its executor that the request is not wanted."""
        wave = self.scheduler.find(request_id[:PREFIX_BYTES] + WAVE_BYTE)
        if wave is None or wave.state is not seen.RequestState.DISPATCHED:
            return
        if (holder := self.dispatched.holder(wave.id)) is not None:
            self.dispatched.stop_executions(*holder, request_id)

    def end_lease(self, holder: str) -> None:
        """Release the capacity for waves that a gateway reserved and left without releasing."""
        if not self.closed:
            self.spawn(self._end_leases([holder]))

    def end_other_leases(self, _gone: Collection[str]) -> None:
        """Release capacity for waves of gateways that left while this owner was restored, after it read the leases."""
        if not self.closed:
            self.spawn(self._end_other_leases())

    async def _end_other_leases(self) -> None:
        await self._insist(self.end_leases_of_gone, "leases of gateways that left cannot be ended yet")

    async def end_leases_of_gone(self) -> None:
        """Release capacity for waves of gateways that left before this owner could know. Raises what the log raises."""
        holders = await self.log.waves.leases(self.model)
        if holders:
            departed = self._batcher.departed
            await departed.find(set(holders))
            await self._end_leases([holder for holder in holders if holder in departed.endpoints])

    async def _end_leases(self, holders: list[str]) -> None:
        for holder in holders:
            end = partial(self.log.waves.lease, self.model, holder, 0, 0, _NO_LIMITS)
            await self._insist(end, f"the lease of '{holder}' cannot be ended yet")

    def unsettled_calls(self) -> list[seen.RequestQueued]:
        """The unsettled requests that models made; settled ones are forgotten."""
        if self._arrived:  # unknown to the scheduler, and yet not settled
            self._see_arrived_soon()
        if self.closed:
            return []
        found = [request for one in self._called if (request := self.scheduler.find(one)) and not request.settled]
        self._called = {request.id for request in found}
        return found

    def unwatched(self) -> list[seen.RequestQueued]:
        """Requests that need not go on once their responses have no reader."""
        # a request with one answer is soon done; a decoupled one may never end
        return self.scheduler.unended() if self.dispatched.streams else self.scheduler.waiting()

    @property
    def is_sequential(self) -> bool:
        """Whether its requests are steps of sequences."""
        return isinstance(self.scheduler, SequenceScheduler)

    def instances(self) -> dict[int, dict[str, int]]:
        """How many instances a version has at each executor, where any of them takes any request."""
        return {} if self.is_sequential else self._capacity.instances()

    def content_hashes(self) -> dict[int, str]:
        """The content hash of each served version."""
        return self._capacity.content_hashes()

    async def find_gone(self, endpoints: set[str]) -> None:
        """Learn which of these endpoints left before this batcher could know. Raises what the log raises."""
        await self._batcher.departed.find(endpoints)

    def drop_of_gone(self, requests: Iterable[seen.RequestQueued]) -> None:
        """Gateways left: requests that only they wait for are not run."""
        over = (seen.RequestState.ENDED, seen.RequestState.DISPATCHED)
        records = [
            carried_of(request).record
            for request in requests
            if request.state is not seen.RequestState.ENDED and not (request.wave and request.state in over)
        ]
        gone = self._batcher.departed.endpoints
        self.cancel([record.id for record in records if record.endpoint in gone and not record.is_job])

    def cancel(self, ids: Sequence[bytes]) -> None:
        """Cancel requests together: the log settles those that do not run with one command."""
        if ids and not self.closed:
            unwanted = [seen.RequestCancelled(request_id) for request_id in ids]
            self._apply(self.scheduler.observe_all(unwanted, monotonic_ns()))
            self.arm()

    def on_served(self, versions: dict[int, ServedVersion]) -> None:
        """The catalog's latest state of this model: policy and capacity."""
        if self.closed:
            return
        if self._batcher.link is not None:
            self._batcher.link.reports[self.model].follow(self._on_report)
        self._refusals.follow(versions)
        newest = versions[max(versions)] if versions else None
        if newest is None:
            self.facts.follow(False)
        else:
            interface, batching = newest.interface, newest.interface.dynamic_batching
            # held replies are in facts (S6)
            self.facts.follow(batching is not None and batching.preserve_ordering and not interface.decoupled)
            if is_sequential(interface) is not self.is_sequential:
                # another kind of scheduler, which starts like that of another owner
                self.step_down()
                return
            self.dispatched.streams = interface.decoupled
            self.dispatched.streams_once = interface.decoupled and not interface.repeatable
            self.dispatched.resumable = interface.resumable
            if newest.content_hash != self._policy_hash:
                self._policy_hash = newest.content_hash
                self._is_routed = is_routed(interface)
                self.observe(seen.PolicyChanged(interface, strategy_of(interface)))
        # at once: batches bound to the second executor must not be moved to the first
        self._apply(self.scheduler.observe_all(self._capacity.change(versions), monotonic_ns()))
        self.demand.on_served(versions)
        self._refuse_unheld()

    def _refuse_unheld(self) -> None:
        """Requests that come back from an executor may be for a version that was unloaded in the meantime."""
        if self._capacity.held is not None:
            self.observe(self._abandoned(self._capacity.held))

    def _abandoned(self, held: frozenset[int]) -> seen.VersionsAbandoned:
        waiting, failure = self.scheduler.queued_by_version(), self._batcher.catalog.failure
        return seen.VersionsAbandoned(held, {v: failure(self.model, v) for v in waiting if v not in held})

    def on_executor_joined(self, executor: str) -> None:
        if not self.closed:
            self.observe(seen.ExecutorReturned(executor))

    def on_executor_lost(self, executor: str, *, drained: bool) -> None:
        if not self.closed:
            for batch_id in self.dispatched.unsent(executor):
                self.batch_returned(batch_id, executor, "not sent")  # it never had these
            self.dispatched.lose(executor, "drained" if drained else "the executor was lost")
            self.observe(seen.ExecutorLost(executor, drained))
            self._refuse_unheld()

    # -- what the scheduler decides -----------------------------------------------------------------------------------

    def observe(self, event: seen.Observation) -> None:
        """Give the scheduler one observation and carry out its decisions."""
        decisions = self.scheduler.observe_all((event,), monotonic_ns())
        if decisions:
            self._apply(decisions)
        self.arm()

    def _apply(self, decisions: list[Decision]) -> None:
        refused: list[Refused] = []
        unwanted: dict[tuple[str, str, bool], bytes] = {}
        for decision in decisions:
            if isinstance(decision, DispatchBatch):
                self.dispatched.dispatch(decision)
            elif isinstance(decision, RejectRequest | CondemnRequest):
                refused.append(decision)
                self.condemned += isinstance(decision, CondemnRequest)
            elif isinstance(decision, JoinEntries):
                self.windows.join(decision.known, decision.again)
            elif isinstance(decision, BurstWave):
                self.spawn(self._burst(decision))
            elif isinstance(decision, StopExecution):
                running = (decision.executor, decision.batch_id, decision.gentle)
                unwanted[running] = unwanted.get(running, b"") + decision.request.id
            elif isinstance(decision, ForgetSequences):
                self.spawn(self._forget(decision.runs))
            elif isinstance(decision, ReleaseReplies):
                self.facts.release(decision.batch_id)
        if refused and self.dispatched.streams:
            self.spawn(self._refuse_streams(refused, unwanted))
            return
        if refused:
            self.spawn(self._refusals.settle(refused))
        self._stop(unwanted)

    def _stop(self, unwanted: dict[tuple[str, str, bool], bytes]) -> None:
        for (executor, batch_id, gentle), ids in unwanted.items():
            self.dispatched.stop_executions(executor, batch_id, ids, gentle=gentle)

    async def _refuse_streams(self, refused: list[Refused], unwanted: dict[tuple[str, str, bool], bytes]) -> None:
        """Settle refused requests, and stop their runs. A former owner must not settle a stream that the owner runs:
        the owner would not learn of it, and the run might never end. Nor must it stop one that is still unsettled, for
        the executor does not settle that either. Of other requests the first settlement wins, and a run ends by itself.
        """
        if await self._still_owns():
            await self._refusals.settle(refused)
            self._stop(unwanted)
        elif not self.closed:
            self.step_down()

    async def _still_owns(self) -> bool:
        """Whether the log names this owner; False, too, when the model is given up before it says so."""
        tokens: list[int] = []

        async def read_token() -> None:
            tokens.append((await self.log.owner(self.model))[1])

        await self._insist(read_token, f"the owner of '{self.model}' cannot be read yet")
        return tokens == [self.token]

    async def _burst(self, decision: BurstWave) -> None:
        """Replace a wave by its requests; the reader brings them."""
        if await self._insist(partial(self._bursting.burst, decision), f"a wave of '{self.model}' cannot be burst yet"):
            self.requests_settled((decision.request,))

    async def _forget(self, runs: dict[bytes, bytes]) -> None:
        """Delete the records of sequences; until the log has done it, a new owner would take them for live."""
        forget = partial(self.log.forget_sequences, self.model, runs)
        await self._insist(forget, f"{len(runs)} sequences of '{self.model}' cannot be forgotten yet")

    async def _insist(self, step: Callable[[], Awaitable[object]], complaint: str) -> bool:
        """Repeat a step until the log takes it, or the model is given up; returns whether it was taken."""
        return await insist(step, complaint, first_s=RETRY_S, last_s=RETRY_S, given_up=lambda: self.closed)

    # -- tidying and time ---------------------------------------------------------------------------------------------

    def requests_settled(self, requests: Sequence[seen.RequestQueued]) -> None:
        """The log has an outcome of these requests; repeated calls change nothing."""
        if self.dispatched.wanted:
            for request in requests:
                self.dispatched.wanted.pop(request.id, None)
        self.windows.settle(requests)
        for fact in self.dispatched.take_put_off():
            if isinstance(fact, BatchFinished):
                self.batch_finished(fact.batch_id, fact.executor, tokens=fact.tokens)
            else:
                self.on_death(fact)

    def arm(self) -> None:
        """Set the timer to the scheduler's next wake-up; called after anything that may have changed it."""
        if self.demand.unloaded:
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
                self.failed(error)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something until it is done or the model is given up."""
        self._tasks.spawn(coroutine)

    def _task_failed(self, error: BaseException) -> None:
        if isinstance(error, CharoniaError):  # what must be in the log is repeated where it is written
            _log.warning("something of model '%s' could not be written: %s", self.model, error)
        else:
            self.failed(error)


def _ids_of(joined: bytes) -> list[bytes]:
    return [joined[at : at + 16] for at in range(0, len(joined), 16)]
