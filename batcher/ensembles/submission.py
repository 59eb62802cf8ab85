"""Steps of an ensemble on their way into the queues of their models, and which of them are under way.

A step is an ordinary request of its model: made by `step_packing`, accepted into its queue, answered to the ensemble's
reply stream. Its id is made of the request's id and its place in the graph, so every owner of the ensemble asks for the
same step under the same id, and the log says whether it was asked for before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from batcher.entries.carriers import carrier_of
from batcher.scheduling.ensembles.ensemble_planner import SubmitStep
from batcher.scheduling.ensembles.ensemble_run import Path
from charonia import keys
from charonia.catalog.catalog import Catalog
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, LogUnavailable
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import Limits, QueueLog
from charonia.facts.events import FIELD_FACT, RequestCancelled, ResponsesWanted, pack_fact
from charonia.wire import (
    FILE,
    Reference,
    RequestRecord,
    ResponseRecord,
    record_fields,
)

from .cached_steps import CachedSteps
from .step_flights import Flight, step_id
from .step_packing import StepPacker

_log = logging.getLogger(__name__)

_RETRY_S = 0.2
_MOST_TOGETHER = 32
_MOST_TOGETHER_BYTES = 64 * 1024
_UNBOUNDED = Limits()
"""A request that was accepted must be able to go on: its steps are bounded by what the ensemble lets in."""

_Door = tuple[str, int, int, str]
"""Model, level, lane and tenant: what an entry of a queue has in common."""

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Submission:
    """The steps of one ensemble. `own` keeps a payload file as long as a request."""

    def __init__(
        self,
        log: QueueLog,
        model: str,
        catalog: Catalog,
        directory: PayloadDirectory,
        spawn: Spawn,
        own: Callable[[bytes, Reference], None],
        ended: Callable[[Flight, ResponseRecord | CharoniaError], None],
        cached: CachedSteps | None,
    ) -> None:
        """`ended` is called with steps that are answered by the cache, or through it."""
        self._ended = ended
        self.cached = cached
        self._log = log
        self._catalog = catalog
        self._packer = StepPacker(model, catalog, directory, own)
        self._spawn = spawn
        self._own = own
        self._endpoint = keys.ensemble_endpoint(model).encode()
        self.flights: dict[bytes, Flight] = {}
        self._doors: dict[_Door, list[Flight]] = {}
        self._scheduled = False
        self.closed = False

    def await_step(self, decision: SubmitStep) -> Flight:
        """The step is awaited from now on, and not asked for yet."""
        request, step = decision.request, decision.step
        flight = Flight(step_id(request.id, step.index, decision.path), decision, since_ns=monotonic_ns())
        if step.decoupled:
            held = self._catalog.held(step.model)
            served = held.get(step.version) or (held[max(held)] if held else None)
            flight.visible.repeatable = served is not None and served.interface.repeatable
        self.flights[flight.id] = flight
        return flight

    def ask(self, flight: Flight) -> None:
        """Send the step. Raises the `CharoniaError` its model's callers would get; then it is not awaited any more."""
        try:
            step = self._packer.check(flight)
            rules = None
            if self.cached is not None and not flight.decision.step.decoupled and not self.cached.waits(flight.id):
                rules = self.cached.rules(step.request, step.served)
            if self.cached is None or rules is None:
                self._packer.pack(flight, step)
        except CharoniaError:
            self.flights.pop(flight.id, None)
            raise
        if self.cached is None or rules is None:
            self._send(flight)
            return

        def send() -> None:
            self._packer.pack(flight, step)
            self._send(flight)

        lineage = carrier_of(flight.request).record.lineage
        tenant = lineage.tenant if lineage is not None else ""
        # a caller of the ensemble that is this very model may be what it would wait for
        alone = lineage is not None and any(name == step.served.model for name, _ in lineage.ancestors)
        ended = partial(self._ended, flight)
        self.cached.ask(flight.id, step.request, step.served, rules, tenant, send, ended, alone=alone)

    def inherit(self, flight: Flight) -> None:
        """A former owner may have asked for the step: what it wrote for it ends with the request."""
        name = f"{self._endpoint.decode()}/{flight.id.hex()}"
        self._own(flight.request.id, Reference(FILE, name, 0))

    def ask_unless_known(
        self,
        flight: Flight,
        answered: Callable[[bytes], Awaitable[bool]],
        refused: Callable[[Flight, CharoniaError], None],
    ) -> None:
        """Send the step unless the log has it already. `refused` is told what `ask` would raise.

        `answered` looks whether the reply stream has its answer.
        """
        self._spawn(self._ask_unless_known(flight, answered, refused))

    def done(self, flight: Flight) -> None:
        """A step has given its last answer, or is no longer awaited."""
        self.flights.pop(flight.id, None)

    def cancel(self, request_id: bytes, step: int, path: Path) -> None:
        """A step is no longer awaited: its model's owner is notified."""
        flight = self.flights.pop(step_id(request_id, step, path), None)
        if flight is None:
            return
        if self.cached is not None:
            self.cached.give_up(flight.id)
            if not flight.asked and not flight.record:
                return  # it waited for another's answer
        self._spawn(self._tell(flight))

    def want(self, request_id: bytes, step: int, path: Path, count: int) -> None:
        """So many responses of a step are wanted from now on."""
        flight = self.flights.get(step_id(request_id, step, path))
        if flight is not None:
            flight.wanted = count
            self._tell_wanted(flight)

    def remind(self) -> None:
        """Say again how many are wanted: an owner that is new, or was lost since, may not know."""
        for flight in self.flights.values():
            if flight.wanted:
                flight.told = 0
                self._tell_wanted(flight)

    def _tell_wanted(self, flight: Flight) -> None:
        if not flight.telling:
            flight.telling = True
            self._spawn(self._say_wanted(flight))

    async def _say_wanted(self, flight: Flight) -> None:
        """One at a time: what is wanted meanwhile goes with the next."""
        try:
            while flight.told < flight.wanted and flight.id in self.flights and not self.closed:
                count = flight.wanted
                fact = ResponsesWanted("", flight.id, count)
                await self._log.append(keys.facts(flight.model), [FIELD_FACT, pack_fact(fact)])
                flight.told = count
        except CharoniaError as error:
            _log.warning("how much is wanted of a step of model '%s' could not be said yet: %s", flight.model, error)
        finally:
            flight.telling = False

    async def _tell(self, flight: Flight) -> None:
        fact = RequestCancelled(flight.id)
        try:
            await self._log.append(keys.facts(flight.model), [FIELD_FACT, pack_fact(fact)])
        except CharoniaError as error:
            _log.warning("a step of model '%s' runs although nobody wants it: %s", flight.model, error)

    # -- sending ------------------------------------------------------------------------------------------------------

    def _send(self, flight: Flight) -> None:
        """Steps that become ready in one turn of the loop leave together."""
        lineage = carrier_of(flight.request).record.lineage
        key = (flight.model, flight.level, flight.request.lane, lineage.tenant if lineage is not None else "")
        self._doors.setdefault(key, []).append(flight)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        doors, self._doors = self._doors, {}
        if self.closed:
            return
        for door, waiting in doors.items():
            entry: list[Flight] = []
            size = 0
            for flight in waiting:
                if flight.id not in self.flights:
                    continue
                if entry and (len(entry) >= _MOST_TOGETHER or size + len(flight.record) > _MOST_TOGETHER_BYTES):
                    self._spawn(self._accept(door, entry))
                    entry, size = [], 0
                entry.append(flight)
                size += len(flight.record)
            if entry:
                self._spawn(self._accept(door, entry))

    async def _accept(self, door: _Door, entry: list[Flight]) -> None:
        """Insist until the log has them; what it may have taken is looked up, so that nothing is asked for twice."""
        model, level, lane, tenant = door
        while entry:
            try:
                await self._log.accept(
                    model,
                    level,
                    lane,
                    [(flight.id, len(flight.record) + flight.beside_bytes) for flight in entry],
                    record_fields([flight.record for flight in entry]),
                    _UNBOUNDED,
                    tenant=tenant,
                    journalled=any(_is_journalled(flight) for flight in entry),
                )
            except CharoniaError as error:
                _log.warning("steps of model '%s' were not accepted, trying again: %s", model, error)
                await asyncio.sleep(_RETRY_S)
                entry = [flight for flight in entry if flight.id in self.flights]
                entry = await self._not_taken(model, entry)
                continue
            for flight in entry:
                self._was_taken(flight)
            return

    async def _not_taken(self, model: str, entry: list[Flight]) -> list[Flight]:
        if not entry:
            return []
        try:
            attempts = await self._log.unsettled(model, [flight.id for flight in entry])
        except LogUnavailable:
            return entry
        for flight, attempt in zip(entry, attempts, strict=True):
            if attempt >= 0:
                self._was_taken(flight)
        return [flight for flight, attempt in zip(entry, attempts, strict=True) if attempt < 0]

    def _was_taken(self, flight: Flight) -> None:
        flight.asked = True
        flight.record = b""
        if flight.id not in self.flights and not self.closed:
            self._spawn(self._tell(flight))  # it was given up meanwhile

    async def _ask_unless_known(
        self,
        flight: Flight,
        answered: Callable[[bytes], Awaitable[bool]],
        refused: Callable[[Flight, CharoniaError], None],
    ) -> None:
        while flight.id in self.flights and not self.closed:
            try:
                attempt = (await self._log.unsettled(flight.model, [flight.id]))[0]
                if attempt >= 0:
                    self._was_taken(flight)
                elif await answered(flight.id):
                    flight.asked = True
                    flight.record = b""
                elif flight.id in self.flights:
                    break
                return
            except CharoniaError as error:
                _log.warning("whether a step was asked for cannot be read, trying again: %s", error)
                await asyncio.sleep(_RETRY_S)
        else:
            return
        try:
            self.ask(flight)
        except CharoniaError as error:
            refused(flight, error)

    async def lost(self, min_age_ns: int) -> list[Flight]:
        """Steps asked for at least so long ago of which the log knows nothing any more. Raises what the log raises."""
        before_ns = monotonic_ns() - min_age_ns
        by_model: dict[str, list[Flight]] = {}
        for flight in self.flights.values():
            if flight.asked and flight.since_ns <= before_ns:
                by_model.setdefault(flight.model, []).append(flight)
        found: list[Flight] = []
        for model, flights in by_model.items():
            for at in range(0, len(flights), 1000):
                part = flights[at : at + 1000]
                attempts = await self._log.unsettled(model, [flight.id for flight in part])
                found += [flight for flight, attempt in zip(part, attempts, strict=True) if attempt < 0]
        return found


def _is_journalled(flight: Flight) -> bool:
    record: RequestRecord = carrier_of(flight.request).record
    return record.journalled and not record.is_job
