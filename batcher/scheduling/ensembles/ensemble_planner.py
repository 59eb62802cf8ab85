"""The planner of one ensemble: which step of which request runs when (items S50-S55, R27). Pure, as `scheduler` is.

    observe(event, now_ns) -> decisions      a fact happened
    advance(now_ns) -> decisions             time passed: deadlines
    next_wakeup() -> ns | None               when `advance` is next due

It stands in a `ModelScheduler`'s place: the same facts about requests come in, and requests that do not run are
rejected with the same decision. Every observed request ends once: it is answered, fails, is rejected, or was settled
from outside. What tensors are is the service's: here they are opaque values with a size. Requests are begun in the
order of their arrival, as long as what is held of those under way stays within `max_held_bytes`. At least one request
runs, however large it is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from batcher.scheduling.decisions import Decision, JoinEntries, RejectReason, RejectRequest
from batcher.scheduling.observations import (
    Observation,
    QueueHeld,
    RequestCancelled,
    RequestQueued,
    RequestSettled,
    RequestState,
    VersionsAbandoned,
)
from batcher.scheduling.queues.ledger import DEADLINE_PASSED, DEADLINE_PASSED_RUNNING, abandoned
from charonia.errors import CharoniaError, ErrorCode
from charonia.models.ensemble import EnsembleGraph, Step

from .ensemble_run import Emit, Moves, Path, Place, Run, Start, Want

QUEUED, DISPATCHED, ENDED = RequestState.QUEUED, RequestState.DISPATCHED, RequestState.ENDED


@dataclass(frozen=True, slots=True)
class GraphKnown:
    """The graph of a version is complete. It applies to requests begun from now on."""

    version: int
    graph: EnsembleGraph


@dataclass(frozen=True, slots=True)
class RequestBegun:
    """`BeginRequest` was carried out: `inputs` are the request's tensors, `wanted` its outputs (empty: all)."""

    id: bytes
    inputs: Mapping[str, Any]
    wanted: tuple[str, ...]
    size_bytes: int
    window: int = 0
    """How many responses it may have before more are wanted, 0 for any number."""
    resumed: bool = False
    """Whether a former owner may have sent responses to it."""


@dataclass(frozen=True, slots=True)
class BeginFailed:
    """`BeginRequest` could not be carried out."""

    id: bytes
    error: CharoniaError


@dataclass(frozen=True, slots=True)
class StepAnswered:
    """A step produced a response. `index` counts those of a decoupled step, of which the last is `final`; it `is_flag`
    if it only says so.
    """

    id: bytes
    step: int
    path: Path
    outputs: Mapping[str, Any]
    size_bytes: int = 0
    index: int = 0
    final: bool = True
    is_flag: bool = False


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step failed, or could not be sent; `error` is the error for its caller."""

    id: bytes
    step: int
    path: Path
    error: CharoniaError


@dataclass(frozen=True, slots=True)
class ResponsesAllowed:
    """For a request with a window: its reader wants responses below index `count`."""

    id: bytes
    count: int


EnsembleObservation = (
    Observation | GraphKnown | RequestBegun | BeginFailed | StepAnswered | StepFailed | ResponsesAllowed
)


@dataclass(frozen=True, slots=True)
class BeginRequest:
    """Load a request's tensors and record its beginning, then observe `RequestBegun`."""

    request: RequestQueued


@dataclass(frozen=True, slots=True)
class SubmitStep:
    """Send a step into its model's queue."""

    request: RequestQueued
    step: Step
    path: Path
    inputs: Mapping[str, Any]
    outputs: tuple[str, ...]
    window: int = 0
    """How many responses it may give before more are wanted, 0 for any number."""


@dataclass(frozen=True, slots=True)
class WantResponses:
    """Allow a step to produce responses below index `count` (S55)."""

    request: RequestQueued
    step: Step
    path: Path
    count: int


