"""Whatever is lost, repeated and run again: a reader sees one run's responses, each once, in order, or an end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from charonia.calls.waiters import Visible
from charonia.errors import StreamInterrupted

Place = tuple[int, int]


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[int]]:
    """(number of responses of a whole run, how many each attempt gave before it was lost; the last one gave all)."""
    total = draw(st.integers(1, 6))
    lost = draw(st.lists(st.integers(0, total - 1), max_size=3))
    return total, [*lost, total]


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, list[tuple[Place, bool]]]:
    """Responses as they may arrive: a lost run's stragglers come late, any of them may come again."""
    total, given = draw(runs())
    sent: list[tuple[Place, bool]] = []
    for attempt, count in enumerate(given, start=1):
        for index in range(count):
            place = ((attempt, index), index == total - 1)
            sent.append(place)
            while draw(st.booleans()):
                sent.append(draw(st.sampled_from(sent)))
    return total, sent


@given(arrivals(), st.booleans())
def test_a_reader_never_sees_two_runs(case: tuple[int, list[tuple[Place, bool]]], repeatable: bool) -> None:
    total, sent = case
    visible = Visible(repeatable=repeatable)
    seen: list[Place] = []
    interrupted = False
    for place, final in sent:
        try:
            if visible.admits(place, final=final):
                seen.append(place)
        except StreamInterrupted:
            interrupted = True
            break
    assert [index for _, index in seen] == list(range(len(seen)))
    if not repeatable:
        assert len({attempt for attempt, _ in seen}) <= 1
    assert interrupted == (not repeatable and len(seen) < total)
    assert visible.count == len(seen)


@given(st.integers(1, 5), st.integers(0, 5), st.integers(2, 5))
def test_a_gap_is_an_end(attempt: int, seen: int, beyond: int) -> None:
    visible = Visible(repeatable=True)
    for index in range(seen):
        assert visible.admits((attempt, index), final=False)
    try:
        visible.admits((attempt, seen + beyond - 1), final=False)
    except StreamInterrupted as error:
        assert error.message.startswith("STREAM_INTERRUPTED: ")
    else:
        raise AssertionError("the gap was not noticed")
    assert visible.count == seen


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_a_reader_that_comes_back_goes_on_where_it_was(attempt: int, total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, total))
    visible = Visible(repeatable=False, attempt=attempt, count=count)
    seen = [i for i in range(total) if visible.admits((attempt, i), final=i == total - 1)] if count == 0 else []
    if count:
        seen = [i for i in range(count, total) if visible.admits((attempt, i), final=i == total - 1)]
    assert seen == list(range(count, total))


@given(st.integers(2, 6), st.data())
def test_a_run_that_ends_before_what_is_visible_is_no_repetition(visible_count: int, data: st.DataObject) -> None:
    visible = Visible(repeatable=True)
    for index in range(visible_count):
        visible.admits((1, index), final=False)
    end = data.draw(st.integers(0, visible_count - 1))
    for index in range(end):
        assert not visible.admits((2, index), final=False)
    try:
        visible.admits((2, end), final=True)
    except StreamInterrupted:
        return
    raise AssertionError("a shorter run went on for a longer one")
