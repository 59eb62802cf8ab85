"""Text of tokens one by one: whole characters, stop strings at any boundary, end tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from charonia.generation.detokenizer import Detokenizer
from charonia.generation.parameters import SamplingParameters


class Pieces:
    """Token `i` has the bytes of `pieces[i]`; 100 ends a text, 101 is special."""

    end_tokens = frozenset({100})
    special_tokens = frozenset({100, 101})

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return {100: b"<end>", 101: b"<mark>"}.get(token) or self._pieces[token]


def told(pieces: Sequence[bytes | int], **parameters: object) -> tuple[list[str], str]:
    """The text after each token and of the flush, and `finished`. A number is a token without a piece."""
    texts = [piece for piece in pieces if isinstance(piece, bytes)]
    tokenizer = Pieces(texts)
    detokenizer = Detokenizer(tokenizer, SamplingParameters(seed=0, **parameters))  # type: ignore[arg-type]
    found = [detokenizer.push(piece if isinstance(piece, int) else texts.index(piece)) for piece in pieces]
    return [*found, detokenizer.flush()], detokenizer.finished


def test_text_comes_at_once() -> None:
    assert told([b"a", b" b", b"c"]) == (["a", " b", "c", ""], "")


def test_a_character_comes_when_it_is_whole() -> None:
    euro = "€".encode()
    assert told([b"x" + euro[:1], euro[1:2], euro[2:] + b"y"]) == (["x", "", "€y", ""], "")


def test_malformed_bytes_become_replacement_characters() -> None:
    assert told([b"a\xff", b"\xe2\x82", b"b\xe2"]) == (["a�", "", "�b", "�"], "")


def test_a_stop_string_over_three_tokens_is_taken_back() -> None:
    assert told([b"one S", b"TO", b"P two"], stop=("STOP",)) == (["one ", "", "", ""], "stop")
    assert told([b"one S", b"TO", b"P two"], stop=("STOP",), include_stop_str_in_output=True)[0] == [
        "one ",
        "",
        "STOP",
        "",
    ]


def test_held_text_comes_when_it_is_no_stop_string() -> None:
    assert told([b"one S", b"TO", b"RE"], stop=("STOP",)) == (["one ", "", "STORE", ""], "")
    assert told([b"one S", b"TO"], stop=("STOP",)) == (["one ", "", "STO"], "")


def test_a_stop_string_that_overlaps_itself() -> None:
    assert told([b"a", b"a", b"a", b"b"], stop=("aab",)) == (["", "", "a", "", ""], "stop")


def test_the_first_stop_string_to_end_counts_then_the_longest() -> None:
    assert told([b"abcd"], stop=("bcd", "c"))[0] == ["ab", ""]
    assert told([b"abcd"], stop=("c", "bc"))[0] == ["a", ""]


def test_a_stop_string_inside_a_character_border() -> None:
    data = "日本".encode()
    assert told([b"x" + data[:4], data[4:]], stop=("日本",)) == (["x", "", ""], "stop")


def test_an_end_token_ends_and_is_no_text() -> None:
    assert told([b"a", 100, b"b"]) == (["a", "", "", ""], "stop")
    assert told([b"a", 100], skip_special_tokens=False) == (["a", "", ""], "stop")
    assert told([b"a", 100], skip_special_tokens=False, include_stop_str_in_output=True)[0] == ["a", "<end>", ""]
    assert told([b"a", 100, b"b"], ignore_eos=True) == (["a", "", "b", ""], "")
    assert told([b"a S", 100], stop=("STOP",)) == (["a ", "S", ""], "stop")
    assert told([b"a\xe2", 100])[0] == ["a", "�", ""]


def test_tokens_of_the_request_end_it() -> None:
    assert told([b"a", b"b", b"c"], stop_token_ids=(1,)) == (["a", "", "", ""], "stop")
    assert told([b"a", b"b"], stop_token_ids=(1,), include_stop_str_in_output=True) == (["a", "b", ""], "stop")


def test_special_tokens_are_skipped_or_shown() -> None:
    assert told([b"a", 101, b"b"])[0] == ["a", "", "b", ""]
    assert told([b"a", 101, b"b"], skip_special_tokens=False)[0] == ["a", "<mark>", "b", ""]


def test_nothing_ends_in_the_first_min_tokens() -> None:
    pieces = [b"a.", b"b.", b"c.", b"d."]
    assert told(pieces, stop=(".",), min_tokens=2) == (["a.", "b.", "c", "", ""], "stop")
    assert told([b"x", b"S", b"TOP"], stop=("STOP",), min_tokens=2)[1] == "stop"
    assert told([100, b"a", 100], min_tokens=1, ignore_eos=False)[1] == "stop"


@pytest.mark.parametrize("last", ["first", "last"])
def test_hostile_stop_strings_cost_little(last: str) -> None:
    stops = ["a" * at + "b" * (1024 - at) for at in range(960, 1024)]
    stops = stops if last == "last" else stops[::-1]
    detokenizer = Detokenizer(Pieces([b"aaaa"]), SamplingParameters(seed=0, stop=tuple(stops)))
    begin = time.process_time()
    for _ in range(1000):
        detokenizer.push(0)
    assert (time.process_time() - begin) / 1000 < 0.002
    assert len(detokenizer.flush()) == 1023
