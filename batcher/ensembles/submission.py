"""Sends steps of an ensemble into the queues of their models and tracks which of them are running.

A step is an ordinary request of its model: checked and packed as a record, accepted into its queue, answered to the
ensemble's reply stream. Its id is derived from the request's id and its place in the graph, so every owner sends the
same step under the same id, and the log shows whether it was sent before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from batcher.entries.carriers import carried_of
from batcher.scheduling.ensembles.ensemble_planner import SubmitStep
from batcher.scheduling.ensembles.ensemble_run import Path
from charonia import keys
from charonia.calls.admission import Admissions, Admitted
from charonia.calls.entry_packer import EntryPacker, Spawn, request_record
from charonia.calls.payload_transfer import Payloads
from charonia.calls.requester import Requester
from charonia.calls.waiters import OpenRequest
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, InvalidArgument, LogUnavailable
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory
from charonia.eventlog.port import EventLog
from charonia.facts.events import FIELD_FACT, ResponsesWanted, pack_fact
from charonia.inference import InferenceRequest
from charonia.models.ensemble import ENSEMBLE_SCHEDULING
from charonia.tasks import insist
from charonia.traces.contexts import Traced
from charonia.wire import FILE, FLAG_JOURNALLED, FLAG_TIMED, Lineage, Reference, RequestRecord, ResponseRecord

from .cached_steps import CachedSteps
from .step_flights import Flight, step_id
from .step_tensors import renamed

_log = logging.getLogger(__name__)

_RETRY_S = 0.2
_LOST_AFTER_NS = 5_000_000_000


class StepEntryPacker(EntryPacker):
    """Retries until accepted: an accepted request must be able to go on, so its steps have no bounds of their own."""

    async def _refused(self, entry: list[OpenRequest], error: Exception) -> list[OpenRequest]:
        """If the log may have taken a step, this is looked up, so that no step is sent twice. One that the log will
        never take fails.
        """
        if not isinstance(error, CharoniaError):
            raise error
        if isinstance(error, InvalidArgument):
            if len(entry) == 1:
                entry[0].failed(error)
            else:
                for request in entry:
                    if not request.withdrawn:  # the one before it may have ended their request
                        await self._accept([request])
            return []
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
        """`is_answered` checks the reply stream for a step's answer. `refused` is called with the error that keeps a
        step from its model, `ended` with steps that the cache answered.
        """
        self._log = log
        self._catalog = catalog
        self._spawn = spawn
        self._own = own
        self._is_answered = is_answered
        self._refused = refused
        self._ended = ended
        self.cached = cached
        self._directory = directory
        self._endpoint = endpoint = keys.ensemble_endpoint(model)
        payloads = Payloads(log, directory, catalog.processes, endpoint)
        self._packer = StepPacker(model, endpoint.encode(), catalog, directory, payloads, own)
        # its answers lie in a stream of the ensemble, which the next owner reads on
        self._requester: Requester[Flight] = Requester(log, endpoint, payloads, spawn=spawn)
        self._requester.make_packer = StepEntryPacker
        self._requester.lose = self._ask_again
        self.flights = self._requester.requests
        self.closed = False

    def close(self) -> None:
        """The ensemble has another owner: send nothing more from here."""
        self.closed = True
        for flight in self.flights.values():
            flight.withdrawn = True
        if self.cached is not None:
            self.cached.close()

    def await_step(self, decision: SubmitStep) -> Flight:
        """The step is awaited from now on, and not sent yet."""
        step, flight = decision.step, Flight(decision, self._not_taken)
        if step.decoupled:
            held = self._catalog.held(step.model)
            served = held.get(step.version) or (held[max(held)] if held else None)
            flight.visible.repeatable = served is not None and served.interface.repeatable
        self.flights[flight.id] = flight
        self._requester.cancels.drop(flight.id)
        return flight

    def ask(self, flight: Flight) -> None:
        """Send the step. If its model refuses it, it is no longer awaited."""
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

        lineage = carried_of(flight.request).record.lineage
        # it might wait for a caller of the ensemble that is this very model
        alone = lineage is not None and any(name == step.served.model for name, _ in lineage.ancestors)
        ended = partial(self._ended, flight)
        self.cached.ask(flight.id, step.request, step.served, rules, flight.tenant, send, ended, alone=alone)

    def inherit(self, flight: Flight) -> None:
        """A former owner may have sent the step: the payloads it wrote are deleted with the request."""
        file = flight.id.hex()
        # an older release does not mark its log's files
        for name in (self._directory.file_name(file), f"{self._endpoint}/{file}"):
            self._own(flight.request.id, Reference(FILE, name, 0))

    def ask_unless_known(self, flight: Flight) -> None:
        """Send the step unless the log has it already."""
        flight.sent = True  # uncertain
        self._spawn(self._ask_unless_known(flight))

    def was_asked(self, flight: Flight) -> None:
        """The log has the step, or its answer."""
        flight.sent = flight.accepted = True
        flight.record = b""

    def _not_taken(self, flight: Flight, error: CharoniaError) -> None:
        """The log does not take a step."""
        if self.flights.get(flight.id) is not flight:
            return
        self.done(flight)
        if self.cached is not None:
            self.cached.give_up(flight.id)
        self._refused(flight, error)

    def done(self, flight: Flight) -> None:
        """A step has sent its last answer, or is no longer awaited."""
        self.flights.pop(flight.id, None)
        flight.withdrawn = True

    def cancel(self, request_id: bytes, step: int, path: Path) -> None:
        """A step is no longer awaited: notify its model's owner."""
        flight = self.flights.pop(step_id(request_id, step, path), None)
        if flight is None:
            return
        if self.cached is not None:
            self.cached.give_up(flight.id)
        self._requester.withdraw(flight)

    def want(self, request_id: bytes, step: int, path: Path, count: int) -> None:
        """The step may send `count` responses from now on."""
        flight = self.flights.get(step_id(request_id, step, path))
        if flight is not None:
            flight.wanted = count
            self._tell_wanted(flight)

    def remind(self) -> None:
        """Repeat how many responses are wanted: an owner that is new, or was lost since, may not know."""
        for flight in self.flights.values():
            if flight.wanted:
                flight.told = 0
                self._tell_wanted(flight)

    def _tell_wanted(self, flight: Flight) -> None:
        if not flight.telling:
            flight.telling = True
            self._spawn(self._say_wanted(flight))

    async def _say_wanted(self, flight: Flight) -> None:
        """One at a time: later counts go with the next write."""
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
        """Steps that become ready in one turn of the loop are sent together."""
        record = carried_of(flight.request).record
        journalled = record.journalled and not record.is_job
        packer = self._requester.packer(
            flight.model, flight.level, flight.request.lane, flight.tenant, journalled=journalled
        )
        packer.submit(flight)

    async def _ask_unless_known(self, flight: Flight) -> None:
        async def ask() -> None:
            attempt = (await self._log.unsettled(flight.model, [flight.id]))[0]
            if attempt >= 0 or await self._is_answered(flight.id):
                self.was_asked(flight)
            elif flight.id in self.flights:
                flight.sent = False
                self.ask(flight)

        def given_up() -> bool:
            return flight.id not in self.flights or self.closed

        complaint = "whether a step was asked for cannot be read"
        await insist(ask, complaint, first_s=_RETRY_S, last_s=_RETRY_S, given_up=given_up)

    async def look_after_lost(self) -> None:
        """Send again the steps that the log lost. Raises what the log raises."""
        before_ns = monotonic_ns() - _LOST_AFTER_NS
        await self._requester.recheck([one.id for one in self.flights.values() if one.since_ns <= before_ns])

    def _ask_again(self, flight: Flight) -> None:
        if not self.closed:
            _log.warning("a step of model '%s' was lost on its way: it is asked for again", flight.model)
            flight.accepted = False
            self.ask_unless_known(flight)


