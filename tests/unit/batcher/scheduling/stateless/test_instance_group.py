"""Who takes the next batch."""

from __future__ import annotations

from batcher.scheduling.stateless.model_state import InstanceGroup


def taken(group: InstanceGroup, count: int) -> list[str | None]:
    names: list[str | None] = []
    for _ in range(count):
        seat = group.best
        names.append(seat.executor if seat else None)
        if seat:
            group.occupy(seat.executor)
    return names


def test_most_free_slots_first_then_least_recently_used() -> None:
    group = InstanceGroup(prefetch=0)
    group.serve("a", "h", 1)
    group.serve("b", "h", 2)
    assert taken(group, 4) == ["b", "a", "b", None]
    group.release("a")
    group.release("b")
    assert taken(group, 3) == ["a", "b", None]


def test_prefetch_is_used_after_all_slots() -> None:
    group = InstanceGroup(prefetch=1)
    group.serve("a", "h", 1)
    group.serve("b", "h", 1)
    assert taken(group, 5) == ["a", "b", "a", "b", None]
    assert [seat.free_slots for seat in group.seats.values()] == [-1, -1]


def test_serving_again_replaces_slots_and_hash_but_not_what_is_outstanding() -> None:
    group = InstanceGroup(prefetch=0)
    group.serve("a", "old", 2)
    assert taken(group, 2) == ["a", "a"]
    group.serve("a", "new", 3)
    assert taken(group, 2) == ["a", None]
    assert group.seats["a"].content_hash == "new"


def test_a_withdrawn_executor_gets_nothing_and_is_forgotten_when_done() -> None:
    group = InstanceGroup(prefetch=1)
    group.serve("a", "h", 1)
    group.occupy("a")
    group.withdraw("a")
    assert group.best is None
    assert group.seats
    group.release("a")
    assert not group.seats


def test_releases_beyond_what_is_outstanding_make_no_room() -> None:
    group = InstanceGroup(prefetch=0)
    group.serve("a", "h", 1)
    group.release("a")
    group.release("nobody")
    assert taken(group, 2) == ["a", None]


def test_a_batch_of_an_executor_not_yet_announced_counts_once_it_is() -> None:
    group = InstanceGroup(prefetch=0)
    group.occupy("a")
    assert group.best is None
    group.serve("a", "h", 1)
    assert group.best is None
    group.release("a")
    assert taken(group, 1) == ["a"]


def test_a_lost_executor_is_gone_with_all_it_had() -> None:
    group = InstanceGroup(prefetch=0)
    group.serve("a", "h", 1)
    group.occupy("a")
    group.lose("a")
    assert not group.seats
    group.serve("a", "h", 1)
    assert taken(group, 1) == ["a"]
