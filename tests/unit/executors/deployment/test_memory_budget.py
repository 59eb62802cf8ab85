"""What fits, what makes room, and what is remembered of sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from executors.deployment.memory_budget import MIN_STAY_NS, MemoryBudget

A, B, C = ("a", 1), ("b", 1), ("c", 1)
LATE = 10 * MIN_STAY_NS


def test_a_bound_on_models() -> None:
    budget = MemoryBudget(budget_bytes=0, max_models=2)
    for key in (A, B):
        assert budget.fits(10**12)
        budget.reserve(key, 10**12, 0)
    assert not budget.fits(0)
    assert not budget.never_fits(10**15)
    budget.release(A)
    budget.release(A)
    assert (budget.fits(0), budget.models, B in budget, A in budget) == (True, 1, True, False)


def test_a_bound_on_memory() -> None:
    budget = MemoryBudget(budget_bytes=100, max_models=0)
    budget.reserve(A, 60, 0)
    assert (budget.fits(40), budget.fits(41), budget.never_fits(101), budget.never_fits(100)) == (
        True,
        False,
        True,
        False,
    )
    budget.set_size(A, 90, 60, 5)
    assert (budget.used_bytes, budget.fits(10), budget.fits(11), budget.over_budget()) == (90, True, False, False)
    budget.reserve(B, 20, 5)
    assert budget.over_budget()


def test_the_most_a_model_ever_took_is_remembered() -> None:
    budget = MemoryBudget(budget_bytes=100, max_models=0)
    assert budget.guess_bytes(A, 7) == 7
    budget.reserve(A, 7, 0)
    budget.set_size(A, 50, 7, 1)
    budget.release(A)
    assert budget.guess_bytes(A, 7) == 50
    budget.reserve(A, 50, 2)
    budget.set_size(A, 3, 7, 3)  # it came to lie in memory that was free
    assert budget.used_bytes == 50


def test_a_model_is_thought_to_take_what_others_of_its_backend_did() -> None:
    mib = 1024**2
    budget = MemoryBudget(budget_bytes=100 * mib, max_models=0)
    budget.learn("onnxruntime", 1000, 10**9)  # too small to tell
    assert budget.guess_bytes(A, 8 * mib, "onnxruntime") == 8 * mib
    budget.learn("onnxruntime", 8 * mib, 12 * mib)
    assert budget.guess_bytes(A, 8 * mib, "onnxruntime") == 12 * mib
    assert budget.guess_bytes(A, 8 * mib, "python") == 8 * mib
    assert budget.guess_bytes(A, 90 * mib, "onnxruntime") == 90 * mib, "it may fit after all"
    budget.learn("onnxruntime", 8 * mib, 3 * mib)
    assert budget.guess_bytes(A, 8 * mib, "onnxruntime") == 8 * mib


def test_what_a_load_took_counts_and_not_the_estimate() -> None:
    mib = 1024**2
    budget = MemoryBudget(budget_bytes=16384 * mib, max_models=0)
    budget.learn("onnxruntime", mib, 20 * mib)
    estimate = budget.guess_bytes(A, 700 * mib, "onnxruntime")
    assert estimate == 14000 * mib
    budget.reserve(A, estimate, 0)
    budget.set_size(A, 800 * mib, 700 * mib, 1)
    assert (budget.used_bytes, budget.fits(15584 * mib)) == (800 * mib, True)
    budget.release(A)
    assert budget.guess_bytes(A, 700 * mib, "onnxruntime") == 800 * mib
    budget.reserve(B, budget.guess_bytes(B, 700 * mib, "onnxruntime"), 2)
    budget.set_size(B, -5, 700 * mib, 3)  # it came to lie in memory that was free
    assert budget.used_bytes == budget.guess_bytes(B, 0) == 700 * mib


def test_the_least_recently_used_goes_first() -> None:
    budget = MemoryBudget(budget_bytes=0, max_models=3)
    for key in (A, B, C):
        budget.reserve(key, 1, 0)
    assert budget.candidates(MIN_STAY_NS - 1) == []
    budget.mark_used(B, 5)
    budget.mark_used(A, 9)
    budget.mark_used(A, 3)  # heard late
    assert budget.candidates(LATE) == [C, B, A]
    budget.set_size(C, 1, 1, LATE)
    assert budget.candidates(LATE) == [B, A]


def test_one_that_waits_for_more_of_a_sequence_stays() -> None:
    budget = MemoryBudget(budget_bytes=0, max_models=3)
    budget.reserve(A, 1, 0, min_idle_ns=LATE)
    budget.mark_used(A, 100)
    assert budget.candidates(LATE) == []
    assert budget.candidates(LATE + 100) == [A]


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 60), st.integers(0, 90)), max_size=40),
    st.integers(50, 120),
    st.integers(0, 4),
)
def test_what_is_only_taken_when_it_fits_never_outgrows_the_bounds(
    loads: list[tuple[str, int, int]], bound: int, most: int
) -> None:
    budget, now = MemoryBudget(budget_bytes=bound, max_models=most), 0
    held: dict[tuple[str, int], int] = {}
    for name, files, took in loads:
        key = (name, 1)
        now += LATE
        if key in held:
            budget.mark_used(key, now)
            continue
        size = budget.guess_bytes(key, files)
        if budget.never_fits(size):
            continue
        while not budget.fits(size):
            victim = budget.candidates(now)[0]
            budget.release(victim)
            del held[victim]
        budget.reserve(key, size, now)
        held[key] = size
        assert not budget.over_budget()
        budget.set_size(key, min(took, bound - budget.used_bytes + size), files, now)
        held[key] = max(size, min(took, bound - sum(held.values()) + size))
        assert budget.used_bytes == sum(held.values()) <= bound
        assert budget.models == len(held)
        assert not most or len(held) <= most
