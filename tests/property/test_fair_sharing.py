"""Lanes of one level: nobody waits for the length of another's queue, and weights divide what there is."""

from __future__ import annotations

from collections import Counter

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.decisions import DispatchBatch
from batcher.scheduling.observations import BatchFinished, PolicyChanged, RequestQueued, VersionServed
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching


class Queue:
    """One instance of a model, and the lanes of the batches it was given, in order."""

    def __init__(
        self, max_batch_size: int, weights: dict[int, int] | None = None, *, prefetch: int = 0, ordered: bool = False
    ) -> None:
        self.scheduler = ModelScheduler("p", prefetch, weights)
        block = DynamicBatching(preserve_ordering=ordered)
        interface = ModelInterface("m", "", "", max_batch_size, {}, {}, dynamic_batching=block)
        self.scheduler.observe(PolicyChanged(interface), 0)
        self.scheduler.observe(VersionServed("a", 1, "h", 1), 0)
        self.given: list[DispatchBatch] = []
        self.finished = 0
        self.count = 0

    def put(self, lane: int, count: int, *, rows: int = 1, signature: int = 7, level: int = 0) -> None:
        requests = []
        for _ in range(count):
            self.count += 1
            ident = self.count.to_bytes(16, "little")
            requests.append(RequestQueued(ident, 1, level, rows, signature, 0, 0, 0, 0, lane, lane))
        self.see(self.scheduler.observe_all(requests, 0))

    def see(self, decisions: list[object]) -> None:
        self.given += [decision for decision in decisions if isinstance(decision, DispatchBatch)]

    def step(self) -> None:
        batch = self.given[self.finished]
        self.finished += 1
        self.see(self.scheduler.observe(BatchFinished(batch.batch_id, batch.executor, batch.via_owner), 0))

    def lanes(self, index: int) -> list[object]:
        return [request.carrier for request in self.given[index].requests]


backlogs = st.dictionaries(st.integers(0, 5), st.integers(1, 200), min_size=1, max_size=5)


@settings(max_examples=examples(200), deadline=None)
@given(
    size=st.integers(1, 16),
    backlog=backlogs,
    signatures=st.booleans(),
    served=st.integers(0, 20),
    prefetch=st.integers(0, 1),
)
def test_a_lane_with_one_request_waits_no_longer_than_two_batches(
    size: int, backlog: dict[int, int], signatures: bool, served: int, prefetch: int
) -> None:
    """Two: what runs and, where an executor is fed ahead, what waits there."""
    queue = Queue(size, prefetch=prefetch)
    for lane, count in backlog.items():
        queue.put(lane, count, signature=lane if signatures else 7)
    for _ in range(min(served, len(queue.given) - 1)):
        queue.step()
    before = len(queue.given) - queue.finished
    assert before <= 1 + prefetch
    while queue.scheduler.pending_count() and queue.finished < served:
        queue.step()
    # whoever was new has had its first turn once everybody has been served
    while queue.finished < len(queue.given) and len({lane for b in queue.given for lane in lanes_of(b)}) < len(backlog):
        queue.step()
    ahead = len(queue.given) - queue.finished

    queue.put(9, 1)
    while not any(9 in lanes_of(batch) for batch in queue.given):
        queue.step()

    position = next(i for i, batch in enumerate(queue.given) if 9 in lanes_of(batch))
    assert position - queue.finished <= 1 + prefetch
    assert ahead <= 1 + prefetch


def lanes_of(batch: DispatchBatch) -> list[object]:
    return [request.carrier for request in batch.requests]


def test_ten_thousand_requests_do_not_delay_one() -> None:
    queue = Queue(8, prefetch=1)
    queue.put(1, 10_000)
    assert len(queue.given) == 2
    queue.put(2, 1)
    queue.step()
    assert queue.lanes(2)[0] == 2


@settings(max_examples=examples(100), deadline=None)
@given(size=st.integers(1, 8), weights=st.dictionaries(st.integers(0, 3), st.integers(1, 4), min_size=2, max_size=4))
def test_weights_divide_the_rows(size: int, weights: dict[int, int]) -> None:
    queue = Queue(size, weights)
    for lane in weights:
        queue.put(lane, 1000)
    rounds = 5
    for _ in range(rounds * sum(weights.values()) + 1):
        queue.step()
    had = Counter(lane for batch in queue.given[: queue.finished] for lane in lanes_of(batch))
    for lane, weight in weights.items():
        assert abs(had[lane] - rounds * size * weight) <= size * (weight + 2)


@settings(max_examples=examples(100), deadline=None)
@given(parts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12))
def test_answers_in_order_leave_no_turns(parts: list[tuple[int, int]]) -> None:
    queue = Queue(4, ordered=True)
    for lane, count in parts:
        queue.put(lane, count)
    while queue.finished < len(queue.given):
        queue.step()
    ids = [request.id for batch in queue.given for request in batch.requests]
    assert ids == [n.to_bytes(16, "little") for n in range(1, queue.count + 1)]


def test_a_lane_that_sends_one_after_the_other_gets_no_more_than_its_turns() -> None:
    queue = Queue(4)
    queue.put(1, 4000)
    for _ in range(200):
        queue.put(2, 1)
        queue.step()
    had = Counter(lane for batch in queue.given for lane in lanes_of(batch))
    assert had[2] <= 200
    assert had[1] >= 200
