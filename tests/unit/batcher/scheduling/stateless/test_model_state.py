"""Which executor takes the next batch."""

from __future__ import annotations

from batcher.scheduling.stateless.model_state import ServingExecutors


def taken(executors: ServingExecutors, count: int) -> list[str | None]:
    names: list[str | None] = []
    for _ in range(count):
        seat = executors.best
        names.append(seat.executor if seat else None)
        if seat:
            executors.occupy(seat.executor)
    return names


def test_most_free_slots_first_then_least_recently_used() -> None:
    executors = ServingExecutors(prefetch=0)
    executors.serve("a", "h", 1)
    executors.serve("b", "h", 2)
    assert taken(executors, 4) == ["b", "a", "b", None]
    executors.release("a")
    executors.release("b")
    assert taken(executors, 3) == ["a", "b", None]


def test_prefetch_is_used_after_all_slots() -> None:
    executors = ServingExecutors(prefetch=1)
    executors.serve("a", "h", 1)
    executors.serve("b", "h", 1)
    assert taken(executors, 5) == ["a", "b", "a", "b", None]
    assert [seat.free_slots for seat in executors.seats.values()] == [-1, -1]


def test_serving_again_replaces_slots_and_hash_but_not_what_is_outstanding() -> None:
    executors = ServingExecutors(prefetch=0)
    executors.serve("a", "old", 2)
    assert taken(executors, 2) == ["a", "a"]
    executors.serve("a", "new", 3)
    assert taken(executors, 2) == ["a", None]
    assert executors.seats["a"].content_hash == "new"


def test_a_withdrawn_executor_gets_nothing_and_is_forgotten_when_done() -> None:
    executors = ServingExecutors(prefetch=1)
    executors.serve("a", "h", 1)
    executors.occupy("a")
    executors.withdraw("a")
    assert executors.best is None
    assert executors.seats
    executors.release("a")
    assert not executors.seats


def test_releases_beyond_what_is_outstanding_make_no_room() -> None:
    executors = ServingExecutors(prefetch=0)
    executors.serve("a", "h", 1)
    executors.release("a")
    executors.release("nobody")
    assert taken(executors, 2) == ["a", None]


def test_a_batch_of_an_executor_not_yet_announced_counts_once_it_is() -> None:
    executors = ServingExecutors(prefetch=0)
    executors.occupy("a")
    assert executors.best is None
    executors.serve("a", "h", 1)
    assert executors.best is None
    executors.release("a")
    assert taken(executors, 1) == ["a"]


def test_a_lost_executor_is_gone_with_all_it_had() -> None:
    executors = ServingExecutors(prefetch=0)
    executors.serve("a", "h", 1)
    executors.occupy("a")
    executors.lose("a")
    assert not executors.seats
    executors.serve("a", "h", 1)
    assert taken(executors, 1) == ["a"]
