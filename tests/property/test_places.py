"""A job's place is what the scheduler makes of it: exact in one line, within a turn of every other lane else."""

from __future__ import annotations

from collections import Counter

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.decisions import DispatchBatch
from batcher.scheduling.observations import BatchFinished, PolicyChanged, RequestQueued, VersionServed
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.facts.jobs import JobPlace, Line, ahead_of
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching

LEVELS = 3


class Service:
    """One instance that serves a backlog. `waiting` was not dispatched yet, `served` was; both in order."""

    def __init__(self, max_batch_size: int, weights: dict[int, int]) -> None:
        self.scheduler = ModelScheduler("p", 0, weights)
        block = DynamicBatching(priority_levels=LEVELS, default_priority_level=1)
        interface = ModelInterface("m", "", "", max_batch_size, {}, {}, dynamic_batching=block)
        self.scheduler.observe(PolicyChanged(interface), 0)
        self.scheduler.observe(VersionServed("a", 1, "h", 1), 0)
        self.waiting: dict[bytes, Line] = {}
        self.served: list[tuple[bytes, Line]] = []
        self.running: list[DispatchBatch] = []

    def put(self, lines: list[Line]) -> None:
        first = len(self.waiting) + len(self.served)
        requests = []
        for number, (level, lane) in enumerate(lines, first):
            ident = number.to_bytes(16, "little")
            self.waiting[ident] = (level, lane)
            requests.append(RequestQueued(ident, 1, level, 1, 7, 0, 0, 0, 0, lane, lane))
        self.see(self.scheduler.observe_all(requests, 0))

    def see(self, decisions: list[object]) -> None:
        for decision in decisions:
            if isinstance(decision, DispatchBatch):
                self.running.append(decision)
                self.served += [(request.id, self.waiting.pop(request.id)) for request in decision.requests]

    def step(self) -> None:
        batch = self.running.pop(0)
        self.see(self.scheduler.observe(BatchFinished(batch.batch_id, batch.executor, batch.via_owner), 0))

    def place(self, ident: bytes) -> JobPlace:
        own, before = self.waiting[ident], list(self.waiting).index(ident)
        rank = list(self.waiting.values())[:before].count(own)
        return JobPlace(own, rank, Counter(self.waiting.values()), len(self.waiting))

    def served_before(self, ident: bytes) -> Counter[Line]:
        since = len(self.served)
        while ident in self.waiting:
            self.step()
        order = self.served[since:]
        return Counter(line for _, line in order[: [one for one, _ in order].index(ident)])


backlogs = st.lists(st.tuples(st.integers(1, LEVELS), st.integers(0, 3)), max_size=150)


@settings(max_examples=examples(400), deadline=None)
@given(
    size=st.integers(1, 8),
    weights=st.dictionaries(st.integers(0, 3), st.integers(1, 5)),
    backlog=backlogs,
    later=backlogs,
    steps=st.integers(0, 30),
    which=st.integers(0, 10_000),
)
def test_what_is_said_to_be_before_a_job_is_before_it(
    size: int, weights: dict[int, int], backlog: list[Line], later: list[Line], steps: int, which: int
) -> None:
    service = Service(size, weights)
    service.put(backlog)
    while steps and service.running:
        service.step()
        steps -= 1
    service.put(later)
    if not service.waiting:
        return
    ident = list(service.waiting)[which % len(service.waiting)]
    place = service.place(ident)
    said = ahead_of(place, weights)
    level, lane = place.line
    before = service.served_before(ident)

    assert said.calls == 0
    assert said.own == before[place.line]
    assert said.higher == sum(count for (of_level, _), count in before.items() if of_level < level)
    assert not any(of_level > level for of_level, _ in before)
    turns = sum(count for (of_level, of_lane), count in before.items() if of_level == level and of_lane != lane)
    others = [of_lane for of_level, of_lane in place.lines if of_level == level and of_lane != lane]
    assert abs(said.turns - turns) <= sum(size * weights.get(other, 1) + 1 for other in others)


def test_calls_are_taken_to_lie_among_the_jobs() -> None:
    place = JobPlace((1, 0), 3, {(1, 0): 8}, 24)
    assert (ahead_of(place, {}).jobs, ahead_of(place, {}).calls) == (3, 8)
    assert ahead_of(JobPlace((1, 0), 7, {(1, 0): 8}, 24), {}).calls == 16, "before the last one may be all"


def test_the_lanes_of_a_level_are_counted_by_their_shares() -> None:
    lines = {(1, 0): 50, (2, 0): 1000, (2, 1): 1000, (2, 2): 3, (3, 3): 70}
    said = ahead_of(JobPlace((2, 0), 10, lines, 2123), {1: 4})
    assert (said.higher, said.own, said.turns, said.jobs) == (50, 10, 43, 103)
    assert ahead_of(JobPlace((2, 1), 10, lines, 2123), {1: 4}).turns == 4
