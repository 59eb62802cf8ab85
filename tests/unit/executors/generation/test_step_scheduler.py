"""What a step computes: chunks beside decodes, short prompts beside long ones, preemption, prefixes, adapters."""

from __future__ import annotations

import pytest

from charonia.errors import InvalidArgument
from executors.generation.scheduled_request import ScheduledRequest
from executors.generation.step_scheduler import SchedulerSettings, StepPlan, StepScheduler


def make(
    seqs: int = 4,
    budget: int = 16,
    long: int = 8,
    preemptions: int = 2,
    *,
    blocks: int = 64,
    slots: int = 0,
    cache: bool = True,
) -> StepScheduler:
    settings = SchedulerSettings(seqs, budget, long, preemptions, cache)
    return StepScheduler(settings, blocks=blocks, block_tokens=4, context=128, adapter_slots=slots)


def add(
    scheduler: StepScheduler,
    name: str,
    prompt: int | list[int],
    max_tokens: int = 4,
    *,
    priority: int = 0,
    adapter: str = "",
) -> ScheduledRequest:
    """A number is a prompt of so many tokens that no other request has."""
    tokens = prompt if isinstance(prompt, list) else [ord(name[0])] * prompt
    return scheduler.add(name.encode(), tokens, max_tokens=max_tokens, priority=priority, adapter=adapter)


def step(scheduler: StepScheduler) -> StepPlan:
    """One step; each request that samples gets a token, and ends with its last."""
    plan = scheduler.plan()
    sampled = plan.sampling()
    scheduler.complete(plan)
    for one in sampled:
        one.answer.append(0)
        if len(one.answer) == one.max_tokens:
            scheduler.remove(one)
    return plan


def words(plan: StepPlan) -> str:
    parts = [one.key.decode() for one in plan.decodes]
    return " ".join(parts + [f"{one.key.decode()}:{count}" for one, count in plan.chunks])


def test_prompts_are_read_in_chunks_beside_decodes() -> None:
    scheduler = make(budget=10, long=100)
    add(scheduler, "a", 4)
    assert words(step(scheduler)) == "a:4"
    add(scheduler, "b", 20)
    assert [words(step(scheduler)) for _ in range(3)] == ["a b:9", "a b:9", "a b:2"]
    assert words(step(scheduler)) == "b"


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    scheduler = make(budget=10)
    add(scheduler, "long", 30)
    assert words(step(scheduler)) == "long:10"
    add(scheduler, "short", 5)
    assert words(step(scheduler)) == "short:5 long:5"
    assert words(step(scheduler)) == "short long:9"


def test_long_prompts_are_read_one_after_the_other() -> None:
    scheduler = make(budget=10)
    add(scheduler, "a", 18)
    add(scheduler, "b", 18)
    add(scheduler, "c", 3)
    assert words(step(scheduler)) == "c:3 a:7"
    assert words(step(scheduler)) == "c a:9"
    assert words(step(scheduler)) == "c a:2 b:7"


def test_the_long_prompt_keeps_half_of_the_budget() -> None:
    scheduler = make(budget=10, seqs=9)
    add(scheduler, "long", 60)
    step(scheduler)
    for number in range(4):
        add(scheduler, f"{number}", 4, 1)
    assert words(step(scheduler)) == "0:4 1:1 long:5"
    assert words(step(scheduler)) == "1:3 2:2 long:5"


def test_a_known_prefix_is_not_computed_again() -> None:
    scheduler = make()
    shared = list(range(8))
    add(scheduler, "a", [*shared, 1], 1)
    assert words(step(scheduler)) == "a:9"
    one = add(scheduler, "b", [*shared, 2, 3])
    assert words(step(scheduler)) == "b:2"
    assert one.hit_tokens == 8
    again = add(scheduler, "c", shared)
    assert words(step(scheduler)) == "b c:4", "the last token is computed, for its logits"
    assert again.hit_tokens == 4


def test_a_request_waits_for_a_prefix_that_another_computes() -> None:
    scheduler = make(budget=10, long=100)
    shared = list(range(12))
    add(scheduler, "a", [*shared, 1])
    add(scheduler, "b", [*shared, 2])
    assert words(step(scheduler)) == "a:10"
    assert words(step(scheduler)) == "a:3"
    assert words(step(scheduler)) == "a b:1"


def test_adapters_do_not_share_prefixes() -> None:
    scheduler = make(slots=2)
    add(scheduler, "a", list(range(9)), 1, adapter="x")
    plan = step(scheduler)
    assert plan.adapters == [(0, "x")]
    add(scheduler, "b", list(range(9)), 1, adapter="y")
    plan = step(scheduler)
    assert words(plan) == "b:9"
    assert plan.adapters == [(1, "y")]
    add(scheduler, "c", list(range(9)), 1, adapter="x")
    plan = step(scheduler)
    assert words(plan) == "c:1"
    assert plan.adapters == []


def test_blocks_without_a_request_are_used_again_the_oldest_first() -> None:
    scheduler = make(blocks=6)
    add(scheduler, "a", 8, 1)
    step(scheduler)
    add(scheduler, "b", 8, 1)
    step(scheduler)
    add(scheduler, "c", 12, 1)
    step(scheduler)
    assert add(scheduler, "b2", [ord("b")] * 9, 1)
    assert words(step(scheduler)) == "b2:1"
    add(scheduler, "a2", [ord("a")] * 9, 1)
    assert words(step(scheduler)) == "a2:9"


