"""What is chosen from what was measured, step by step; whole runs are in tests/property/test_adaptive_batching.py."""

from __future__ import annotations

from batcher.scheduling.queues.adaptive_batching import AdaptiveBatching, Choice
from batcher.scheduling.queues.dynamic_batching import BatchRules

MS = 1_000_000
RULES = BatchRules(True, 16, frozenset((16,)), 16, 0, False, 40 * MS)


class Learner:
    """Tells of batches of rows that cost `cost`, `rate` rows a second, a tenth of a second at a time."""

    def __init__(self) -> None:
        self.adaptive = AdaptiveBatching(RULES)
        self.now_ns = 1

    def tenth(self, *sizes: int, rate: int = 500, fixed_ms: float = 4, late: int = 0, slots: int = 1) -> Choice:
        self.adaptive.dispatched(0, self.now_ns)
        self.now_ns += 100 * MS
        self.adaptive.dispatched(rate // 10, self.now_ns)
        for size in sizes:
            self.adaptive.finished(size, int((fixed_ms + 0.1 * size) * MS), self.now_ns)
        self.adaptive.answered(max(late, rate // 10), late)
        assert self.adaptive.is_due(self.now_ns)
        self.adaptive.review(slots, self.now_ns)
        assert not self.adaptive.is_due(self.now_ns + 99 * MS)
        return self.adaptive.choice

    def settle(self, *sizes: int, tenths: int = 60, **load: int) -> Choice:
        for _ in range(tenths):
            choice = self.tenth(*sizes, **load)
        return choice


def test_nothing_is_limited_or_delayed_before_something_is_known() -> None:
    learner = Learner()
    assert learner.adaptive.choice == Choice("learning", 1, 0, 16)
    assert learner.adaptive.rules == RULES
    assert learner.tenth(1, 2, 1).state == "learning"
    assert learner.adaptive.rules == RULES
    assert learner.settle(1, 2, tenths=12).state == "in reach"


def test_waiting_begins_when_it_has_looked_right_for_a_while_and_ends_at_once() -> None:
    learner = Learner()
    assert learner.settle(1, 8, tenths=10).delay_ns == 0
    assert learner.settle(1, 8, tenths=3).delay_ns > 0
    assert learner.settle(1, 8, tenths=2, rate=10_000, late=500).delay_ns == 0
    # requests were late by it: now it must look right for twice as long at least
    assert learner.settle(1, 8, tenths=15).delay_ns == 0
    assert learner.settle(1, 8, tenths=150).delay_ns > 0


def test_larger_sizes_are_tried_in_steps_of_two() -> None:
    learner = Learner()
    largest = 2
    seen = {largest}
    for _ in range(6):
        choice = learner.settle(1, largest, tenths=20, rate=400)
        assert choice.size <= 2 * largest
        largest = max(largest, choice.size)
        seen.add(largest)
    assert largest >= 8
    assert len(seen) > 2
    assert 0 < choice.delay_ns < 40 * MS


def test_lateness_narrows_the_margin_at_once_and_its_absence_widens_it_slowly() -> None:
    learner = Learner()
    learner.settle(1, 8, tenths=30)
    before = learner.adaptive.margin
    learner.settle(1, 8, tenths=12, late=5)
    learner.settle(1, 8, tenths=12)
    narrowed = learner.adaptive.margin
    assert narrowed < 0.9 * before
    learner.settle(1, 8, tenths=40)
    assert narrowed < learner.adaptive.margin < before


def test_what_a_size_cost_long_ago_is_forgotten() -> None:
    learner = Learner()
    learner.settle(1, 16, tenths=10)
    learner.settle(1, tenths=400)
    assert sorted(learner.adaptive._costs) == [1]


def test_without_an_instance_or_rows_nothing_is_chosen() -> None:
    learner = Learner()
    assert learner.tenth(1, 2, 4, 8, slots=0).state == "learning"
    learner = Learner()
    assert learner.tenth(1, 2, 4, 8, rate=0).state == "learning"


def test_another_target_begins_anew_with_what_is_known() -> None:
    learner = Learner()
    assert learner.settle(1, 8).state == "in reach"
    tight = BatchRules(True, 16, frozenset((16,)), 16, 0, False, 3 * MS)
    learner.adaptive.adopt(tight)
    assert learner.adaptive.rules == tight
    assert learner.adaptive.is_due(learner.now_ns)
    learner.adaptive.review(1, learner.now_ns)
    assert learner.adaptive.choice.state == "out of reach"
    learner.adaptive.adopt(tight)
    assert learner.adaptive.choice.state == "out of reach"


def test_large_sizes_that_cost_about_the_same_are_one() -> None:
    wide = BatchRules(True, 4096, frozenset((4096,)), 4096, 0, False, 40 * MS)
    adaptive = AdaptiveBatching(wide)
    for size in range(1, 4097):
        adaptive.finished(size, 4 * MS + size, 1)
    assert len(adaptive._costs) <= 16 + 8 * 8 + 1
    known = sorted(adaptive._costs)
    assert known[:16] == list(range(1, 17))
    assert all(adaptive._cost(known, size)[0] >= 4 * MS for size in (1, 17, 31, 100, 4095, 4096, 5000))
