"""Who may ride: the doors of one gateway, and what closes them.

A door opens for a request that went the full way and was answered; it closes when anything changes that decided about
it: what is served and by whom, the log, a drain. Then its signatures are forgotten and learned again.

Requests that were read in full share waves, too: each has a coroutine that waits for its answer (`Awaited`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
"""Larger requests are not recognised by their bytes: they gain little by sharing an entry."""
_MOST_DOORS = 1024
_TRIES = 16
_TRIES_NS = 100_000_000
_MOST_TRIED = 4096


class Lane:
    """The lane of one gateway. `fronts` are notified of each door that closes: they forget what leads to it.

    They are notified of no door when the keys or the bounds of callers have changed: whose call something is must be
    found out again.
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
        """By stream, those of large requests apart: they do not wait for one another."""
        self._shared: Round | None = None
        """Of the queues of quick models."""
        self._tried: dict[tuple[str, int], tuple[int, int]] = {}
        """By model and size: how often requests were looked at since when."""
        self._reserving: dict[str, asyncio.Task[bool]] = {}
        self.is_on = is_on and not terms.default.journalled
        """Whether fronts recognise requests at all. Those that are journalled one by one gain nothing here."""
        self._is_closed = not self.is_on
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._catalog.listeners.append(self._changed)
        self._catalog.process_listeners.append(self._on_process)
        self._watch = asyncio.get_running_loop().create_task(self.waves.watch())

    def _doors(self) -> list[Door]:
        return [way.door for way in self._ways.values()]

    @property
    def is_open(self) -> bool:
        """Whether any request may be recognised."""
        return bool(self._ways)

    def may_learn(self, model: str, size_bytes: int) -> bool:
        """Whether it is worth while to look at a request that went the full way: not at all that ever do so."""
        if self._is_closed:
            return False
        key = model, size_bytes
        tries, since_ns = self._tried.get(key, (0, 0))
        now_ns = monotonic_ns()
        if now_ns - since_ns > _TRIES_NS:
            tries, since_ns = 0, now_ns
            if len(self._tried) >= _MOST_TRIED:
                self._tried.clear()
        self._tried[key] = tries + 1, since_ns
        return tries < _TRIES

    def door_for(self, request: InferenceRequest, tenant: str = "") -> Door | None:
        """The door for a tenant's requests like this one, to be recognised by their bytes; None where each has to be
        read.
        """
        if request.deadline_ns or request.sequence_id or request.regions or not request.inputs:
            return None
        if sum([len(tensor.data) for tensor in request.inputs]) > MAX_REQUEST_BYTES:
            return None
        try:
            served = self._catalog.find(request.model, request.version)
            entrance = self._entrances.of(served)
            admission = entrance.admission
            if admission.caching is not None:
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
        """The way into waves for a tenant's admitted requests; None where they have to go by themselves.

        A wave does not say whose it is: it goes to the queue that its tenant shares with few others. So requests of a
        tenant with bounds, and those of models that call others in its name, go by themselves.
        """
        meta = admitted.meta
        if not served.takes_waves or self._is_closed or admitted.sequential:
            return None
        if not meta.size_bytes:
            return None
        terms = self._terms.shared(tenant)
        if terms is None or (tenant and admitted.passes_on):
            return None
        is_large = meta.size_bytes >= BY_REFERENCE_BYTES
        if is_large and (admitted.bytes_inputs or not self._sends_in_slots(served, meta.size_bytes)):
            return None
        if admitted.bytes_inputs:  # all of it but the sizes, which differ from request to request
            inputs = tuple([(place.name, place.datatype, place.shape) for place in meta.inputs])
            alike: tuple[object, ...] = (inputs, meta.outputs, repr(meta.parameters))
        else:
            alike = (meta.packed,)
        key = (served.model, served.version, level, terms.lane, timeout_us, *alike)
        way = self._ways.get(key)
        if way is not None and way.door.served is served:
            return way
        stream = keys.queue(served.model, level, terms.lane)
        if (served.model, level, terms.lane) not in self._dataplane.counts.lanes:
            return None
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
            return None  # its model takes its time
        if not self._is_reserved(served) or not self._batchers_read_waves():
            return None
        if len(self._ways) >= _MOST_DOORS:
            self._forget_all()
            gathering = None
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
        """Whether room for a model's waves is leased; if not, it is asked for."""
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
        batchers = [p for p in self._catalog.processes.values() if p.role == "batcher" or p.hosts_batcher]
        return bool(batchers) and all(process.reads_waves for process in batchers)

    # -- closing ------------------------------------------------------------------------------------------------------

    def _changed(self, _model: str) -> None:
        # names of models may lead elsewhere now, too: what changes rarely is learned again as a whole
        self._forget_all()

    def _forget_all(self) -> None:
        self.close_all()
        self._gatherings.clear()
        self._shared = None

    def _on_process(self, fact: Fact) -> None:
        if isinstance(fact, ProcessLeft) and fact.incarnation == self.waves.endpoint.decode():
            self.waves.leases.were_ended()
        if isinstance(fact, ProcessJoined) and self._ways and not self._batchers_read_waves():
            self.close_all()

    def _forget(self, door: Door) -> None:
        way = self._ways.get(door.key)
        if way is not None and way.door is door:
            del self._ways[door.key]
        door.is_closed = True
        for front in self.fronts:
            front(door)

    def callers_changed(self) -> None:
        """Keys or bounds of tenants are others now."""
        self.close_all()
        for front in self.fronts:
            front(None)

    def close_all(self) -> None:
        """Forget everything that was learned; waves under way are answered."""
        for door in self._doors():
            self.waves.close_door(door)

    def begin_drain(self) -> None:
        """Recognise nothing any more."""
        self._is_closed = True
        self.close_all()

    def begin_anew(self) -> None:
        """The log is another one, which knows nothing of these waves."""
        self._dataplane.counts.lanes.clear()
        self.close_all()
        self.waves.leases.drop()
        self.waves.lose_all(LogUnavailable(EPOCH_CHANGED))

    async def close(self) -> None:
        self.begin_drain()
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            self._catalog.listeners.remove(self._changed)
            self._catalog.process_listeners.remove(self._on_process)
        for task in self._reserving.values():
            task.cancel()
        self.waves.lose_all(Unavailable(SERVER_EXITING))
        await self.waves.close()
        await self.replies.close()


