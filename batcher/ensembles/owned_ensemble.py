"""One owned ensemble: an `OwnedModel` whose planner calls other models for the steps of its requests.

The only state of a running request is its entry in the ensemble's queue, its steps in their models' queues and their
answers in the ensemble's reply stream. A new owner plans each request again: a step with an answer is done, an
unsettled one is running, any other is sent.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from batcher.entries.carriers import carried_of
from batcher.owner.owned import OwnedModel
from batcher.scheduling.decisions import Decision
from batcher.scheduling.ensembles import ensemble_planner as plan
from batcher.scheduling.observations import RequestQueued
from charonia import keys
from charonia.calls.cache.cached_calls import CachedCalls
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import Cancelled, CharoniaError, InternalError, InvalidArgument, InvalidRecord
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import Entry
from charonia.facts.events import ResponsesWanted
from charonia.inference import RECEIPT
from charonia.metrics.latencies import Latencies
from charonia.models.ensemble import EnsembleGraph, compose, composing_models
from charonia.models.interface import ModelInterface
from charonia.models.names import name_of
from charonia.options.settings import MetricsSettings
from charonia.wire import BLOB, FLAG_REFERENCE, Reference, RequestRecord, ResponseRecord

from .cached_steps import CachedSteps
from .ensemble_endings import Endings
from .ensemble_statistics import Tally
from .step_answers import Answers
from .step_flights import Flight
from .step_sequences import NO_SEQUENCE, answer_parameters, made_mark
from .step_tensors import Value, answer_of, inputs_of, is_true, size_of, values_of
from .submission import Submission

_log = logging.getLogger(__name__)

MAX_HELD_BYTES = 256 * 1024 * 1024
"""Max tensor bytes of one ensemble's running requests; beyond it, requests wait in the log."""
_SWEEP_NS = 60_000_000_000
_FILE_AGE_S = 3600.0
"""An unknown file may belong to an answer that is still in transit; after an hour its executor is gone."""
_MAX_ASIDE = 10_000
"""The most answers that are kept although no step awaits them. While a request of a former owner runs, it may need
them; but those of streams that no request needs must not fill the memory."""
_RETRY_S = 0.2


