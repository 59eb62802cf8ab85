"""The unsettled requests of a scheduler: which are known, how many wait on each level, when they are due, how they end.
Pure. Counts include all versions of the model (S7). `queueing` has the queues themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from batcher.scheduling.decisions import BurstWave, CondemnRequest, Decision, RejectReason, RejectRequest
from batcher.scheduling.observations import RequestQueued, RequestState
from charonia.batch_strategies import BatchStrategy
from charonia.errors import NOT_READY, ErrorCode, StreamInterrupted
from charonia.models.interface import ModelInterface
from charonia.wire import PREFIX_BYTES

from .dynamic_batching import BatchRules
from .queueing import QueueRules

ENDED = RequestState.ENDED

NEVER_NS = 1 << 127
_MIN_STALE = 64
"""Fewer stale entries than this are not worth a sweep."""
_MOST_ADMITTED = 4096
"""Requests of a burst wave may end before they are read, so some of these never arrive."""

QUEUE_FULL = "Exceeds maximum queue size"
TIMED_OUT = "Request timeout expired"
LOAD_FAILED = "load failed for model '{model}': version {version} is at UNAVAILABLE state: {reason};"
CUT_SHORT = "{why}, and the model is not declared repeatable (charonia.repeatable)"
DEADLINE_PASSED = "Deadline exceeded before execution"
DEADLINE_PASSED_RUNNING = "Deadline exceeded during execution"


Cut = tuple[ErrorCode, str, RejectReason]
"""The error of a request that will not run."""
CANCELLED: Cut = (ErrorCode.CANCELLED, "", "CANCELED")  # a code and no text (G26)


def cut_short(why: str) -> Cut:
    """The error of a request that had responses and may not be run again."""
    return (ErrorCode.UNAVAILABLE, StreamInterrupted(CUT_SHORT.format(why=why.rstrip("."))).message, "BACKEND")


def abandoned(model: str, version: int, failures: Mapping[int, str]) -> Cut:
    """The error of a request whose version will not be served."""
    message = NOT_READY.format(model=model, version=version)
    if failure := failures.get(version):
        message = LOAD_FAILED.format(model=model, version=version, reason=failure)
    return (ErrorCode.UNAVAILABLE, message, "REJECTED")


class DueTimes:
    """When requests time out or pass their deadline (S21, S23): a heap whose stale entries are skipped."""

    __slots__ = ("_heap", "_pushes", "armed", "nearest_ns")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RequestQueued]] = []
        self._pushes = 0
        self.armed = 0
        """Requests with a due time."""
        self.nearest_ns = NEVER_NS
        """Nothing is due before this; `next_ns` is exact."""

    def arm(self, request: RequestQueued) -> None:
        """Set the request's `due_ns` from its time-out and deadline."""
        timeout_ns, deadline_ns = request.timeout_ns, request.deadline_ns
        due_ns = min(timeout_ns, deadline_ns) if timeout_ns and deadline_ns else timeout_ns or deadline_ns
        request.due_ns = due_ns
        if due_ns:
            self.armed += 1
            self._pushes += 1
            heappush(self._heap, (due_ns, self._pushes, request))
            if due_ns < self.nearest_ns:
                self.nearest_ns = due_ns

    def disarm(self, request: RequestQueued) -> None:
        """Cancel the request's due time; stale entries never outnumber the valid ones."""
        if request.due_ns:
            request.due_ns = 0
            self.armed -= 1
            heap = self._heap
            if len(heap) > _MIN_STALE and len(heap) > 2 * self.armed:
                # A request that is queued again with the same deadline may have several entries that look valid.
                self._heap = list({entry[2]: entry for entry in heap if entry[2].due_ns == entry[0]}.values())
                heapify(self._heap)

    def next_ns(self) -> int:
        """The nearest instant, 0 for none."""
        heap = self._heap
        while heap and heap[0][2].due_ns != heap[0][0]:
            heappop(heap)
        self.nearest_ns = heap[0][0] if heap else NEVER_NS
        return heap[0][0] if heap else 0

    def pop(self, now_ns: int) -> RequestQueued | None:
        """A request that is due, removed from the heap; None when there is none."""
        due_ns = self.next_ns()
        if not due_ns or due_ns > now_ns:
            return None
        request = heappop(self._heap)[2]
        self.disarm(request)
        return request