class AwaitedCall(Call):
    """A request whose answer is a future's result: a response record, or None where it has to go by itself."""

    __slots__ = ("future",)

    def __init__(self, signature: Awaited, data: tuple[Buffer, ...], client_id: bytes, deadline_ns: int) -> None:
        super().__init__(signature, data, client_id)
        self.deadline_ns = deadline_ns
        self.future: asyncio.Future[ResponseRecord | None] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return not self.future.done()


class Awaited:
    """The requests of one door that are awaited; see `gateway.lane.door.Signature`."""

    __slots__ = ("door",)

    counts_itself = False

    def __init__(self, door: Door) -> None:
        self.door = door

    def takes_at_once(self, data: tuple[Buffer, ...]) -> bool:
        """Whether the loop has little to copy to send these tensors; the full way copies in a thread."""
        payloads = self.door.waves.payloads
        return not self.door.held_bytes or payloads is None or payloads.lends_at_once(data)

    async def infer(self, data: tuple[Buffer, ...], client_id: bytes, deadline_ns: int) -> ResponseRecord | None:
        """The response record of a request that is in no wave yet; None where it has to go by itself.

        Raises `DeadlineExceeded` at its deadline and `LogUnavailable` where the outcome is unknown. Cancelling the
        caller cancels the request.
        """
        door = self.door
        held_bytes = door.held_bytes
        if held_bytes and not door.waves.hold(held_bytes):
            return None  # the full way says why
        call = AwaitedCall(self, data, client_id, deadline_ns)
        door.waiting.append(call)
        door.gathering.came(door)
        if deadline_ns:
            door.waves.expiry.watch(deadline_ns)
        try:
            return await call.future
        except asyncio.CancelledError:
            call.abandon()
            raise
        except CharoniaError as error:
            raise shed(error) from None
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
        """The request has no outcome that is known."""
        assert isinstance(call, AwaitedCall)
        if not call.future.done():
            call.future.set_exception(error)

    def leave(self, call: Call) -> None:
        assert isinstance(call, AwaitedCall)
        if not call.future.done():
            call.future.set_result(None)
