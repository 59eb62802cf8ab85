"""Steps of an ensemble on their way into the queues of their models, and which of them are under way.

A step is an ordinary request of its model: made by `step_packing`, accepted into its queue, answered to the ensemble's
reply stream. Its id is made of the request's id and its place in the graph, so every owner of the ensemble asks for the
same step under the same id, and the log says whether it was asked for before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from batcher.entries.carriers import carrier_of
from batcher.scheduling.ensembles.ensemble_planner import SubmitStep
from batcher.scheduling.ensembles.ensemble_run import Path
from charonia import keys
from charonia.calls.payload_transfer import Payloads
from charonia.calls.queue_entrance import QueueEntrance, Spawn
from charonia.calls.requester import Requester
from charonia.calls.waiters import OpenRequest
from charonia.catalog.catalog import Catalog
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, LogUnavailable
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import EventLog
from charonia.facts.events import FIELD_FACT, ResponsesWanted, pack_fact
from charonia.wire import FILE, Reference, ResponseRecord

from .cached_steps import CachedSteps
from .step_flights import Flight, step_id
from .step_packing import StepPacker

_log = logging.getLogger(__name__)

_RETRY_S = 0.2
_LOST_AFTER_NS = 5_000_000_000


class StepEntrance(QueueEntrance):
    """Insists: a request that was accepted must be able to go on, so its steps have no bounds of their own."""

    async def _refused(self, entry: list[OpenRequest], error: Exception) -> list[OpenRequest]:
        """What the log may have taken is looked up, so that nothing is asked for twice."""
        if not isinstance(error, CharoniaError):
            raise error
        _log.warning("steps of model '%s' were not accepted, trying again: %s", self._model, error)
        await asyncio.sleep(_RETRY_S)
        entry = [request for request in entry if not request.withdrawn]
        try:
            attempts = await self._log.unsettled(self._model, [one.id for one in entry]) if entry else []
        except LogUnavailable:
            return entry
        self._accepted([one for one, attempt in zip(entry, attempts, strict=True) if attempt >= 0])
        return [one for one, attempt in zip(entry, attempts, strict=True) if attempt < 0]


class Submission:
    """The steps of one ensemble. `own` keeps a payload file as long as a request."""

    def __init__(
        self,
        log: EventLog,
        model: str,
        catalog: Catalog,
        directory: PayloadDirectory,
        spawn: Spawn,
        own: Callable[[bytes, Reference], None],
        *,
        is_answered: Callable[[bytes], Awaitable[bool]],
        refused: Callable[[Flight, CharoniaError], None],
        ended: Callable[[Flight, ResponseRecord | CharoniaError], None],
        cached: CachedSteps | None,
    ) -> None:
        """`is_answered` looks whether the reply stream has a step's answer.

        `refused` is called with what keeps a step from its model, `ended` with steps that are answered by the cache, or
        through it.
        """
        self._log = log
        self._catalog = catalog
        self._spawn = spawn
        self._own = own
        self._is_answered = is_answered
        self._refused = refused
        self._ended = ended
        self.cached = cached
        self._endpoint = endpoint = keys.ensemble_endpoint(model)
        payloads = Payloads(log, directory, catalog.processes, endpoint)
        self._packer = StepPacker(model, endpoint.encode(), catalog, directory, payloads, own)
        # what it is answered lies in a stream of the ensemble, which the next owner reads on
        self._requester: Requester[Flight] = Requester(log, endpoint, payloads, spawn=spawn)
        self._requester.make_entrance = StepEntrance
        self._requester.lose = self._ask_again
        self.flights = self._requester.requests
        self.closed = False

    def close(self) -> None:
        """The ensemble has another owner: nothing more is asked for from here."""
        self.closed = True
        for flight in self.flights.values():
            flight.withdrawn = True
        if self.cached is not None:
            self.cached.close()

    def await_step(self, decision: SubmitStep) -> Flight:
        """The step is awaited from now on, and not asked for yet."""
        step, flight = decision.step, Flight(decision)
        if step.decoupled:
            held = self._catalog.held(step.model)
            served = held.get(step.version) or (held[max(held)] if held else None)
            flight.visible.repeatable = served is not None and served.interface.repeatable
        self.flights[flight.id] = flight
        return flight

    def ask(self, flight: Flight) -> None:
        """Send the step. Where its model refuses it, it is not awaited any more."""
        try:
            step = self._packer.check(flight)
            rules = None
            if self.cached is not None and not flight.decision.step.decoupled and not self.cached.waits(flight.id):
                rules = self.cached.rules(step.request, step.served)
            if self.cached is None or rules is None:
                self._packer.pack(flight, step)
        except CharoniaError as error:
            self.done(flight)
            self._refused(flight, error)
            return
        if self.cached is None or rules is None:
            self._send(flight)
            return

        def send() -> None:
            self._packer.pack(flight, step)
            self._send(flight)

        lineage = carrier_of(flight.request).record.lineage
        # a caller of the ensemble that is this very model may be what it would wait for
        alone = lineage is not None and any(name == step.served.model for name, _ in lineage.ancestors)
        ended = partial(self._ended, flight)
        self.cached.ask(flight.id, step.request, step.served, rules, flight.tenant, send, ended, alone=alone)

    def inherit(self, flight: Flight) -> None:
        """A former owner may have asked for the step: what it wrote for it ends with the request."""
        name = f"{self._endpoint}/{flight.id.hex()}"
        self._own(flight.request.id, Reference(FILE, name, 0))

    def ask_unless_known(self, flight: Flight) -> None:
        """Send the step unless the log has it already."""
        flight.sent = True  # perhaps
        self._spawn(self._ask_unless_known(flight))

    def was_asked(self, flight: Flight) -> None:
        """The log has it, or its answer."""
        flight.sent = flight.accepted = True
        flight.record = b""

    def done(self, flight: Flight) -> None:
        """A step has given its last answer, or is no longer awaited."""
        self.flights.pop(flight.id, None)
        flight.withdrawn = True

    def cancel(self, request_id: bytes, step: int, path: Path) -> None:
        """A step is no longer awaited: its model's owner is notified."""
        flight = self.flights.pop(step_id(request_id, step, path), None)
        if flight is None:
            return
        if self.cached is not None:
            self.cached.give_up(flight.id)
        self._requester.withdraw(flight)

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

    # -- sending ------------------------------------------------------------------------------------------------------

    def _send(self, flight: Flight) -> None:
        """Steps that become ready in one turn of the loop leave together."""
        record = carrier_of(flight.request).record
        journalled = record.journalled and not record.is_job
        entrance = self._requester.entrance(
            flight.model, flight.level, flight.request.lane, flight.tenant, journalled=journalled
        )
        entrance.submit(flight)

    async def _ask_unless_known(self, flight: Flight) -> None:
        while flight.id in self.flights and not self.closed:
            try:
                attempt = (await self._log.unsettled(flight.model, [flight.id]))[0]
                if attempt >= 0 or await self._is_answered(flight.id):
                    self.was_asked(flight)
                elif flight.id in self.flights:
                    flight.sent = False
                    self.ask(flight)
                return
            except CharoniaError as error:
                _log.warning("whether a step was asked for cannot be read, trying again: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def look_after_lost(self) -> None:
        """Ask again for steps of which the log knows nothing any more. Raises what the log raises."""
        before_ns = monotonic_ns() - _LOST_AFTER_NS
        await self._requester.recheck([one.id for one in self.flights.values() if one.since_ns <= before_ns])

    def _ask_again(self, flight: Flight) -> None:
        if not self.closed:
            _log.warning("a step of model '%s' was lost on its way: it is asked for again", flight.model)
            flight.accepted = False
            self.ask_unless_known(flight)
