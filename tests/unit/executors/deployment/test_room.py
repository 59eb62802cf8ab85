"""What fits, what makes room, and what is remembered of sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from executors.deployment.room import LEAST_STAY_NS, Room

A, B, C = ("a", 1), ("b", 1), ("c", 1)
LATE = 10 * LEAST_STAY_NS


def test_a_bound_on_models() -> None:
    room = Room(budget_bytes=0, most_models=2)
    for key in (A, B):
        assert room.fits(10**12)
        room.take(key, 10**12, 0)
    assert not room.fits(0)
    assert not room.never_fits(10**15)
    room.give(A)
    room.give(A)
    assert (room.fits(0), room.models, B in room, A in room) == (True, 1, True, False)


def test_a_bound_on_memory() -> None:
    room = Room(budget_bytes=100, most_models=0)
    room.take(A, 60, 0)
    assert (room.fits(40), room.fits(41), room.never_fits(101), room.never_fits(100)) == (True, False, True, False)
    room.measured(A, 90, 5)
    assert (room.used_bytes, room.fits(10), room.fits(11), room.over_budget()) == (90, True, False, False)
    room.take(B, 20, 5)
    assert room.over_budget()


def test_the_most_a_model_ever_took_is_remembered() -> None:
    room = Room(budget_bytes=100, most_models=0)
    assert room.guess_bytes(A, 7) == 7
    room.take(A, 7, 0)
    room.measured(A, 50, 1)
    room.give(A)
    assert room.guess_bytes(A, 7) == 50
    room.take(A, 50, 2)
    room.measured(A, 3, 3)  # it came to lie in memory that was free
    assert room.used_bytes == 50


def test_a_model_is_thought_to_take_what_others_of_its_backend_did() -> None:
    mib = 1024**2
    room = Room(budget_bytes=100 * mib, most_models=0)
    room.learn("onnxruntime", 1000, 10**9)  # too small to tell
    assert room.guess_bytes(A, 8 * mib, "onnxruntime") == 8 * mib
    room.learn("onnxruntime", 8 * mib, 12 * mib)
    assert room.guess_bytes(A, 8 * mib, "onnxruntime") == 12 * mib
    assert room.guess_bytes(A, 8 * mib, "python") == 8 * mib
    assert room.guess_bytes(A, 90 * mib, "onnxruntime") == 90 * mib, "it may fit after all"
    room.learn("onnxruntime", 8 * mib, 3 * mib)
    assert room.guess_bytes(A, 8 * mib, "onnxruntime") == 8 * mib


def test_the_least_recently_used_goes_first() -> None:
    room = Room(budget_bytes=0, most_models=3)
    for key in (A, B, C):
        room.take(key, 1, 0)
    assert room.candidates(LEAST_STAY_NS - 1) == []
    room.used(B, 5)
    room.used(A, 9)
    room.used(A, 3)  # heard late
    assert room.candidates(LATE) == [C, B, A]
    room.measured(C, 1, LATE)
    assert room.candidates(LATE) == [B, A]


def test_one_that_waits_for_more_of_a_sequence_stays() -> None:
    room = Room(budget_bytes=0, most_models=3)
    room.take(A, 1, 0, keep_ns=LATE)
    room.used(A, 100)
    assert room.candidates(LATE) == []
    assert room.candidates(LATE + 100) == [A]


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 60), st.integers(0, 90)), max_size=40),
    st.integers(50, 120),
    st.integers(0, 4),
)
def test_what_is_only_taken_when_it_fits_never_outgrows_the_bounds(
    loads: list[tuple[str, int, int]], budget: int, most: int
) -> None:
    room, now = Room(budget_bytes=budget, most_models=most), 0
    held: dict[tuple[str, int], int] = {}
    for name, files, took in loads:
        key = (name, 1)
        now += LATE
        if key in held:
            room.used(key, now)
            continue
        size = room.guess_bytes(key, files)
        if room.never_fits(size):
            continue
        while not room.fits(size):
            victim = room.candidates(now)[0]
            room.give(victim)
            del held[victim]
        room.take(key, size, now)
        held[key] = size
        assert not room.over_budget()
        room.measured(key, min(took, budget - room.used_bytes + size), now)
        held[key] = max(size, min(took, budget - sum(held.values()) + size))
        assert room.used_bytes == sum(held.values()) <= budget
        assert room.models == len(held)
        assert not most or len(held) <= most
