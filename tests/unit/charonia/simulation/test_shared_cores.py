"""Executions that share cores: at each instant as much work is done as there are cores for those that run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.simulation.shared_cores import SharedCores


def ends(cores: float, work: list[tuple[int, int]], uses: Sequence[float] = ()) -> list[int]:
    """When each of `work` (begins at, takes alone) ends; each uses one core, or as many as `uses` says."""
    shared = SharedCores(cores)
    found = [0] * len(work)
    coming = [(at_ns, number) for number, (at_ns, _) in enumerate(work)]
    heapq.heapify(coming)
    while True:
        end_ns = shared.next_end_ns()
        if end_ns is not None and (not coming or end_ns <= coming[0][0]):
            found[int(shared.end_next(end_ns))] = end_ns
        elif coming:
            at_ns, number = heapq.heappop(coming)
            shared.begin(str(number), work[number][1], at_ns, uses[number] if uses else 1.0)
        else:
            return found


def ends_step_by_step(cores: float, work: list[tuple[int, int]], uses: Sequence[float]) -> list[int]:
    """The same in steps of a nanosecond."""
    left = [float(needs) for _, needs in work]
    found = [0] * len(work)
    now_ns = 0
    while not all(found):
        running = [number for number, (at_ns, _) in enumerate(work) if at_ns <= now_ns and not found[number]]
        now_ns += 1
        for number in running:
            left[number] -= min(1.0, cores / sum(uses[one] for one in running))
            if left[number] < 1e-6:
                found[number] = now_ns
    return found


@pytest.mark.parametrize(
    ("cores", "expected"),
    [(2.0, [100, 150]), (1.0, [150, 200]), (0.5, [350, 400]), (1.5, [117, 167])],
)
def test_two_of_which_one_begins_halfway(cores: float, expected: list[int]) -> None:
    assert ends(cores, [(0, 100), (50, 100)]) == expected


def test_one_of_two_threads_slows_another() -> None:
    # 50 alone, then two of three cores' worth are had until the first has done its 50 left, then both of its own
    assert ends(2.0, [(0, 100), (50, 100)], (1.0, 2.0)) == [125, 175]


@settings(max_examples=examples(100), deadline=None)
@given(
    st.sampled_from([0.3, 0.5, 1.0, 1.5, 2.0, 3.0]),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 100), st.sampled_from([1.0, 2.0])), min_size=1, max_size=8),
)
def test_it_is_as_in_small_steps(cores: float, given: list[tuple[int, int, float]]) -> None:
    work, uses = [(at_ns, work_ns) for at_ns, work_ns, _ in given], [one[2] for one in given]
    for found, expected in zip(ends(cores, work, uses), ends_step_by_step(cores, work, uses), strict=True):
        assert abs(found - expected) <= 2 + 2 * sum(uses) / min(1.0, cores)  # each step of the other one rounds up
