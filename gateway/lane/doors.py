"""The doors of one gateway: which requests may go in waves, and when doors close.

A door opens for requests that were parsed (`way`), or for those that a front wants to recognise after one of them was
answered (`door_for`). It closes when anything changes that the decision depends on: served versions, executors, the
log, a drain. Then its signatures are forgotten and learnt again. A coroutine waits for each answer of a parsed request
(`Awaited`).

`terms.lane` and `counts.lanes` here are lanes of queues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from charonia import keys
from charonia.calls.admission import Admitted
from charonia.calls.payload_transfer import Payloads
from charonia.catalog.catalog import Catalog
from charonia.catalog.served import ServedVersion
from charonia.clock import monotonic_ns
from charonia.errors import EPOCH_CHANGED, SERVER_EXITING, CharoniaError, LogUnavailable, Unavailable, shed
from charonia.eventlog.payloads import BY_REFERENCE_BYTES
from charonia.eventlog.port import QueueLog
from charonia.facts.events import Fact, ProcessJoined, ProcessLeft
from charonia.inference import InferenceRequest
from charonia.tasks import Tasks
from charonia.tensors import Buffer
from charonia.wire import ResponseRecord, WaveReply
from gateway.access.terms import TermsBook
from gateway.dataplane import DataPlane
from gateway.entrances import Entrances
from gateway.metrics import RequestCounts
from gateway.tracing.tracer import Tracer

from .door import Call, Door
from .gathering import Gathering, Round
from .pending_waves import ReplyServer, Waves, response_in

MAX_REQUEST_BYTES = 16_384
"""Larger requests are not recognised: they gain little by sharing an entry."""
_MAX_DOORS = 1024
_TRIES = 16
_TRIES_NS = 100_000_000
_MAX_TRIED = 4096


class Doors:
    """All doors of one gateway. `fronts` are called with each door that closes, and forget its signatures.

    They are called with None when tenants' keys or bounds have changed: tenants must be identified again. All doors are
    closed before, so only gRPC's front, which keeps tenants by metadata, has more to forget.
    """

    def __init__(
        self,
        log: QueueLog,
        catalog: Catalog,
        dataplane: DataPlane,
        entrances: Entrances,
        terms: TermsBook,
        tracer: Tracer,
        endpoint: str,
        payloads: Payloads | None = None,
        *,
        is_on: bool = True,
    ) -> None:
        self._catalog = catalog
        self._dataplane = dataplane
        self._entrances = entrances
        self.tracer = tracer
        """Fronts ask it of each request that they recognise, while it is `on`."""
        self._terms = terms
        self._payloads = payloads
        self.waves = Waves(log, dataplane, endpoint, terms.default.limits, payloads)
        self.waves.on_close = self._forget
        self.waves.doors = self._doors
        self.replies = ReplyServer(self.waves)
        self.fronts: list[Callable[[Door | None], None]] = []
        self._ways: dict[object, Awaited] = {}
        self._gatherings: dict[tuple[bytes, bool], Gathering] = {}
        """By stream, large requests separately: they do not wait for small ones."""
        self._shared: Round | None = None
        """Shared by the queues of quick models."""
        self._tried: dict[tuple[str, int], tuple[int, int]] = {}
        """By model and size: number of requests examined, and the time of the first."""
        self._reserving: dict[str, asyncio.Task[bool]] = {}
        self.is_on = is_on and not terms.default.journalled
        """Whether requests go in waves at all, recognised or not. They do not if they are journalled one by one: then
        waves save nothing.
        """
        self._is_closed = not self.is_on
        self._tasks = Tasks()

    def start(self) -> None:
        self._catalog.listeners.append(self._changed)
        self._catalog.process_listeners.append(self._on_process)
        self._tasks.spawn(self.waves.watch(), "waves")

    def _doors(self) -> list[Door]:
        return [way.door for way in self._ways.values()]

    @property
    def is_open(self) -> bool:
        """Whether there are any doors, so that requests may be recognised."""
        return bool(self._ways)

    def may_learn(self, model: str, size_bytes: int) -> bool:
        """Whether to try to learn a signature from a request that was parsed. Few requests of a model and size are
        tried in a time: those that can never be recognised must not cost a try each.
        """
        if self._is_closed:
            return False
        key = model, size_bytes
        tries, since_ns = self._tried.get(key, (0, 0))
        now_ns = monotonic_ns()
        if now_ns - since_ns > _TRIES_NS:
            tries, since_ns = 0, now_ns
            if len(self._tried) >= _MAX_TRIED:
                self._tried.clear()
        self._tried[key] = tries + 1, since_ns
        return tries < _TRIES

    def door_for(self, request: InferenceRequest, tenant: str = "") -> Door | None:
        """The door for a tenant's requests like this one; None if they cannot be recognised by their bytes."""
        if request.deadline_ns or request.sequence_id or request.regions or not request.inputs:
            return None
        if sum([len(tensor.data) for tensor in request.inputs]) > MAX_REQUEST_BYTES:
            return None
        try:
            served = self._catalog.find(request.model, request.version)
            if request.version < 0 and served.model in self._catalog.routes.rules:
                return None  # its rule chooses the version of each request
            entrance = self._entrances.of(served)
            admission = entrance.admission
            if admission.caching is not None or entrance.recording is not None:
                return None
            admitted = admission.admit(request)
        except CharoniaError:
            return None
        if admitted.bytes_inputs:
            return None
        level = admission.level(request.priority)
        way = self.way(served, entrance.counts, admitted, level, request.timeout_us, tenant)
        return way.door if way is not None else None

    def way(
        self,
        served: ServedVersion,
        counts: RequestCounts,
        admitted: Admitted,
        level: int,
        timeout_us: int,
        tenant: str = "",
    ) -> Awaited | None:
        """The waves for a tenant's admitted requests like this one; None if each must be an entry of its own.

        All requests of a wave are of one tenant, on whose account they run (ADR 0055). Requests of a tenant with bounds
        are counted one by one, so they do not use waves; nor do those for models that call others in its name, and
        those that ask for a receipt.
        """
        meta = admitted.meta
        if not served.takes_waves or self._is_closed or admitted.sequential:
            return None
        if not meta.size_bytes or meta.wants_receipt:
            return None
        terms = self._terms.shared(tenant)
        if terms is None or (tenant and admitted.passes_on):
            return None
        is_large = meta.size_bytes >= BY_REFERENCE_BYTES
        if is_large and (admitted.bytes_inputs or not self._sends_in_slots(served, meta.size_bytes)):
            return None
        if admitted.bytes_inputs:  # all but the sizes, which differ between requests
            inputs = tuple([(place.name, place.datatype, place.shape) for place in meta.inputs])
            alike: tuple[object, ...] = (inputs, meta.outputs, repr(meta.parameters))
        else:
            alike = (meta.packed,)
        key = (served.model, served.version, level, tenant, timeout_us, *alike)
        way = self._ways.get(key)
        if way is not None and way.door.served is served:
            return way
        stream = keys.queue(served.model, level, terms.lane)
        if (served.model, level, terms.lane) not in self._dataplane.counts.lanes:
            return None
        if tenant:
            admitted = replace(admitted, meta=meta.of_tenant(tenant))
        return self._open(key, stream, served, counts, admitted, level, timeout_us, is_large=is_large)

    def _sends_in_slots(self, served: ServedVersion, size_bytes: int) -> bool:
        return self._payloads is not None and self._payloads.sends_in_slots(served, size_bytes)

    def _open(
        self,
        key: tuple[object, ...],
        stream: bytes,
        served: ServedVersion,
        counts: RequestCounts,
        admitted: Admitted,
        level: int,
        timeout_us: int,
        *,
        is_large: bool,
    ) -> Awaited | None:
        gathering = self._gatherings.get((stream, is_large))
        if gathering is not None and gathering.closed_until_ns > monotonic_ns():
            return None  # its model is slow
        if not self._is_reserved(served) or not self._batchers_read_waves():
            return None
        if len(self._ways) >= _MAX_DOORS:
            self._close_idle()
        if gathering is None:
            block = served.interface.dynamic_batching
            may_gather = block is not None and not block.queue_policy(level).max_queue_size
            instances = sum(served.slots.values())
            self._shared = self._shared or Round(self.waves, is_shared=True)
            gathering = Gathering(self.waves, stream, instances, self._shared, may_gather=may_gather)
            self._gatherings[stream, is_large] = gathering
        door = Door(self.waves, gathering, key, served, admitted, counts, level=level, timeout_us=timeout_us)
        way = self._ways[key] = Awaited(door)
        return way

    def _is_reserved(self, served: ServedVersion) -> bool:
        """Whether capacity for a model's waves is leased; if not, a lease is requested."""
        model = served.model
        asked = self._reserving.get(model)
        if asked is not None and asked.done():
            del self._reserving[model]
            if not asked.cancelled() and asked.exception() is None and asked.result():
                return self.waves.leases.has(model)
        elif asked is None:
            if self.waves.leases.has(model):
                return True
            self._reserving[model] = asyncio.get_running_loop().create_task(self.waves.leases.reserve(model))
        return False

    def _batchers_read_waves(self) -> bool:
        batchers = [process for process in self._catalog.processes.values() if process.owns_queues]
        return bool(batchers) and all(process.reads_waves for process in batchers)

    # -- closing ------------------------------------------------------------------------------------------------------

    def _changed(self, _model: str) -> None:
        # the names of other models may resolve differently now, too: learn all again, as changes are rare
        self._forget_all()

    def _close_idle(self) -> None:
        """Close the doors that were used least recently: where there are many tenants, not those of all."""
        doors = sorted(self._doors(), key=lambda door: (bool(door.waiting), door.used_ns))
        for door in doors[: max(1, _MAX_DOORS // 8)]:
            self.waves.close_door(door)

    def _forget_all(self) -> None:
        self.close_all()
        self._gatherings.clear()
        self._shared = None

    def _on_process(self, fact: Fact) -> None:
        if isinstance(fact, ProcessLeft) and fact.incarnation == self.waves.endpoint.decode():
            self.waves.leases.mark_ended()
        if isinstance(fact, ProcessJoined) and self._ways:
            if not self._batchers_read_waves():
                self.close_all()
            elif fact.owns_queues and not fact.reads_wave_slots:
                for door in self._doors():
                    door.column_in_slot = False

    def _forget(self, door: Door) -> None:
        way = self._ways.get(door.key)
        if way is not None and way.door is door:
            del self._ways[door.key]
        door.is_closed = True
        for front in self.fronts:
            front(door)

    def callers_changed(self) -> None:
        """The tenants' keys or bounds have changed."""
        self.close_all()
        for front in self.fronts:
            front(None)

    def close_all(self) -> None:
        """Forget all signatures; waves that were sent are still answered."""
        for door in self._doors():
            self.waves.close_door(door)

    def begin_drain(self) -> None:
        """Send no more waves."""
        self._is_closed = True
        self.close_all()

    def begin_anew(self) -> None:
        """The log was replaced by another one, which does not have these waves."""
        self._dataplane.counts.lanes.clear()
        self.close_all()
        self.waves.leases.drop()
        self.waves.lose_all(LogUnavailable(EPOCH_CHANGED))

    async def close(self) -> None:
        self.begin_drain()
        if self._tasks:
            await self._tasks.close()
            self._catalog.listeners.remove(self._changed)
            self._catalog.process_listeners.remove(self._on_process)
        for task in self._reserving.values():
            task.cancel()
        self.waves.lose_all(Unavailable(SERVER_EXITING))
        await self.waves.close()
        await self.replies.close()


class AwaitedCall(Call):
    """A request whose answer is a future's result: a response record, or None if it must take the full way."""

    __slots__ = ("future",)

    def __init__(self, signature: Awaited, data: tuple[Buffer, ...], client_id: bytes, deadline_ns: int) -> None:
        super().__init__(signature, data, client_id)
        self.deadline_ns = deadline_ns
        self.future: asyncio.Future[ResponseRecord | None] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return not self.future.done()


class Awaited:
    """Requests of one door that coroutines wait for; see `gateway.lane.door.Signature`."""

    __slots__ = ("door",)

    counted_by_lane = False

    def __init__(self, door: Door) -> None:
        self.door = door

    def takes_at_once(self, data: tuple[Buffer, ...]) -> bool:
        """Whether the loop has little to copy to send these tensors; the full way copies in a thread."""
        payloads = self.door.waves.payloads
        return not self.door.held_bytes or payloads is None or payloads.lends_at_once(data)

    async def infer(self, data: tuple[Buffer, ...], client_id: bytes, deadline_ns: int) -> ResponseRecord | None:
        """The response record of a request; None if it must take the full way.

        Raises `DeadlineExceeded` at its deadline, and `LogUnavailable` if the outcome is unknown. Cancelling the
        caller cancels the request.
        """
        door = self.door
        held_bytes = door.held_bytes
        if held_bytes and not door.waves.hold(held_bytes):
            return None  # the full way raises the error
        call = AwaitedCall(self, data, client_id, deadline_ns)
        try:
            door.waiting.append(call)
            door.gathering.came(door)
            if deadline_ns:
                door.waves.expiry.watch(deadline_ns)
            return await call.future
        except BaseException as error:
            if not call.future.done() or call.future.cancelled():
                call.abandon()
            if isinstance(error, CharoniaError):
                raise shed(error) from None
            raise
        finally:
            if held_bytes:
                door.waves.release(held_bytes)

    def answer(self, calls: list[Call], start: int, reply: WaveReply) -> None:
        for index, call in enumerate(calls, start):
            assert isinstance(call, AwaitedCall)
            if not call.gone and not call.future.done():
                call.future.set_result(response_in(reply, index))

    def respond(self, call: Call, record: ResponseRecord) -> None:
        assert isinstance(call, AwaitedCall)
        if not call.future.done():
            call.future.set_result(record)

    def fail(self, call: Call, error: CharoniaError) -> None:
        """The request has no known outcome."""
        assert isinstance(call, AwaitedCall)
        if not call.future.done():
            call.future.set_exception(error)

    def leave_lane(self, call: Call) -> None:
        assert isinstance(call, AwaitedCall)
        if not call.future.done():
            call.future.set_result(None)