def test_the_youngest_is_preempted_when_blocks_run_out() -> None:
    scheduler = make(blocks=6, preemptions=1)
    old = add(scheduler, "a", 8, 12)
    young = add(scheduler, "b", 7, 12)
    step(scheduler)
    preempted: list[ScheduledRequest] = []
    while not preempted:
        preempted += step(scheduler).preempted
    assert preempted == [young]
    assert not young.is_running
    assert young.blocks == []
    while old.is_running:
        step(scheduler)
    while young.is_running or scheduler.waiting:
        assert step(scheduler).preempted == []
    assert len(young.answer) == 12
    assert scheduler.pool.available == 6


def test_one_that_was_preempted_often_enough_gets_all_its_blocks() -> None:
    scheduler = make(blocks=8, preemptions=0)
    one = add(scheduler, "a", 4, 12)
    step(scheduler)
    assert len(one.blocks) == 4
    other = add(scheduler, "b", 4, 16)
    step(scheduler)
    assert not other.is_running, "it would need five blocks in the end, and four are left"


def test_a_higher_level_preempts_when_slots_are_full() -> None:
    scheduler = make(seqs=2)
    add(scheduler, "a", 3, 20, priority=1)
    add(scheduler, "b", 3, 20, priority=1)
    step(scheduler)
    add(scheduler, "c", 3, 20)
    plan = step(scheduler)
    assert words(plan) == "a c:3"
    assert [one.key for one in plan.preempted] == [b"b"]
    add(scheduler, "d", 3, 20)
    add(scheduler, "e", 3, 20)
    plan = step(scheduler)
    assert words(plan) == "c d:3"
    assert not step(scheduler).preempted


def test_a_higher_level_preempts_when_blocks_are_full() -> None:
    scheduler = make(blocks=8)
    add(scheduler, "a", 12, 4, priority=1)
    add(scheduler, "b", 12, 4, priority=1)
    step(scheduler)
    step(scheduler)
    add(scheduler, "c", 15, 4)
    plan = step(scheduler)
    assert [one.key for one in plan.preempted] == [b"b"]
    assert "c:" in words(plan)


def test_an_adapter_waits_for_a_slot_and_is_not_starved() -> None:
    scheduler = make(slots=1)
    add(scheduler, "a", 3, 3, adapter="x")
    step(scheduler)
    add(scheduler, "b", 3, 3, adapter="y")
    add(scheduler, "c", 3, 3, adapter="x")
    add(scheduler, "d", 3, 3)
    assert words(step(scheduler)) == "a d:3"
    assert words(step(scheduler)) == "a d"
    plan = step(scheduler)
    assert words(plan) == "d b:3"
    assert plan.adapters == [(0, "y")]


def test_a_dropped_adapter_takes_its_requests_along() -> None:
    scheduler = make(slots=1)
    running = add(scheduler, "a", 3, 3, adapter="x")
    scheduler.plan()
    waiting = add(scheduler, "b", 3, 3, adapter="x")
    assert scheduler.drop_adapter("x") == [running, waiting]
    assert scheduler.running + scheduler.waiting == 0
    assert scheduler.adapters.loaded == {}


def test_a_removed_request_frees_everything_at_once() -> None:
    scheduler = make(blocks=8)
    one = add(scheduler, "a", 12)
    scheduler.plan()
    scheduler.remove(one)
    scheduler.remove(one)
    assert scheduler.pool.available == 8
    assert scheduler.running == 0


def test_a_request_may_go_away_while_a_step_is_computed() -> None:
    scheduler = make()
    one = add(scheduler, "a", 6)
    plan = scheduler.plan()
    scheduler.remove(one)
    scheduler.complete(plan)
    scheduler.pool.check()


def test_what_can_never_run_is_refused() -> None:
    scheduler = make(blocks=8)
    with pytest.raises(InvalidArgument, match="no tokens"):
        add(scheduler, "a", 0)
    with pytest.raises(InvalidArgument, match="at most 32 of both"):
        add(scheduler, "a", 32)
    with pytest.raises(InvalidArgument, match="LoRA feature is not enabled"):
        add(scheduler, "a", 4, adapter="x")
    add(scheduler, "a", 4)
    with pytest.raises(InvalidArgument, match="this key"):
        add(scheduler, "a", 4)


def test_an_answer_ends_where_the_context_does() -> None:
    assert add(make(blocks=8), "a", 30, 100).max_tokens == 2


def test_a_budget_must_exceed_the_requests() -> None:
    with pytest.raises(InvalidArgument, match="must be larger than max_num_seqs"):
        SchedulerSettings(8, 8)


def test_an_answer_of_an_earlier_attempt_is_computed_like_a_prompt() -> None:
    scheduler = make()
    one = scheduler.add(b"a", [1, 2, 3], max_tokens=4, answer=[4, 5])
    assert words(step(scheduler)) == "a:5"
    assert words(step(scheduler)) == "a"
    assert one.answer == [4, 5, 0, 0]
    assert scheduler.running == 0
