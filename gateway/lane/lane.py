"""Who may ride: the doors of one gateway, and what closes them.

A door opens for a request that went the full way and was answered; it closes when anything changes that decided about
it: what is served and by whom, tracing, the log, a drain. Then its signatures are forgotten and learned anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from charonia import keys
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, LogUnavailable, Unavailable
from charonia.eventlog.port import EventLog
from charonia.events import Fact, ProcessJoined
from charonia.inference import InferenceRequest
from charonia.models.catalog import Catalog
from charonia.models.served import ServedVersion
from gateway.dataplane import DataPlane
from gateway.entrances import Entrances
from gateway.pending import EPOCH_CHANGED
from gateway.request_rules import SERVER_EXITING
from gateway.terms import TermsBook
from gateway.tracing.tracer import Tracer

from .door import Door
from .waves import ReplyServer, Waves

MAX_REQUEST_BYTES = 16_384
"""Larger requests gain little by sharing an entry, and travel beside the log from 32 KB on."""
_MOST_DOORS = 1024


class Lane:
    """The lane of one gateway. `fronts` are told of each door that closes: they forget what leads to it."""

    def __init__(
        self,
        log: EventLog,
        catalog: Catalog,
        dataplane: DataPlane,
        entrances: Entrances,
        terms: TermsBook,
        tracer: Tracer,
        endpoint: str,
        *,
        is_on: bool = True,
    ) -> None:
        self._catalog = catalog
        self._dataplane = dataplane
        self._entrances = entrances
        self._tracer = tracer
        self._terms = terms.default
        self.waves = Waves(log, dataplane, endpoint, terms.default.limits)
        self.waves.on_close = self._forget
        self.replies = ReplyServer(self.waves)
        self.fronts: list[Callable[[Door], None]] = []
        self._doors: dict[object, Door] = {}
        self._slow: dict[object, int] = {}
        """Doors that closed because their model took its time, until when."""
        self._reserving: dict[str, asyncio.Task[bool]] = {}
        self.is_on = is_on and not self._terms.journalled
        """Whether fronts recognise requests at all. Those that are journalled one by one gain nothing here."""
        self._is_closed = not self.is_on
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._catalog.listeners.append(self._changed)
        self._catalog.process_listeners.append(self._on_process)
        self._watch = asyncio.get_running_loop().create_task(self.waves.watch(lambda: list(self._doors.values())))

    @property
    def is_open(self) -> bool:
        """Whether any request may be recognised."""
        return bool(self._doors)

    def door_for(self, request: InferenceRequest) -> Door | None:
        """The door for requests like this one, which went the full way; None where they have to go that way."""
        if self._is_closed or self._tracer.on or request.deadline_ns or request.sequence_id or not request.inputs:
            return None
        try:
            served = self._catalog.find(request.model, request.version)
            if not served.takes_waves:
                return None
            counts, admission = self._entrances.entrance(served)
            if admission.caching is not None:
                return None
            admitted = admission.admit(request)
        except CharoniaError:
            return None
        if admitted.bytes_inputs or admitted.sequential or not 0 < admitted.meta.size_bytes <= MAX_REQUEST_BYTES:
            return None
        level = admission.level(request.priority)
        key = (served.model, served.version, admitted.meta.packed, level, request.timeout_us)
        door = self._doors.get(key)
        if door is not None and door.served is served:
            return door
        if self._slow.get(key, 0) > monotonic_ns() or not self._is_reserved(served) or not self._batchers_read_waves():
            return None
        if len(self._doors) >= _MOST_DOORS:
            self.close_all()
        stream = keys.queue(served.model, level, self._terms.lane)
        timeout_us = request.timeout_us
        door = Door(self.waves, key, served, admitted, counts, level=level, stream=stream, timeout_us=timeout_us)
        door.used_ns = monotonic_ns()
        self._doors[key] = door
        return door

    def _is_reserved(self, served: ServedVersion) -> bool:
        """Whether room for a model's waves is leased; if not, it is asked for."""
        model = served.model
        asked = self._reserving.get(model)
        if asked is not None and asked.done():
            del self._reserving[model]
            if not asked.cancelled() and asked.exception() is None and asked.result():
                return self.waves.is_leased(model)
        elif asked is None:
            if self.waves.is_leased(model):
                return True
            self._reserving[model] = asyncio.get_running_loop().create_task(self.waves.reserve(model))
        return False

    def _batchers_read_waves(self) -> bool:
        batchers = [p for p in self._catalog.processes.values() if p.role == "batcher" or p.hosts_batcher]
        return bool(batchers) and all(process.reads_waves for process in batchers)

    # -- closing ------------------------------------------------------------------------------------------------------

    def _changed(self, _model: str) -> None:
        # names of models may lead elsewhere now, too: what changes rarely is learned anew as a whole
        self.close_all()

    def _on_process(self, fact: Fact) -> None:
        if isinstance(fact, ProcessJoined) and self._doors and not self._batchers_read_waves():
            self.close_all()

    def _forget(self, door: Door) -> None:
        if self._doors.get(door.key) is door:
            del self._doors[door.key]
        door.is_closed = True
        if door.closed_until_ns:
            if len(self._slow) >= _MOST_DOORS:
                self._slow.clear()
            self._slow[door.key] = door.closed_until_ns
        for front in self.fronts:
            front(door)

    def close_all(self) -> None:
        """Forget everything that was learned; waves under way are answered."""
        for door in list(self._doors.values()):
            self.waves.close_door(door)

    def begin_drain(self) -> None:
        """Recognise nothing any more."""
        self._is_closed = True
        self.close_all()

    def begin_anew(self) -> None:
        """The log is another one, which knows nothing of these waves."""
        self.close_all()
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
