"""What can be asked again, and in which order."""

from __future__ import annotations

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.replay.replay_lines import BEHIND_A_GAP, NO_BEGINNING, Recorded, lines_of
from charonia.wire.recorded_calls import RecordedStep

LARGE = "larger than a recording may be"


def single(at: int, unkept: str = "") -> Recorded:
    return Recorded(at.to_bytes(2, "big"), at, 1, unkept=unkept)


def step(at: int, flags: str = "", key: int | str = 7, tenant: str = "", unkept: str = "") -> Recorded:
    sequence = RecordedStep(key, "s" in flags, "e" in flags)
    return Recorded(at.to_bytes(2, "big"), at, 1, tenant, sequence=sequence, unkept=unkept)


@pytest.mark.parametrize(
    ("recorded", "lines", "unreplayable"),
    [
        ([], [], {}),
        ([single(2), single(1)], [[1], [2]], {}),
        ([single(1, LARGE), single(2)], [[2]], {1: LARGE}),
        ([step(1, "s"), step(2), step(3, "e")], [[1, 2, 3]], {}),
        ([step(1, "s", 7), step(2, "s", 8), step(3, "e", 7), step(4, "e", 8)], [[1, 3], [2, 4]], {}),
        ([step(1), step(2, "e"), step(3, "s")], [[3]], {1: NO_BEGINNING, 2: NO_BEGINNING}),
        ([step(1, "s"), step(2, unkept=LARGE), step(3), step(4, "s")], [[1, 4]], {2: LARGE, 3: BEHIND_A_GAP}),
        ([step(1, "s", unkept=LARGE), step(2, "e"), step(3)], [], {1: LARGE, 2: BEHIND_A_GAP, 3: NO_BEGINNING}),
        # a sequence whose client left before its end begins again
        ([step(1, "s"), step(2), step(3, "s"), step(4, "e")], [[1, 2, 3, 4]], {}),
        # two tenants use one id at a time: one after the other, as the candidate sees no tenants
        ([step(1, "s", tenant="a"), step(2, "s", tenant="b"), step(3, "e", tenant="a"), step(4, "e", tenant="b")],
         [[1, 3, 2, 4]], {}),
        ([step(1, "se", "a"), step(2, "se", 1), step(3, "se", "a")], [[1, 3], [2]], {}),
    ],
)  # fmt: skip
def test_lines(recorded: list[Recorded], lines: list[list[int]], unreplayable: dict[int, str]) -> None:
    found = lines_of(recorded)
    assert [[one.at_us for one in line] for line in found.lines] == lines
    assert {one.at_us: reason for one, reason in found.unreplayable} == unreplayable


def test_a_limit_takes_the_first_and_cuts_sequences_at_their_ends() -> None:
    found = lines_of([step(1, "s"), single(2), step(3), single(4), step(5, "e")], limit=3)
    assert [[one.at_us for one in line] for line in found.lines] == [[1, 3], [2]]
    assert found.requests == 3


RECORDED = st.lists(
    st.tuples(st.sampled_from(["", "s", "e", "se", "-"]), st.integers(1, 3), st.sampled_from(["", "t"]), st.booleans()),
    max_size=20,
)


@given(drawn=RECORDED, limit=st.integers(0, 8))
@settings(max_examples=examples(300), deadline=None)
def test_each_request_is_asked_once_or_named_and_sequences_begin_at_their_beginnings(
    drawn: list[tuple[str, int, str, bool]], limit: int
) -> None:
    recorded = [
        single(at, LARGE * large) if flags == "-" else step(at, flags, key, tenant, LARGE * large)
        for at, (flags, key, tenant, large) in enumerate(drawn)
    ]
    found = lines_of(recorded, limit)
    asked = [one for line in found.lines for one in line]
    named = [one for one, _ in found.unreplayable]
    assert len({one.id for one in asked + named}) == len(asked) + len(named)
    if not limit:
        assert len(asked) + len(named) == len(recorded)
    assert len(asked) <= (limit or len(recorded))
    assert not any(one.unkept for one in asked)
    for line in found.lines:
        assert len(line) == 1 or all(one.sequence is not None for one in line)
        assert line[0].sequence is None or line[0].sequence.start
