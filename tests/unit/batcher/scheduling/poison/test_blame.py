"""Who is suspected when a batch dies, and who is condemned."""

from __future__ import annotations

from scheduler_bench import Model, ident

from batcher.scheduling.observations import (
    BatchDied,
    BatchLost,
    ExecutorLost,
    ExecutorReturned,
    RequestCancelled,
    RequestSettled,
    VersionServed,
)
from batcher.scheduling.poison.poison_isolation import MAX_STALLS
from charonia.models.scheduling import DynamicBatching


def die(model: Model, number: int, *, blameless: bool = False) -> list[str]:
    batch = model.batches[number]
    ids = frozenset(request.id for request in batch.requests)
    return model.see(BatchDied(batch.batch_id, batch.executor, ids, "not healthy", "Traceback", blameless))


def test_a_batch_that_died_is_halved_and_its_halves_run_alone() -> None:
    model = Model(DynamicBatching(), max_batch_size=8)
    model.put(*range(1, 9))
    model.put(9)
    assert die(model, 1) == ["a: 1 2 3 4"]
    assert model.finish(1) == ["a: 5 6 7 8"]
    assert die(model, 5) == ["a: 5 6"]
    assert model.finish(5) == ["a: 7 8"]
    assert die(model, 7) == ["a: 7"]
    assert die(model, 7) == ["7 condemned on a: not healthy", "a: 8"]
    assert model.finish(8) == ["a: 9"]
    assert model.batches[8].attempts == (4,)


def test_a_blameless_death_gives_the_batch_out_again() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    for _ in range(9):
        assert die(model, 1, blameless=True) == ["a: 1"]
    assert die(model, 1) == ["1 condemned on a: not healthy"]


def test_a_late_or_foreign_death_is_ignored() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    batch = model.batches[1]
    assert model.see(BatchDied(batch.batch_id, "b", frozenset((ident(1),)), "")) == []
    model.finish(1)
    assert die(model, 1) == []


def test_members_with_an_outcome_are_not_suspected() -> None:
    model = Model(DynamicBatching())
    model.put(1, 2, 3)
    batch = model.batches[1]
    ids = frozenset((ident(1), ident(3)))
    assert model.see(BatchDied(batch.batch_id, "a", ids, "")) == ["a: 1"]
    assert model.finish(1) == ["a: 3"]


def test_a_predecessors_death_isolates_what_waits() -> None:
    model = Model(DynamicBatching(), slots=0)
    model.put(1, 2, 3)
    assert model.see(BatchDied("old-1", "x", frozenset((ident(2), ident(3), ident(9))), "")) == []
    assert model.see(VersionServed("a", 1, "h1", 1)) == ["a: 2"]
    assert model.finish(2) == ["a: 3"]
    assert model.finish(3) == ["a: 1"]
    model = Model(DynamicBatching(), slots=0)
    model.put(1)
    assert model.see(BatchDied("old-1", "x", frozenset((ident(1),)), "why")) == ["1 condemned on x: why"]


def test_executors_lost_with_the_same_request_condemn_it_only_apart() -> None:
    model = Model(DynamicBatching(), max_batch_size=8)
    assert model.put(*range(1, 9)) == ["a: 1 2 3 4 5 6 7 8"]
    assert model.lose("a") == []
    model.put(9)
    assert model.see(VersionServed("b", 1, "h1", 1)) == ["b: 1"]
    assert model.lose("b", VersionServed("c", 1, "h1", 2)) == ["c: 1"]  # apart: the other slot is idle
    assert model.lose("c", VersionServed("d", 1, "h1", 2)) == ["d: 1"]
    assert model.lose("d", VersionServed("e", 1, "h1", 2)) == [
        "1 condemned on d: Executors were lost while they ran this request alone",
        "e: 2",
        "e: 3",
    ]
    assert [word for number in range(2, 8) for word in model.finish(number)] == [f"e: {n}" for n in range(4, 10)]


def test_a_suspect_waits_for_a_fresh_executor_but_not_for_ever() -> None:
    model = Model(None, slots=1)
    model.see(VersionServed("b", 1, "h1", 1), VersionServed("c", 1, "h1", 1))
    assert model.put(1, 2, 3) == ["a: 1", "b: 2", "c: 3"]
    model.finish(2)
    assert model.lose("a") == ["b: 1"]
    model.finish(3)
    assert model.lose("b") == ["c: 1"]  # apart, though c has run something
    assert model.lose("c", VersionServed("d", 1, "h1", 1)) == ["d: 1"]
    assert model.give_back(1) == []  # d has had it: it waits
    assert model.put(4) == ["d: 4"]
    assert model.finish(4) == []
    assert model.wakeup_us() == 13_000_000
    assert model.at(13_000_000) == ["d: 1"]
    assert model.lose("d")[0].startswith("1 condemned on d")
    assert model.wakeup_us() is None