class OwnedEnsemble(OwnedModel):
    """The shell around one `EnsembleScheduler`. Arguments as of `OwnedModel`; `shm_dir` is the payload directory."""

    def __init__(
        self,
        *arguments: Any,
        catalog: Catalog,
        shm_dir: str,
        latencies: Latencies | None = None,
        calls: CachedCalls | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self.scheduler: plan.EnsembleScheduler = plan.EnsembleScheduler(self.model, is_true, MAX_HELD_BYTES)
        self._catalog = catalog
        self._directory = PayloadDirectory(shm_dir, keys.ensemble_endpoint(self.model))
        self._directory.open(standing=True)
        self._flights = Submission(
            *(self.log, self.model, catalog, self._directory, self.spawn, self._own),
            is_answered=lambda step_id: self._answers.has(step_id),
            refused=self._refused,
            ended=self._step_ended,
            cached=CachedSteps(calls) if calls is not None else None,
        )
        self._answers = Answers(self.log, self.model, self._directory, self._deletions, self._awaited)
        self._latencies = latencies or Latencies(MetricsSettings())
        self._endings = Endings(
            self.log, self.model, self._directory, self.spawn, self.requests_settled, self._latencies
        )
        self._tallies: dict[bytes, Tally] = {}
        self._graphs: dict[int, tuple[object, EnsembleGraph]] = {}
        self._begun_by: dict[bytes, EnsembleGraph] = {}
        """The graph with which each running request began."""
        self._served: dict[int, ServedVersion] = {}
        self._prepared = False
        self._todo: deque[plan.EnsembleDecision] = deque()
        self._applying = False
        self._swept_ns = 0

    # -- life ---------------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Read existing step answers before any request begins, then follow. Raises what the log raises."""
        self._directory.belongs_to(await self.log.epoch())
        await self._answers.restore()
        self._reader.add(self._answers.stream, self._answers.after, take=self._on_answers)
        self._prepared = True

    def close(self) -> None:
        self._flights.close()
        for version in self._served:
            self._latencies.drop(self.model, version)
        self._reader.remove(self._answers.stream)
        self._directory.release()
        super().close()

    def on_served(self, versions: dict[int, ServedVersion]) -> None:
        """The catalog's latest state of this ensemble."""
        if not self.closed:
            for gone in self._served.keys() - versions.keys():
                self._latencies.drop(self.model, gone)
                self.counted.pop(gone, None)
            self._served = versions
            for version, served in versions.items():
                self._latencies.add(version, served.config, model=self.model)
            # the planner forgets a removed version, and must be given it again should it come back
            self._graphs = {version: known for version, known in self._graphs.items() if version in versions}
            super().on_served(versions)
            self._learn_graphs()

    def on_related(self, model: str) -> None:
        """The catalog's latest state of another model."""
        if not self.closed and any(model in composing_models(v.config) for v in self._served.values()):
            self._learn_graphs()

    def _learn_graphs(self) -> None:
        """A graph is complete once all its models are served, and changes when any of them does."""
        if not self._prepared:
            return
        for version, served in self._served.items():
            found: list[ServedVersion] = []

            def find(model: str, number: int, found: list[ServedVersion] = found) -> ModelInterface:
                held = self._catalog.served(model) or self._catalog.held(model)
                step = held.get(number) if number > 0 else held[max(held)] if held else None
                if step is None:
                    raise InternalError(f"ensemble '{self.model}' depends on '{model}' which is not served")
                found.append(step)
                return step.interface

            try:
                graph = compose(served.config, find)
            except CharoniaError as error:
                _log.info("ensemble '%s' version %d cannot run now: %s", self.model, version, error)
                continue
            basis = (served.content_hash, tuple((s.model, s.version, s.content_hash) for s in found))
            if self._graphs.get(version, (None,))[0] != basis:
                self._graphs[version] = (basis, graph)
                self._tell(plan.GraphKnown(version, graph))

    # -- what the log says --------------------------------------------------------------------------------------------

    def _on_answers(self, _stream: bytes, entries: list[Entry]) -> None:
        if not self.closed:
            try:
                self._apply_answers(self._answers.read(entries))
            except Exception as error:
                self.failed(error)

    def _apply_answers(self, answers: Iterable[ResponseRecord]) -> None:
        events = [event for answer in answers if (event := self._event(answer)) is not None]
        if events:
            self._apply(self.scheduler.observe_all(events, monotonic_ns()))
            self.arm()

    def _awaited(self, step_id: bytes) -> bytes | None:
        flight = self._flights.flights.get(step_id)
        return flight.request.id if flight is not None else None

    def _event(self, response: ResponseRecord) -> plan.StepAnswered | plan.StepFailed | None:
        flight = self._flights.flights.get(response.id)
        if flight is None:
            return None
        request, step, path = flight.request, flight.decision.step, flight.decision.path
        if response.place is not None:
            try:
                if not flight.visible.admits(response.place, final=response.final):
                    return None
            except CharoniaError as error:  # never splice two runs
                self._flights.done(flight)
                return plan.StepFailed(request.id, step.index, path, error)
        if response.times is not None:
            self._tally(request).add(response.times)
        if receipt := response.parameters.pop(RECEIPT, ""):
            self._tally(request).steps.add(name_of(step.model), response.version, receipt)
        if response.report is not None and (trace := carried_of(request).record.trace) is not None:
            trace.add(response.report)
        if self._flights.cached is not None and self._flights.cached.answered(flight.id, response):
            flight.reference = response.reference
            return None  # its end is reported when the cache has it
        if response.final or response.error is not None:
            self._flights.done(flight)
        if response.error is not None:
            return plan.StepFailed(request.id, step.index, path, response.error)
        try:
            values = self._values(flight, response, response.reference)
        except InvalidArgument as error:
            self._flights.done(flight)
            return plan.StepFailed(request.id, step.index, path, error)
        index = response.place[1] if response.place is not None else 0
        return plan.StepAnswered(
            *(request.id, step.index, path, values, size_of(values), index), response.final, response.is_flag
        )

    def _step_ended(self, flight: Flight, outcome: ResponseRecord | CharoniaError) -> None:
        """A step has its one answer, from the cache or through it."""
        if self.closed or self._flights.flights.get(flight.id) is not flight:
            return
        self._flights.done(flight)
        error = outcome if isinstance(outcome, CharoniaError) else outcome.error
        if error is not None:
            self._refused(flight, error)
        elif isinstance(outcome, ResponseRecord):
            request, step, path = flight.request, flight.decision.step, flight.decision.path
            try:
                values = self._values(flight, outcome, flight.reference)
            except InvalidArgument as wrong:
                self._refused(flight, wrong)
                return
            self._tell(plan.StepAnswered(request.id, step.index, path, values, size_of(values), 0, True))

    @staticmethod
    def _values(flight: Flight, response: ResponseRecord, reference: Reference | None) -> dict[str, Value]:
        mark = made_mark(flight.mark, response.parameters)
        return values_of(response.outputs, reference, flight.rows, mark)

    # -- what the planner decides -------------------------------------------------------------------------------------

    def _apply(self, decisions: Sequence[Any]) -> None:
        """Carry out decisions in order; decisions that follow from them at once come after them."""
        self._todo.extend(decisions)
        if self._applying:
            return
        self._applying = True
        try:
            while self._todo:
                self._carry_out(self._todo.popleft())
        finally:
            self._applying = False

    def _carry_out(self, decision: plan.EnsembleDecision) -> None:
        if isinstance(decision, plan.SubmitStep):
            self._submit(decision)
        elif isinstance(decision, plan.WantResponses):
            self._flights.want(decision.request.id, decision.step.index, decision.path, decision.count)
        elif isinstance(decision, plan.BeginRequest):
            self._begun_by[decision.request.id] = self._graphs[decision.request.version][1]
            self._begin(decision.request)
        elif isinstance(decision, plan.AnswerRequest):
            self._answer(decision)
        elif isinstance(decision, plan.FailRequest):
            self._endings.fail(decision, self._tally(decision.request), several=self._several(decision.request))
        elif isinstance(decision, plan.CancelStep):
            self._flights.cancel(decision.request.id, decision.step.index, decision.path)
        else:
            refused: list[Decision] = [decision]
            super()._apply(refused)

    def _answer(self, decision: plan.AnswerRequest) -> None:
        request = decision.request
        graph = self._begun_by[request.id]
        outputs = answer_of(graph, decision.outputs)
        if _log.isEnabledFor(logging.DEBUG) and not (decision.is_flag and graph.decoupled):
            for name in carried_of(request).record.meta.outputs or graph.outputs:
                if name not in decision.outputs:
                    _log.debug("Composing models did not output tensor %s", name)
        own = carried_of(request).record.sequence or NO_SEQUENCE
        parameters = answer_parameters(own, [value.mark for value in decision.outputs.values()])
        self._endings.answer(decision, outputs, parameters, self._tally(request), several=self._several(request))

    def _tell(self, event: plan.EnsembleObservation) -> None:
        self._apply(self.scheduler.observe(event, monotonic_ns()))
        self.arm()

    def _several(self, request: RequestQueued) -> bool:
        """Whether a request may have several responses (C53)."""
        served = self._served.get(request.version)
        known = self._graphs.get(request.version)
        return served.interface.decoupled if served is not None else known is not None and known[1].decoupled

    def _tally(self, request: RequestQueued) -> Tally:
        return self._tallies.setdefault(request.id, Tally())

    # -- beginning ----------------------------------------------------------------------------------------------------

    def _begin(self, request: RequestQueued) -> None:
        carried = carried_of(request)
        record = carried.record
        self._tally(request).start_ns = wall_ns()
        must_record = (record.is_job or record.journalled) and not carried.begun
        is_blob = bool(record.flags & FLAG_REFERENCE) and record.reference is not None and record.reference.kind == BLOB
        if must_record or (is_blob and not record.data):
            self.spawn(self._begin_slowly(request, must_record))
        else:
            self._begun(request)

    async def _begin_slowly(self, request: RequestQueued, must_record: bool) -> None:
        """Record that a job runs, and fetch its payload from a blob."""
        carried = carried_of(request)
        record = carried.record
        try:
            if must_record:
                going = await self.log.begin_attempt(
                    self.model,
                    self.token,
                    [record.id],
                    1,
                    jobs=[record.id] if record.is_job else (),
                    journalled=[record.id] if record.journalled else (),
                )
                if not going[0]:
                    self._on_ended([record.id])
                    return
                carried.begun = 1
            if record.flags & FLAG_REFERENCE and record.reference is not None and record.reference.kind == BLOB:
                data = await self.log.blob(record.reference.name)
                if data is not None and len(data) == record.reference.size_bytes:
                    record.data = memoryview(data)
        except Cancelled:
            self._lost_ownership(self.model)
            return
        except CharoniaError as error:
            _log.warning("a request of '%s' could not be begun, trying again: %s", self.model, error)
            self._loop.call_later(_RETRY_S, lambda: None if self.closed else self._begin(request))
            return
        if not self.closed:
            self._begun(request)

    def _begun(self, request: RequestQueued) -> None:
        carried = carried_of(request)
        record = carried.record
        graph = self._begun_by.get(request.id)
        if graph is None:
            return  # it was settled in the meantime
        try:
            inputs = self._inputs(graph, record)
        except InvalidRecord as error:
            _log.warning("a request's payload is gone: %s", error)
            self._tell(plan.BeginFailed(request.id, InternalError("the request's payload is gone")))
            return
        wanted = record.meta.outputs
        self._tell(
            plan.RequestBegun(request.id, inputs, wanted, size_of(inputs), record.window, resumed=carried.restored)
        )
        if (count := self.wanted.get(request.id)) is not None:
            self._tell(plan.ResponsesAllowed(request.id, count))

    def _inputs(self, graph: EnsembleGraph, record: RequestRecord) -> dict[str, Value]:
        reference = record.reference if record.flags & FLAG_REFERENCE else None
        if reference is not None and not record.data and reference.size_bytes:
            if reference.kind == BLOB:
                raise InvalidRecord("its blob is gone")
            record.data = self._directory.read(reference)
        return values_of(inputs_of(graph, record.inputs()), reference, record.rows if graph.batching else 0)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _submit(self, decision: plan.SubmitStep) -> None:
        request = decision.request
        if self.scheduler.find(request.id) is not request:
            return  # decided before this request ended
        flight = self._flights.await_step(decision)
        if carried_of(request).restored:
            self._flights.inherit(flight)
        if self._answers.knows(flight.id):
            self._flights.was_asked(flight)
            self._apply_answers(self._answers.take(flight.id, request.id))
        elif carried_of(request).restored:
            self._flights.ask_unless_known(flight)
        else:
            self._flights.ask(flight)

    def _refused(self, flight: Flight, error: CharoniaError) -> None:
        decision = flight.decision
        self._tell(plan.StepFailed(decision.request.id, decision.step.index, decision.path, error))

    def on_wanted(self, fact: ResponsesWanted) -> None:
        """When it is itself a step of an ensemble, it sends no more responses than are wanted."""
        super().on_wanted(fact)
        self._tell(plan.ResponsesAllowed(fact.id, fact.count))

    async def look_after(self) -> None:
        """Send again the steps that the log lost; forget answers no request will need. Raises what the log raises."""
        self._flights.remind()
        # a request that is still being begun may have answers that a former owner asked for
        forgets = self._answers.any_aside and self.windows.all_read and not self.scheduler.unbegun()
        sweeps = monotonic_ns() >= self._swept_ns + _SWEEP_NS
        if forgets or sweeps:
            # one that stalled does not know what belongs to the requests of the next owner
            if (await self.log.owner(self.model))[1] != self.token:
                self.step_down()
            if self.closed:
                return
            if forgets:
                self._look_after_aside()
            if sweeps:
                self._swept_ns = monotonic_ns()
                self._directory.forget(self._answers.file_names(), _FILE_AGE_S)
                self._directory.tidy()
        await self._flights.look_after_lost()

    def _look_after_aside(self) -> None:
        """Keep the answers that no step awaits while a request of a former owner runs. It may come to their step later
        than that owner did, which had an answer before it from the cache, or knew that more responses are wanted.
        """
        restored = any(carried_of(request).restored for request in self.scheduler.unended())
        if not restored or self._answers.aside > _MAX_ASIDE:
            self._answers.forget_aside()

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _own(self, request_id: bytes, reference: Any) -> None:
        self._answers.own(request_id, reference)

    def requests_settled(self, requests: Iterable[RequestQueued]) -> None:
        """The log has an outcome of these requests: delete the answers of their steps."""
        settled = list(requests)
        super().requests_settled(settled)
        for request in settled:
            self._answers.release(request.id)
            self._endings.release(request.id)
            self._tallies.pop(request.id, None)
            self._begun_by.pop(request.id, None)

    @property
    def counted(self) -> dict[int, dict[str, int]]:
        """Increments of the statistics, by version."""
        return self._endings.counted
