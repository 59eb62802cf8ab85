"""However tokens cut a text, the detokenizer gives the same text, and replayed tokens give it again."""

from __future__ import annotations

import pytest
import small_tokenizers
from hypothesis import given
from hypothesis import strategies as st

from charonia.generation.detokenizer import Detokenizer
from charonia.generation.parameters import SamplingParameters
from charonia.generation.tokenizer import Tokenizer

TOKENIZERS = [small_tokenizers.byte_level, small_tokenizers.sentencepiece_like]
texts = st.text(st.sampled_from("ab €日👩 <.\n"), max_size=40)
stops = st.lists(st.text(st.sampled_from("ab €日"), min_size=1, max_size=5), max_size=3).map(tuple)


def expected(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str]:
    """The definition: cut behind the first character at which a stop string ends, or before the longest of those."""
    for end in range(1, len(text) + 1):
        ended = [each for each in stop if text[:end].endswith(each)]
        if ended:
            return (text[:end] if include else text[: end - max(map(len, ended))]), "stop"
    return text, ""


def run(tokenizer: Tokenizer, tokens: list[int], parameters: SamplingParameters) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer, parameters)
    found = [detokenizer.push(token) for token in tokens]
    return [*found, detokenizer.flush()], detokenizer.finished


@pytest.mark.parametrize("make", TOKENIZERS)
@given(texts, stops, st.booleans())
def test_stop_strings_at_any_boundary(make: object, text: str, stop: tuple[str, ...], include: bool) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    tokens = tokenizer.encode(text, special=False)
    whole = b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
    parameters = SamplingParameters(seed=0, stop=stop, include_stop_str_in_output=include)
    found, finished = run(tokenizer, tokens, parameters)
    assert ("".join(found), finished) == expected(whole, stop, include)
    assert run(tokenizer, tokens, parameters) == (found, finished)


@pytest.mark.parametrize("make", TOKENIZERS)
@given(st.lists(st.integers(3, 400), max_size=30), st.integers(0, 30))
def test_any_tokens_at_all(make: object, tokens: list[int], cut: int) -> None:
    """Random tokens are full of broken characters; those of an earlier attempt are replayed, then others come."""
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    parameters = SamplingParameters(seed=0)
    found, _ = run(tokenizer, tokens, parameters)
    assert "".join(found) == b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
    resumed = Detokenizer(tokenizer, parameters)
    assert [resumed.push(token) for token in tokens[:cut]] == found[:-1][:cut]
    assert [resumed.push(token) for token in tokens[cut:]] == found[:-1][cut:]


@given(texts)
def test_whole_texts_come_back(text: str) -> None:
    for make in TOKENIZERS:
        tokenizer = make()
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text.encode()
