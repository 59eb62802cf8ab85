"""The scheduler of steps: no block is lost or shared wrongly, the budget holds, every request ends, order is kept."""

from __future__ import annotations

from collections import Counter

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from executors.generation.scheduled_request import ScheduledRequest
from executors.generation.step_scheduler import SchedulerSettings, StepPlan, StepScheduler

_CONTEXT = 64


class Bench:
    """A scheduler, and a model that only remembers which token of which text it wrote to each place of each block."""

    def __init__(self, scheduler: StepScheduler) -> None:
        self.scheduler = scheduler
        self.content: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.adapters: dict[int, str] = {}
        self.requests: dict[bytes, ScheduledRequest] = {}
        self.started: list[int] = []
        self.steps = 0

    def add(self, prompt: list[int], max_tokens: int, adapter: str = "", priority: int = 0) -> ScheduledRequest:
        key = len(self.requests).to_bytes(4, "big")
        one = self.scheduler.add(key, prompt, max_tokens=max_tokens, adapter=adapter, priority=priority)
        self.requests[key] = one
        return one

    def step(self) -> StepPlan:
        scheduler = self.scheduler
        plan = scheduler.plan()
        self.steps += 1
        self.check(plan)
        self.adapters.update(plan.adapters)
        for one, count in [(one, 1) for one in plan.decodes] + plan.chunks:
            self._compute(one, count)
        sampled = plan.sampling()
        scheduler.complete(plan)
        for one in sampled:
            if not one.answer:
                self.started.append(one.number)
            one.answer.append((one.length * 7 + one.number) % 5)
            if len(one.answer) >= one.max_tokens:
                scheduler.remove(one)
        self.check(plan)
        return plan

    def _compute(self, one: ScheduledRequest, count: int) -> None:
        """Write new tokens, then read the whole text back through the blocks."""
        size = self.scheduler.block_tokens
        text = one.tokens(0, one.computed + count).tolist()
        for position in range(one.computed, one.computed + count):
            place = one.blocks[position // size], position % size
            self.content[place] = (one.adapter, tuple(text[: position + 1]))
        for position in range(one.computed + count):
            place = one.blocks[position // size], position % size
            assert self.content[place] == (one.adapter, tuple(text[: position + 1]))

    def check(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        scheduler.pool.check()
        running = list(scheduler._running())
        held = Counter(block for one in running for block in one.blocks)
        assert [held[block] for block in range(scheduler.pool.size)] == list(scheduler.pool.references())
        assert plan.tokens <= scheduler.settings.max_num_batched_tokens
        assert len(running) <= scheduler.settings.max_num_seqs
        assert all(one.is_running for one in running)
        assert all(one.preemptions <= scheduler.settings.max_preemptions for one in self.requests.values())
        assert [one.order for one in scheduler._waiting] == sorted(one.order for one in scheduler._waiting)
        slots = {one.adapter: one.adapter_slot for one in running if one.adapter}
        assert slots.items() <= scheduler.adapters.loaded.items()
        assert len(set(scheduler.adapters.loaded.values())) == len(scheduler.adapters.loaded)


prompts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(13, 50).map(lambda count: [number % 3 for number in range(count)]),
)
requests = st.tuples(prompts, st.integers(1, 20), st.sampled_from(["", "", "a", "b", "c"]), st.integers(0, 2))
actions = st.lists(st.one_of(st.just("step"), st.just("step"), st.just("cancel"), requests), max_size=60)


@settings(max_examples=examples(400), deadline=None)
@given(
    actions=actions,
    blocks=st.integers(16, 40),
    seqs=st.integers(1, 6),
    budget=st.integers(1, 20),
    long=st.integers(1, 20),
    preemptions=st.integers(0, 3),
    slots=st.integers(1, 3),
    cache=st.booleans(),
)
def test_blocks_are_right_and_every_request_ends(
    actions: list[object],
    blocks: int,
    seqs: int,
    budget: int,
    long: int,
    preemptions: int,
    slots: int,
    cache: bool,
) -> None:
    bounds = SchedulerSettings(seqs, seqs + budget, long, preemptions, cache)
    bench = Bench(StepScheduler(bounds, blocks=blocks, block_tokens=4, context=_CONTEXT, adapter_slots=slots))
    cancelled = 0
    for number, action in enumerate(actions):
        if isinstance(action, tuple):
            bench.add(*action)
        elif action == "cancel" and bench.requests:
            one = list(bench.requests.values())[number % len(bench.requests)]
            bench.scheduler.remove(one)
            cancelled += 1
            assert bench.scheduler.find(one.key) is None
            assert one.blocks == []
            bench.scheduler.pool.check()
        else:
            bench.step()
    most = 40 + sum(one.length + one.max_tokens for one in bench.requests.values()) * (preemptions + 2)
    while bench.scheduler.running + bench.scheduler.waiting:
        plan = bench.step()
        assert plan.tokens or plan.preempted, "a step without work while there are requests"
        assert bench.steps <= most + len(actions)
    assert bench.scheduler.pool.available == blocks
    ended = [one for one in bench.requests.values() if len(one.answer) == one.max_tokens]
    assert len(ended) >= len(bench.requests) - cancelled


@settings(max_examples=examples(200), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=2, max_size=30),
    seqs=st.integers(1, 6),
    every=st.integers(1, 4),
)
def test_short_prompts_of_a_level_begin_in_order(sizes: list[int], seqs: int, every: int) -> None:
    bounds = SchedulerSettings(seqs, seqs + 6, 8, 0, prefix_cache=False)
    bench = Bench(StepScheduler(bounds, blocks=60, block_tokens=4, context=_CONTEXT))
    for number, size in enumerate(sizes):
        bench.add([number] * size, 1 + number % 5)
        if number % every == 0:
            bench.step()
    while bench.scheduler.running + bench.scheduler.waiting:
        bench.step()
    assert bench.started == sorted(bench.started)


@settings(max_examples=examples(100), deadline=None)
@given(levels=st.lists(st.integers(0, 2), min_size=1, max_size=20), seqs=st.integers(1, 4))
def test_a_higher_level_is_never_behind_a_lower_one(levels: list[int], seqs: int) -> None:
    bounds = SchedulerSettings(seqs, 64, 64, 3)
    bench = Bench(StepScheduler(bounds, blocks=200, block_tokens=4, context=_CONTEXT))
    for number, level in enumerate(levels):
        bench.add([number, number], 8, "", level)
        bench.step()
        running = [one.priority for one in bench.scheduler._running()]
        may_go = [one.priority for one in bench.scheduler._running() if one.preemptions < 3]
        waiting = [one.priority for one in bench.scheduler._waiting]
        assert not waiting or not may_go or min(waiting) >= max(may_go) or len(running) < seqs