def test_executors_lost_together_condemn_nobody() -> None:
    model = Model(DynamicBatching(), slots=1, max_batch_size=1)
    assert model.put(1) == ["a: 1"]
    assert model.lose("a", VersionServed("b", 1, "h1", 1), VersionServed("c", 1, "h1", 1)) == ["b: 1"]
    for name, other, fresh in (("b", "c", "de"), ("d", "e", "fg"), ("f", "g", "hi")):
        model.lose(name)
        model.now_ns += 400_000_000
        arrived = [VersionServed(executor, 1, "h1", 1) for executor in fresh]
        assert model.see(ExecutorLost(other), *arrived) == [f"{fresh[0]}: 1"]
    assert model.lose("h") == ["i: 1"]  # apart now, and the first time that it counts
    assert model.lose("i")[0].startswith("1 condemned on i")


def test_executors_that_are_heard_of_again_condemn_nobody() -> None:
    model = Model(DynamicBatching(), slots=1, max_batch_size=1)
    assert model.put(1) == ["a: 1"]
    assert model.lose("a", VersionServed("b", 1, "h1", 1)) == ["b: 1"]
    assert model.lose("b", VersionServed("c", 1, "h1", 1)) == ["c: 1"]  # apart from now on
    for _ in range(MAX_STALLS):
        # the same one again and again, whose machine has too much to do
        assert model.lose("c") == []
        assert model.see(VersionServed("c", 1, "h1", 1), ExecutorReturned("c")) == ["c: 1"]
    assert model.see(ExecutorReturned("never lost"), ExecutorReturned("c")) == []
    # it stops its executor each time it runs: that must end, too
    assert model.lose("c") == []
    assert model.see(VersionServed("c", 1, "h1", 1), ExecutorReturned("c")) == ["c: 1"]
    assert model.lose("c")[0].startswith("1 condemned on c")


def test_only_the_executor_that_came_back_is_forgiven() -> None:
    model = Model(DynamicBatching(), slots=1, max_batch_size=1)
    assert model.put(1) == ["a: 1"]
    assert model.lose("a", VersionServed("b", 1, "h1", 1)) == ["b: 1"]
    assert model.lose("b", VersionServed("c", 1, "h1", 1)) == ["c: 1"]
    assert model.lose("c", VersionServed("d", 1, "h1", 1)) == ["d: 1"]
    assert model.see(ExecutorReturned("a"), ExecutorReturned("b")) == []
    assert model.lose("d")[0].startswith("1 condemned on d")


def test_a_suspect_that_this_process_had_before_a_stall_runs_apart_again() -> None:
    model = Model(DynamicBatching(), slots=0, max_batch_size=4)
    requests = [model.request(number) for number in (1, 2, 3)]
    requests[0].losses_apart = 1
    model.see(*requests)
    model.see(BatchLost("a", requests[:1], 1, "apart", stalled=True), BatchLost("a", requests[1:], 2, "", stalled=True))
    assert model.see(VersionServed("a", 1, "h1", 4)) == ["a: 1"]
    assert requests[0].losses_apart == 1
    assert model.finish(1) == ["a: 2 3"]


def test_a_suspect_that_is_cancelled_keeps_no_executor() -> None:
    model = Model(DynamicBatching(), slots=1, max_batch_size=1)
    model.put(1)
    assert model.see(ExecutorLost("a"), VersionServed("b", 1, "h1", 1)) == ["b: 1"]
    model.see(VersionServed("c", 1, "h1", 2))
    assert model.put(3, 4) == ["c: 3", "c: 4"]
    assert model.see(ExecutorLost("b")) == []  # 1 waits for c to have nothing
    model.put(5)
    assert model.finish(3) == []
    assert model.see(RequestCancelled(ident(1))) == ["1 CANCELLED CANCELED", "c: 5"]


def test_requests_settled_elsewhere_are_dropped_without_a_word() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    model.put(2, 3)
    assert model.see(RequestSettled(ident(2)), RequestSettled(ident(1))) == ["stop 1 on a"]
    assert model.see(ExecutorLost("a")) == []
    assert model.see(VersionServed("b", 1, "h1", 1)) == ["b: 3"]
