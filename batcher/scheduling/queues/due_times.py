"""When requests come due: queue time-outs (S21) and deadlines (S23). What happens then is the scheduler's."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from batcher.scheduling.observations import QueuedRequest

NEVER_NS = 1 << 127
_MIN_STALE = 64
"""Fewer stale entries than this are not worth a sweep."""


class DueTimes:
    """When requests time out or pass their deadline (S21, S23): a heap whose stale entries are skipped."""

    __slots__ = ("_heap", "_pushes", "armed", "nearest_ns")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, QueuedRequest]] = []
        self._pushes = 0
        self.armed = 0
        """Requests for which something is due."""
        self.nearest_ns = NEVER_NS
        """Nothing is due before; `next_ns` is exact."""

    def arm(self, request: QueuedRequest) -> None:
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

    def disarm(self, request: QueuedRequest) -> None:
        """Nothing is due for the request any more; entries that do not count are never more than those that do."""
        if request.due_ns:
            request.due_ns = 0
            self.armed -= 1
            heap = self._heap
            if len(heap) > _MIN_STALE and len(heap) > 2 * self.armed:
                # Put back with the same deadline, a request may have several entries that look right.
                self._heap = list({entry[2]: entry for entry in heap if entry[2].due_ns == entry[0]}.values())
                heapify(self._heap)

    def next_ns(self) -> int:
        """The nearest instant, 0 for none."""
        heap = self._heap
        while heap and heap[0][2].due_ns != heap[0][0]:
            heappop(heap)
        self.nearest_ns = heap[0][0] if heap else NEVER_NS
        return heap[0][0] if heap else 0

    def pop(self, now_ns: int) -> QueuedRequest | None:
        """A request that is due, disarmed; None when there is none."""
        due_ns = self.next_ns()
        if not due_ns or due_ns > now_ns:
            return None
        request = heappop(self._heap)[2]
        self.disarm(request)
        return request