@dataclass(frozen=True, slots=True)
class Checked:
    """A step as a request to its model; `reference` is a file that holds exactly its inputs."""

    request: InferenceRequest
    served: ServedVersion
    admitted: Admitted
    reference: Reference | None


class StepPacker:
    """Packs the steps of one ensemble. `own` keeps a payload file as long as a request."""

    def __init__(
        self,
        model: str,
        endpoint: bytes,
        catalog: Catalog,
        directory: PayloadDirectory,
        payloads: Payloads,
        own: Callable[[bytes, Reference], None],
    ) -> None:
        self._ensemble = model
        self._endpoint = endpoint
        self._catalog = catalog
        self._directory = directory
        self._payloads = payloads
        self._own = own
        self._admissions = Admissions()

    def check(self, flight: Flight) -> Checked:
        """Admit the step; raises the errors that any client of its model would get."""
        decision = flight.decision
        step, record = decision.step, carried_of(decision.request).record
        served = self._served(step.model, step.version)
        admission = self._admissions.of(served)
        tensors, reference = renamed(step, decision.inputs)
        asked = InferenceRequest(
            step.model, served.version, tensors, record.client_id, decision.outputs, record.meta.parameters
        )
        asked.deadline_ns, asked.timeout_us, asked.priority = record.deadline_ns, record.timeout_us, record.level
        mark = flight.mark
        if mark.correlation_id:
            asked.sequence_id, asked.sequence_start, asked.sequence_end = mark.correlation_id, mark.start, mark.end
        flight.level = admission.level(record.level)
        return Checked(asked, served, admission.admit(asked), reference)

    def pack(self, flight: Flight, step: Checked) -> None:
        """Pack its record; a large step's tensors lie out of band, where all executors of its model can read them."""
        record = carried_of(flight.request).record
        asked, admitted, reference = step.request, step.admitted, step.reference
        mark = flight.mark
        shared = self._payloads.flags(step.served)
        durable = record.is_job or record.journalled
        if durable or not shared:
            reference = None
        elif reference is None and admitted.meta.size_bytes >= BY_REFERENCE_BYTES:
            # named after the step, so that a successor knows the files it inherits
            reference = self._directory.write([tensor.data for tensor in asked.inputs], name=flight.id.hex())
            if reference is not None:
                self._own(flight.request.id, reference)
        flags = FLAG_TIMED | (0 if durable else shared)
        if record.journalled and not record.is_job:
            flags |= FLAG_JOURNALLED
        if record.trace is not None:
            asked.trace = Traced(record.trace.context.child(flight.id[:8]))
        flight.record = request_record(
            *(
                flight.id,
                self._endpoint,
                asked,
                admitted,
                flight.level,
                flags,
                reference,
                self._lineage(record, step.served),
            ),
            tenant=flight.tenant,
            sequence=mark if mark.correlation_id else None,  # within the scope of the ensemble's own sequence (S52)
            window=flight.decision.window,
        )
        flight.size_bytes = len(flight.record) + (reference.size_bytes if reference is not None else 0)

    def _lineage(self, record: RequestRecord, served: ServedVersion) -> Lineage | None:
        """The caller context of a step: complete when a model made the request, otherwise only its tenant."""
        lineage = record.lineage
        if lineage is not None and lineage.ancestors:
            # an ensemble can end before its step only by failing
            lineage = lineage.with_child(self._ensemble, record.id, blocks=lineage.blocked > 0)
        if served.interface.decoupled or served.interface.scheduling == ENSEMBLE_SCHEDULING:  # it may never end
            return replace(lineage or Lineage(), step_of=(self._ensemble, record.id))
        # an ensemble's request may be a step itself
        return lineage if lineage is None or lineage.step_of is None else replace(lineage, step_of=None)

    def _served(self, model: str, version: int) -> ServedVersion:
        """The version that a step calls: one that is being unloaded still takes steps of accepted requests (R27)."""
        held = self._catalog.held(model)
        accepting = self._catalog.served(model) or held
        number = version if version in held or version > 0 else max(accepting, default=-1)
        served = held.get(number)
        return served if served is not None else self._catalog.find(model, version)
