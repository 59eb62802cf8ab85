"""How a stream goes on after what is in the log: the same text in any pieces, and no other."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.errors import StreamInterrupted
from executors.backends.vllm.stream_records import Recorded, continues_after_tokens, pack_record, read_record
from executors.backends.vllm.text_responses import NOT_FINISHED, Gained

TOKENS = list(range(40, 60))
PIECES = [f"<{token}>" if token % 3 else "" for token in TOKENS]
"""The text that each token adds: a third adds none, as half a character does."""


def pieces(*cuts: int, finish: bool = True) -> list[Gained]:
    """The text, given in pieces that end before these tokens and at its end."""
    ends = [0, *sorted({cut for cut in cuts if 0 < cut < len(TOKENS)}), len(TOKENS)]
    found = []
    for begin, end in itertools.pairwise(ends):
        logprobs = [{str(token): {"rank": 1}} for token in TOKENS[begin:end]]
        reason = "length" if finish and end == len(TOKENS) else NOT_FINISHED
        found.append(Gained("".join(PIECES[begin:end]), TOKENS[begin:end], float(end), logprobs, reason))
    return found


def test_a_record_has_all_of_a_response() -> None:
    gained = [Gained("a", [1, 2], -0.5, [{"1": {"rank": 1}}, {"2": {"rank": 3}}]), Gained(), Gained("\ud83d", [3])]
    assert read_record(pack_record(gained, 7)) == (
        [gained[0], Gained("", [], None, None, NOT_FINISHED), gained[2]],
        7,
    )


@given(st.lists(st.integers(1, 19)), st.lists(st.integers(1, 19)), st.integers(1, 19))
def test_a_run_in_other_pieces_goes_on_where_the_first_ended(first: list[int], second: list[int], lost: int) -> None:
    kept = pieces(*first, finish=False)[:lost]
    recorded = Recorded([pack_record([one], 5) for one in kept])
    assert recorded.input_tokens == 5
    rest = [found for one in pieces(*second) if (found := recorded.rest(0, one)) is not None]
    everything = [*kept, *rest]
    assert "".join(one.text for one in everything) == "".join(PIECES)
    assert [token for one in everything for token in one.tokens] == TOKENS
    assert [len(one.logprobs or ()) for one in rest] == [len(one.tokens) for one in rest]
    assert [one.finish for one in rest][-1:] == ["length"]


def test_another_token_ends_the_stream() -> None:
    recorded = Recorded([pack_record([Gained("ab", [1, 2])], 3)])
    assert recorded.rest(0, Gained("a", [1])) is None
    with pytest.raises(StreamInterrupted, match=r"^STREAM_INTERRUPTED: its engine was lost, and the next run does not"):
        recorded.rest(0, Gained("c", [3]))


def test_another_text_ends_the_stream() -> None:
    recorded = Recorded([pack_record([Gained("ab", [1, 2])], 3)])
    with pytest.raises(StreamInterrupted):
        recorded.rest(0, Gained("xyz", [1, 2, 3]))


def test_an_earlier_end_ends_the_stream() -> None:
    recorded = Recorded([pack_record([Gained("ab", [1, 2])], 3)])
    with pytest.raises(StreamInterrupted):
        recorded.rest(0, Gained("a", [1], finish="stop"))


def test_an_end_without_a_new_token_is_given() -> None:
    recorded = Recorded([pack_record([Gained("ab", [1, 2])], 3)])
    assert recorded.rest(0, Gained("ab!", [1, 2], finish="stop")) == Gained("!", [], finish="stop")


def test_texts_of_one_request_are_apart() -> None:
    recorded = Recorded([pack_record([Gained("a", [1]), Gained("b", [2], finish="stop")], 3)])
    assert recorded.rest(1, Gained("b", [2], finish="stop")) is None, "its end is recorded"
    assert recorded.rest(0, Gained("a", [1])) is None
    assert recorded.rest(0, Gained("c", [3])) == Gained("c", [3])


USUAL: dict[str, Any] = {
    "n": 1,
    "temperature": 1.0,
    "seed": None,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "stop": [],
    "bad_words": [],
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "structured_outputs": None,
    "repetition_penalty": 1.2,
}


@pytest.mark.parametrize(
    ("changed", "continues"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "seed": 3}, True),
        ({"max_tokens": None}, True),
        ({"seed": 3}, False),
        ({"stop": ["x"]}, False),
        ({"n": 2}, False),
        ({"logprobs": 1}, False),
        ({"structured_outputs": object()}, False),
        ({"presence_penalty": 0.5}, False),
        ({"min_tokens": 4}, False),
        ({"max_tokens": 2}, False),
    ],
)
def test_when_the_prompt_may_be_continued(changed: dict[str, Any], continues: bool) -> None:
    recorded = Recorded([pack_record([Gained("ab", [1, 2])], 3)])
    assert continues_after_tokens(SimpleNamespace(**{**USUAL, **changed}), recorded) is continues


def test_nothing_is_continued_after_nothing() -> None:
    assert not continues_after_tokens(SimpleNamespace(**USUAL), Recorded([pack_record([Gained()], 3)]))
