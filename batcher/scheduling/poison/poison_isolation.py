"""Poison isolation: requests that ran when an instance or executor failed run apart until the culprit is known. Pure.

The rule, for the members of one batch that are unsettled:

- Their *instance died* of them (`BatchDied`: the executor lives and says which batch it was). They are halved and each
  half runs as a batch of its own, never joined with others. A request that was alone is the culprit. One culprit among
  n costs at most ceil(log2 n) + 1 deaths: of 8, batches of 8, 4, 2, 1. Where the instance had other batches, or was
  killed from outside (`in_company`), one that was alone runs apart once more, and is the culprit if it dies again.
- Their *executor was lost* (`ExecutorLost`: killed, or taken down by a model inside it; no report says what it was
  doing). This loss blames no request. They are split in eight, each part a batch of its own. A request that is alone
  when its executor is lost, too, runs *apart* from then on: its model gives that executor nothing else meanwhile. Only
  losses apart are counted. After one, the request goes first on the next executor that comes; when none comes for
  `FRESH_WAIT_NS`, it takes any. After `MAX_LOSSES_APART` it is the culprit. One among up to 8 costs 4 executors: with
  the others, alone, and apart twice.

  Executors that are killed again and again condemn no request whose run is shorter than the time between two kills. In
  such a storm new executors join all the time, so the run that could condemn is the first thing one of them does.

  Two losses do not count if they lie within `TOGETHER_NS`: a request is with one executor only, so it did not end both.
  They do count if the second executor joined after the first was lost, for then it may have taken over its batch. The
  loss of an executor that joins again is taken back, within the limits of `Blame`.
- A batch that was returned, whose instance died blameless or whose executor drained is queued again as it was: an
  ordinary one in the queue, a group as the same group.

A batcher in an executor's process is lost with it. So before it dispatches suspects, or requests that it found at its
takeover, it writes a note of the batch to the log (`batcher.owner.quarantine`). Its successor reads the note and begins
with these losses (`BatchLost`). An ordinary batch in a note is of requests found at a takeover: this is the second
crash that they have met, so a part that is a single request runs apart at once.

A request of a resumable model that gave a new response in a run is not blamed for that run's end, by either rule. Its
earlier losses are forgotten, and it is queued again as it was. A poison request either makes no progress and is blamed,
or spends one response for each run, so it ends (ADR 0044).

A batch that finishes clears its members, for they are settled. The number of its attempts condemns no request: only
a death alone and `MAX_LOSSES_APART` losses apart do. The owner counts the losses; another one starts from zero, but
for its note.

Sequences have a rule of their own, with another limit (`batcher.scheduling.sequences.sequence_batches`).
"""

from __future__ import annotations

from collections.abc import Iterator

from batcher.scheduling.observations import RequestQueued, RequestState
from batcher.scheduling.queues.dynamic_batching import NO_BOUNDARY, BatchRules

PARTS_AFTER_DEATH = 2
PARTS_AFTER_LOSS = 8
MAX_LOSSES_APART = 2
"""The limit of `RequestQueued.losses_apart` for single requests. Of sequences it is `MAX_LOSSES_ALONE`."""
FRESH_WAIT_NS = 10_000_000_000
TOGETHER_NS = 600_000_000
"""Longer than the time between lease expiries of processes that end together with their machine (an interval of 0.4 s).
The end of a single process is known in milliseconds. So a request that ends executors at once may end two within this
time: both losses count as one, the next executor is a fresh one, and the request costs one executor more.
"""

CULPRIT_OF_LOSSES = "Executors were lost while they ran this request alone"


class Suspects:
    """Requests that form one batch, in order of arrival. `apart`: its executor runs nothing else of the model; until
    `until_ns` it must be a fresh executor.
    """

    __slots__ = ("apart", "requests", "until_ns")

    def __init__(self, requests: list[RequestQueued], apart: bool, until_ns: int = 0) -> None:
        self.requests = requests
        self.apart = apart
        self.until_ns = until_ns

    @property
    def first(self) -> int:
        return self.requests[0].order

    @property
    def rows(self) -> int:
        return sum([request.rows for request in self.requests])