class RequestLedger:
    """Requests by id from their observation to their end, and their rules of admission and timing."""

    __slots__ = (
        "_admitted",
        "batching",
        "due",
        "has_deadlines",
        "has_waves",
        "is_held",
        "known",
        "levels",
        "model",
        "queued",
        "queueing",
        "repeatable",
        "resumable",
        "runs_waves_whole",
    )

    def __init__(self) -> None:
        self.model = ""
        self.batching: BatchRules | None = None
        """None until the first configuration is known."""
        self.runs_waves_whole = False
        self.queueing = QueueRules.of(None)
        self.repeatable = self.resumable = False
        self._admitted: dict[bytes, int] = {}
        """How many requests of a burst wave are still to arrive, by the prefix of their ids, where the queue has a
        bound.
        """
        self.known: dict[bytes, RequestQueued] = {}
        self.levels: dict[int, int] = {}
        self.queued = 0
        self.due = DueTimes()
        self.has_deadlines = False
        """A request with a deadline was seen; until then deadlines are not checked."""
        self.is_held = False
        """An operator holds the queue back."""
        self.has_waves = False
        """A wave was seen: a queue item may stand for several requests."""

    def adopt_policy(self, interface: ModelInterface, strategy: BatchStrategy | None = None) -> bool:
        """Whether the rules of this configuration differ from the previous ones."""
        batching, queueing = BatchRules.of(interface, strategy), QueueRules.of(interface)
        self.model = interface.name
        self.repeatable, self.resumable = interface.repeatable, interface.resumable
        changed = batching != self.batching or queueing != self.queueing
        self.batching, self.queueing = batching, queueing
        self.runs_waves_whole = batching.runs_waves_whole
        return changed

    def burst(
        self, wave: RequestQueued, decisions: list[Decision], *, suspect: bool = False, executor: str = ""
    ) -> None:
        """A queued wave was removed and comes back as its requests: no bound applies to those."""
        self.known.pop(wave.id, None)
        wave.state = ENDED
        if self.queueing.place(wave.level)[1].max_queue_size:
            if len(self._admitted) >= _MOST_ADMITTED:
                del self._admitted[next(iter(self._admitted))]
            self._admitted[wave.id[:PREFIX_BYTES]] = wave.count
        decisions.append(BurstWave(wave, suspect, executor))

    def was_admitted(self, request: RequestQueued) -> bool:
        """Whether a request was in the queue before: in a batch, or in a wave."""
        if request.attempt:
            return True
        prefix = request.id[:PREFIX_BYTES]
        left = self._admitted.get(prefix, 0)
        if left > 1:
            self._admitted[prefix] = left - 1
        elif left:
            del self._admitted[prefix]
        return left > 0

    def admit(self, request: RequestQueued, now_ns: int, decisions: list[Decision]) -> bool:
        """Whether a request that is in no queue may enter one; otherwise it ends here."""
        if request.settled:
            self.known.pop(request.id, None)
            request.state = ENDED
        elif request.deadline_ns and request.deadline_ns <= now_ns:
            self.reject(request, ErrorCode.DEADLINE_EXCEEDED, DEADLINE_PASSED, "REJECTED", decisions)
        elif self.batching is not None and request.rows > self.batching.max_rows:
            # Its gateway checked against an older configuration (I3).
            message = f"inference request batch-size must be <= {self.batching.max_rows} for '{self.model}'"
            self.reject(request, ErrorCode.INVALID_ARG, message, "OTHER", decisions)
        else:
            return True
        return False

    def count_again(self, request: RequestQueued, *, timed: bool = True) -> None:
        """Set level, count and times of a request that returns to a queue, by the current rules. Not `timed`: it has
        left the queue once and waits for a batch of its own, so only its deadline counts.
        """
        level, policy = self.queueing.place(request.level)
        request.queue_level = level
        self.levels[level] = self.levels.get(level, 0) + request.count
        self.queued += request.count
        timeout_us = 0 if request.delayed or not timed else policy.timeout_us(request.timeout_us)
        request.timeout_ns = request.enqueued_ns + request.away_ns + timeout_us * 1000 if timeout_us else 0
        self.due.arm(request)

    def uncount(self, request: RequestQueued) -> None:
        """A request left its queue."""
        self.queued -= request.count
        level = request.queue_level
        left = self.levels[level] - request.count
        if left:
            self.levels[level] = left
        else:
            del self.levels[level]
        if request.due_ns:
            self.due.disarm(request)

    def uncount_all(self, requests: list[RequestQueued]) -> None:
        """These requests left their queue, in order of service; at least one."""
        if requests[0].queue_level == requests[-1].queue_level:
            # In order of service, so all have the same level as the first.
            level, others = requests[0].queue_level, len(requests) - 1
            if self.has_waves:
                others = sum([request.count for request in requests[1:]])
            self.levels[level] -= others
            self.queued -= others
            if self.due.armed:
                for request in requests[1:]:
                    self.due.disarm(request)
            self.uncount(requests[0])
        else:
            for request in requests:
                self.uncount(request)

    def condemn(
        self, request: RequestQueued, message: str, stderr: str, executor: str, decisions: list[Decision]
    ) -> None:
        """A request that is in no queue becomes a dead letter."""
        request.state = ENDED
        self.known.pop(request.id, None)
        decisions.append(CondemnRequest(request, message, stderr, executor))

    def reject(
        self,
        request: RequestQueued,
        code: ErrorCode,
        message: str,
        reason: RejectReason,
        decisions: list[Decision],
        *,
        bare: bool = False,
    ) -> None:
        """A request that is in no queue ends with an error."""
        request.state = ENDED
        self.known.pop(request.id, None)
        decisions.append(RejectRequest(request, code, message, reason, bare))