@dataclass(frozen=True, slots=True)
class CancelStep:
    """The answer of a step is no longer wanted."""

    request: RequestQueued
    step: Step
    path: Path


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Send response `index` of a request. The `final` one settles it; it `is_flag` if it only ends the request."""

    request: RequestQueued
    outputs: Mapping[str, Any]
    index: int = 0
    final: bool = True
    is_flag: bool = False


@dataclass(frozen=True, slots=True)
class FailRequest:
    """Settle a request with an error (S53); it counts with reason OTHER (M11)."""

    request: RequestQueued
    error: CharoniaError


EnsembleDecision = Decision | BeginRequest | SubmitStep | WantResponses | CancelStep | AnswerRequest | FailRequest


@dataclass(slots=True, eq=False)
class _Request:
    request: RequestQueued
    graph: EnsembleGraph | None = None
    """The graph it runs with, from its beginning on."""
    run: Run | None = None
    size_bytes: int = 0


class EnsembleScheduler:
    """Decides for one ensemble; see the module docstring. `is_true` reads the value of a BOOL tensor."""

    def __init__(self, name: str, is_true: Callable[[Any], bool], max_held_bytes: int) -> None:
        self._name = name
        self._is_true = is_true
        self._max_held_bytes = max_held_bytes
        self._graphs: dict[int, EnsembleGraph] = {}
        self._known: dict[bytes, _Request] = {}
        self._order: deque[_Request] = deque()
        """Requests that have not begun, oldest first. Ended ones are skipped when their turn comes."""
        self._deadlines: list[tuple[int, bytes]] = []
        self._begun = 0
        self._held_bytes = 0
        self._paused = False

    # -- the verbs ----------------------------------------------------------------------------------------------------

    def observe(self, event: EnsembleObservation, now_ns: int) -> list[EnsembleDecision]:
        """A fact happened. Unknown ids and repeated facts are ignored."""
        return self.observe_all((event,), now_ns)

    def observe_all(self, events: Iterable[EnsembleObservation], now_ns: int) -> list[EnsembleDecision]:
        """Several facts arrived together."""
        decisions: list[EnsembleDecision] = []
        if self._deadlines and self._deadlines[0][0] <= now_ns:
            self._expire(now_ns, decisions)
        for event in events:
            self._fold(event, decisions)
        self._begin(decisions)
        return decisions

    def advance(self, now_ns: int) -> list[EnsembleDecision]:
        """Time passed."""
        return self.observe_all((), now_ns)

    def next_wakeup(self) -> int | None:
        """The next deadline; None when only a fact can change anything."""
        while self._deadlines and self._deadlines[0][1] not in self._known:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # -- what the service and statistics ask --------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Tensor bytes of the running requests."""
        return self._held_bytes

    def find(self, request_id: bytes) -> RequestQueued | None:
        """Returns a request that has not ended."""
        known = self._known.get(request_id)
        return known.request if known is not None else None

    def waiting(self) -> list[RequestQueued]:
        """Every request that has not ended: a running one can be stopped between its steps."""
        return [known.request for known in self._known.values()]

    def unended(self) -> list[RequestQueued]:
        """The same."""
        return self.waiting()

    def unbegun(self) -> int:
        """The number of requests without `RequestBegun`: no step of theirs was decided yet."""
        return sum(known.run is None for known in self._known.values())

    def queued_by_version(self) -> dict[int, int]:
        """Empty: an ensemble has no queue of its own (M2)."""
        return {}

    def pending_count(self) -> int:
        return 0

    def holding(self) -> list[tuple[str, int, list[RequestQueued]]]:
        """Empty: an ensemble has no instances; the models of its steps have."""
        return []

    def outstanding_requests(self) -> int:
        """The number of running requests."""
        return self._begun

    # -- facts --------------------------------------------------------------------------------------------------------

    def _fold(self, event: EnsembleObservation, decisions: list[EnsembleDecision]) -> None:
        match event:
            case StepAnswered():
                self._answered(event, decisions)
            case RequestQueued():
                self._enqueue(event, decisions)
            case RequestBegun():
                self._run(event, decisions)
            case StepFailed():
                known = self._known.get(event.id)
                if known is not None and known.run is not None and (event.step, event.path) in known.run.in_flight():
                    self._fail(known, self._of_step(event.error), decisions, but=(event.step, event.path))
            case ResponsesAllowed():
                known = self._known.get(event.id)
                if known is not None and known.run is not None:
                    self._follow(known, known.run.allowed(event.count), decisions)
            case BeginFailed():
                known = self._known.get(event.id)
                if known is not None:
                    self._fail(known, event.error, decisions)
            case RequestCancelled():
                self._reject(event.id, ErrorCode.CANCELLED, "", "CANCELED", decisions)
            case RequestSettled():
                known = self._known.get(event.id)
                if known is not None:
                    self._end(known, decisions)
            case GraphKnown():
                self._graphs[event.version] = event.graph
            case VersionsAbandoned():
                self._abandon(event, decisions)
            case QueueHeld():
                self._paused = event.held
            case _:
                pass  # observations about instances and batches, which an ensemble does not have

    def _enqueue(self, request: RequestQueued, decisions: list[EnsembleDecision]) -> None:
        known = self._known.get(request.id)
        if known is not None:
            if known.request is not request:
                decisions.append(JoinEntries(known.request, request))
            return
        request.state = QUEUED
        known = self._known[request.id] = _Request(request)
        self._order.append(known)
        if request.deadline_ns:
            heapq.heappush(self._deadlines, (request.deadline_ns, request.id))

    def _begin(self, decisions: list[EnsembleDecision]) -> None:
        """Begin waiting requests in order; those that wait for a graph do not hold up other versions."""
        order = self._order
        if not order or self._paused:
            return
        skipped: list[_Request] = []
        while order and not (self._begun and self._held_bytes >= self._max_held_bytes):
            known = order.popleft()
            request = known.request
            if request.state is not QUEUED:
                continue
            known.graph = self._graphs.get(request.version)
            if known.graph is None:
                skipped.append(known)
                continue
            request.state = DISPATCHED
            self._begun += 1
            decisions.append(BeginRequest(request))
        order.extendleft(reversed(skipped))

    def _run(self, event: RequestBegun, decisions: list[EnsembleDecision]) -> None:
        known = self._known.get(event.id)
        if known is None or known.run is not None or known.graph is None:
            return
        known.run = Run(known.graph, event.inputs, event.wanted, self._is_true, event.window, resumed=event.resumed)
        self._hold(known, event.size_bytes)
        self._follow(known, known.run.begin(), decisions)

    def _answered(self, event: StepAnswered, decisions: list[EnsembleDecision]) -> None:
        known = self._known.get(event.id)
        if known is None or known.run is None:
            return
        self._hold(known, event.size_bytes)
        moves = known.run.answered(event.step, event.path, event.index, event.outputs, event.final, event.is_flag)
        self._follow(known, moves, decisions)

    def _follow(self, known: _Request, moves: Moves, decisions: list[EnsembleDecision]) -> None:
        request = known.request
        for move in moves:
            if isinstance(move, Start):
                decisions.append(SubmitStep(request, move.step, move.path, move.inputs, move.outputs, move.window))
            elif isinstance(move, Want):
                decisions.append(WantResponses(request, move.step, move.path, move.count))
            elif isinstance(move, Emit):
                decisions.append(AnswerRequest(request, move.outputs, move.index, move.final, move.is_flag))
                if move.final:
                    self._end(known, decisions)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _fail(
        self, known: _Request, error: CharoniaError, decisions: list[EnsembleDecision], but: Place | None = None
    ) -> None:
        decisions.append(FailRequest(known.request, error))
        self._end(known, decisions, but)

    def _of_step(self, error: CharoniaError) -> CharoniaError:
        """A step's error as the ensemble's client reads it; a cancellation has no text (G26)."""
        return CharoniaError.of(error.code, f"in ensemble '{self._name}', {error.message}" if error.message else "")

    def _reject(
        self,
        request_id: bytes,
        code: ErrorCode,
        message: str,
        reason: RejectReason,
        decisions: list[EnsembleDecision],
    ) -> None:
        known = self._known.get(request_id)
        if known is not None:
            decisions.append(RejectRequest(known.request, code, message, reason))
            self._end(known, decisions)

    def _end(self, known: _Request, decisions: list[EnsembleDecision], but: Place | None = None) -> None:
        """A request ended; its running steps are not wanted any more."""
        request = known.request
        del self._known[request.id]
        if request.state is DISPATCHED:
            self._begun -= 1
        request.state = ENDED
        self._held_bytes -= known.size_bytes
        if known.run is not None:
            for place in known.run.in_flight():
                if place != but:
                    decisions.append(CancelStep(request, known.run.graph.steps[place[0]], place[1]))

    def _abandon(self, event: VersionsAbandoned, decisions: list[EnsembleDecision]) -> None:
        """Versions were removed: drop their graphs and the requests that wait for them (R27)."""
        for version in [version for version in self._graphs if version not in event.kept]:
            del self._graphs[version]
        for known in list(self._known.values()):
            request = known.request
            if request.state is QUEUED and request.version not in event.kept:
                self._reject(request.id, *abandoned(self._name, request.version, event.failures), decisions)

    def _expire(self, now_ns: int, decisions: list[EnsembleDecision]) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, request_id = heapq.heappop(self._deadlines)
            known = self._known.get(request_id)
            if known is None:
                continue
            if known.request.state is DISPATCHED:
                self._reject(request_id, ErrorCode.DEADLINE_EXCEEDED, DEADLINE_PASSED_RUNNING, "OTHER", decisions)
            else:
                self._reject(request_id, ErrorCode.DEADLINE_EXCEEDED, DEADLINE_PASSED, "REJECTED", decisions)

    def _hold(self, known: _Request, size_bytes: int) -> None:
        known.size_bytes += size_bytes
        self._held_bytes += size_bytes
