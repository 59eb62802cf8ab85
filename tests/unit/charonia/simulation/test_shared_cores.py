"""Executions that share cores: none is done before its work is, and no more work is done than there are cores."""

from __future__ import annotations

import heapq

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.simulation.shared_cores import SharedCores


def ends(cores: float, work: list[tuple[int, int]]) -> dict[str, int]:
    """When each of `work` (begins at, takes) ends."""
    shared = SharedCores(cores)
    found: dict[str, int] = {}
    coming = [(at, number, f"{number}", takes) for number, (at, takes) in enumerate(work)]
    heapq.heapify(coming)
    while True:
        due = min(((at, name) for name, at in shared.ends_ns()), default=None)
        if due is not None and (not coming or due[0] <= coming[0][0]):
            found[due[1]] = due[0]
            shared.end(due[1], due[0])
        elif coming:
            at, _, name, takes = heapq.heappop(coming)
            shared.begin(name, takes, at)
        else:
            break
    return found


@pytest.mark.parametrize(
    ("cores", "expected"),
    [(0.0, (100, 150)), (2.0, (100, 150)), (1.0, (150, 200)), (0.5, (350, 400)), (1.5, (117, 167))],
)
def test_two_of_which_one_begins_halfway(cores: float, expected: tuple[int, int]) -> None:
    assert tuple(ends(cores, [(0, 100), (50, 100)]).values()) == expected


@settings(max_examples=examples(100), deadline=None)
@given(
    st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 1000)), min_size=1, max_size=12),
)
def test_work_is_conserved(cores: float, work: list[tuple[int, int]]) -> None:
    found = ends(cores, work)
    assert len(found) == len(work)
    for number, (at, takes) in enumerate(work):
        assert found[str(number)] >= at + takes - len(work)  # each step rounds
    first, last = min(at for at, _ in work), max(found.values())
    assert sum(takes for _, takes in work) <= (last - first) * max(1.0, cores) + len(work) * cores
    # more cores are never slower
    more = ends(cores + 1, work)
    assert all(more[name] <= found[name] + len(work) for name in found)