class Isolation:
    """The waiting groups of one version, in order of service: most losses first, then the oldest."""

    __slots__ = ("_groups", "size")

    def __init__(self) -> None:
        self._groups: list[Suspects] = []
        self.size = 0

    def __iter__(self) -> Iterator[Suspects]:
        return iter(list(self._groups))

    @property
    def needs_executor(self) -> bool:
        """Whether a group waits for an executor of its own."""
        return any(group.apart for group in self._groups)

    def add(self, requests: list[RequestQueued], *, apart: bool = False, until_ns: int = 0) -> None:
        """Adds a waiting group."""
        if requests:
            for request in requests:
                request.state = RequestState.SUSPECT
            self._groups.append(Suspects(requests, apart, until_ns))
            self._groups.sort(key=lambda group: (-group.requests[0].losses_apart, group.first))
            self.size += len(requests)

    def split(self, requests: list[RequestQueued], parts: int, *, apart: bool = False) -> None:
        """Divide the rest of a batch, in order of arrival, into waiting groups; `apart` if they run alone."""
        step = -(-len(requests) // parts)
        for at in range(0, len(requests), step or 1):
            self.add(requests[at : at + step], apart=apart and step == 1)

    def fit(self, rules: BatchRules) -> list[RequestQueued]:
        """Remove groups that exceed the current limits; returns the requests that exceed them by themselves."""
        for group in self:
            if len(group.requests) > 1 and (group.rows > rules.max_rows or not rules.dynamic):
                self._groups.remove(group)
                self.size -= len(group.requests)
                self.split(group.requests, len(group.requests))
        return [request for group in self for request in group.requests if request.rows > rules.max_rows]

    def take(self, group: Suspects) -> list[RequestQueued]:
        """Remove a group to run it; the caller sets the state of its requests."""
        self._groups.remove(group)
        self.size -= len(group.requests)
        return group.requests

    def remove(self, request: RequestQueued, state: RequestState) -> None:
        """Remove a request that will not run, or runs already, and set its state to `state`."""
        for group in self._groups:
            if request in group.requests:
                group.requests.remove(request)
                if not group.requests:
                    self._groups.remove(group)
                break
        request.state = state
        self.size -= 1

    def earliest_order(self) -> int:
        """The smallest `order` that waits; `NO_BOUNDARY` when no group waits."""
        return min((group.first for group in self._groups), default=NO_BOUNDARY)

    def boundary(self, head: int) -> int:
        """The order that a batch starting with order `head` must not reach past (S6)."""
        return min((group.first for group in self._groups if group.first > head), default=NO_BOUNDARY)


MAX_STALLS = 10
_MOST_EXECUTORS = 64
_MOST_REQUESTS = 1024


class Blame:
    """The counted losses of one model's requests, by executor."""

    __slots__ = ("_counted", "_stalls")

    def __init__(self) -> None:
        self._counted: dict[str, list[RequestQueued]] = {}
        self._stalls: dict[bytes, int] = {}

    def lost(self, executor: str, counted: list[RequestQueued]) -> None:
        """An executor was lost. `counted` has the requests that its loss counts against, or gets them later."""
        self._counted.pop(executor, None)
        self._counted[executor] = counted
        if len(self._counted) > _MOST_EXECUTORS:
            del self._counted[next(iter(self._counted))]

    def returned(self, executor: str) -> None:
        """The executor is alive: take its loss back."""
        for request in self._counted.pop(executor, ()):
            stalls = self._stalls.get(request.id, 0)
            if stalls < MAX_STALLS:
                request.losses_apart = max(0, request.losses_apart - 1)
                self._stalls.pop(request.id, None)
                self._stalls[request.id] = stalls + 1
                if len(self._stalls) > _MOST_REQUESTS:
                    del self._stalls[next(iter(self._stalls))]
