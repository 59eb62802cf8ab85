"""Resources are never overdrawn, nobody starves, and turns are shared by executions x priority (Q1-Q4)."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from charonia.errors import InvalidArgument
from charonia.models.interface import ResourceNeed
from executors.running.rate_limiter import GLOBAL, RateLimiter

LIMITS = {(0, "a"): 3, (1, "a"): 2, (-2, "b"): 2, (-2, "g"): 4}
"""Resources a and b of devices, g of all; -2 is every device."""

device_needs = st.lists(st.builds(ResourceNeed, st.sampled_from("ab"), st.integers(0, 4), st.just(False)), max_size=2)
global_needs = st.lists(st.builds(ResourceNeed, st.just("g"), st.integers(0, 5), st.just(True)), max_size=1)


class Limiting(RuleBasedStateMachine):
    """Instances come and go, ask, run and end in any order; a model of what is held keeps the books."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = RateLimiter(LIMITS)
        self.needs: dict[int, dict[tuple[int, str], int]] = {}
        self.running: set[int] = set()
        self.waiting: set[int] = set()
        self.next = 0

    @rule(own=device_needs, shared=global_needs, priority=st.integers(0, 3), device=st.sampled_from([-1, 0, 1]))
    def come(self, own: list[ResourceNeed], shared: list[ResourceNeed], priority: int, device: int) -> None:
        needs: dict[tuple[int, str], int] = {}
        for need in [*own, *shared]:
            place = (GLOBAL if need.is_global else max(0, device), need.name)
            needs[place] = max(needs.get(place, 0), need.count)
        possible = all(count <= _there_is(place) for place, count in needs.items())
        self.next += 1
        try:
            self.limiter.register(self.next, [*own, *shared], priority, device)
        except InvalidArgument:
            assert not possible
        else:
            assert possible
            self.needs[self.next] = needs

    @precondition(lambda self: self.needs)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.needs)))
        self.limiter.ask(key)
        if key not in self.running:
            self.waiting.add(key)

    @precondition(lambda self: self.needs)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.needs)))
        self.limiter.withdraw(key)
        self.waiting.discard(key)

    @rule()
    def grant(self) -> None:
        first = min(((self.limiter.scaled_executions(key), key) for key in self.waiting), default=None)
        ties = {key for key in self.waiting if first is not None and self.limiter.scaled_executions(key) == first[0]}
        free = self._free()
        granted = self.limiter.grant()
        assert set(granted) <= self.waiting
        assert not self.limiter.grant()
        if ties and all(all(free[p] >= c for p, c in self.needs[k].items()) for k in ties):
            assert granted[0] in ties  # whoever is most behind goes first
        self.waiting -= set(granted)
        self.running |= set(granted)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), executed=st.booleans())
    def end(self, data: st.DataObject, executed: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.limiter.release(key, executed=executed)
        self.running.remove(key)

    @precondition(lambda self: self.needs)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.needs)))
        self.limiter.unregister(key)
        del self.needs[key]
        self.running.discard(key)
        self.waiting.discard(key)

    @rule()
    def everybody_gets_a_turn(self) -> None:
        """When all that run end and no more come, everything that waits has begun."""
        waited = set(self.waiting)
        for _ in range(len(self.needs) + 1):
            for key in list(self.running):
                self.limiter.release(key)
            self.running.clear()
            self.running |= set(self.limiter.grant())
            self.waiting -= self.running
        assert not waited & self.waiting

    def _free(self) -> dict[tuple[int, str], int]:
        used: Counter[tuple[int, str]] = Counter()
        for key in self.running:
            used.update(self.needs[key])
        places = {place for needs in self.needs.values() for place in needs}
        return {place: _there_is(place) - used[place] for place in places}

    @invariant()
    def nothing_is_overdrawn(self) -> None:
        free = self._free()
        assert all(left >= 0 for left in free.values())
        assert self.limiter.used() == {
            place: _there_is(place) - left for place, left in free.items() if _there_is(place) != left
        }


def _there_is(place: tuple[int, str]) -> int:
    device, name = place
    return max((n for (d, r), n in LIMITS.items() if r == name and (device == GLOBAL or d in (device, -2))), default=0)


TestLimiting = Limiting.TestCase


@given(
    priorities=st.lists(st.integers(0, 4), min_size=2, max_size=5),
    capacity=st.integers(1, 3),
    rounds=st.integers(50, 200),
)
def test_turns_are_shared_by_priority(priorities: list[int], capacity: int, rounds: int) -> None:
    """All wait all the time for one resource: executions x priority stay within a turn of each other (Q2)."""
    limiter = RateLimiter({(0, "r"): capacity})
    for key, priority in enumerate(priorities):
        limiter.register(key, [ResourceNeed("r", 1)], priority, 0)
    done: Counter[int] = Counter()
    running: list[object] = []
    for _ in range(rounds):
        for key in range(len(priorities)):
            limiter.ask(key)
        running += limiter.grant()
        first = running.pop(0)
        limiter.release(first)
        done[first] += 1  # type: ignore[index]
    if capacity == 1:
        scaled = [done[key] * max(1, priority) for key, priority in enumerate(priorities)]
        assert max(scaled) - min(scaled) <= 2 * max(1, *priorities)


@given(idle=st.integers(0, 500), many=st.integers(1, 6))
def test_a_large_need_is_not_starved_by_small_ones_nor_by_a_newcomer(idle: int, many: int) -> None:
    limiter = RateLimiter({(0, "r"): 4})
    limiter.register("large", [ResourceNeed("r", 4)], 1, 0)
    for key in range(many):
        limiter.register(key, [ResourceNeed("r", 1)], 1, 0)
    running: list[object] = []
    for _ in range(idle):  # the large one has run before, alone
        limiter.ask("large")
        assert limiter.grant() == ["large"]
        limiter.release("large")
    limiter.register("new", [ResourceNeed("r", 1)], 1, 0)
    since = 0
    for _ in range(400):
        for key in [*range(many), "new", "large"]:
            limiter.ask(key)
        granted = limiter.grant()
        since = 0 if "large" in granted else since + 1
        # whoever was idle or is new may be ahead for some executions, not for as many as the others ever did
        assert since <= 40 * (many + 1)
        running += granted
        limiter.release(running.pop(0))
