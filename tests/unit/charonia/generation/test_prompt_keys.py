"""Names of the beginnings of prompts."""

from __future__ import annotations

import numpy as np

from charonia.generation.prompt_keys import (
    BLOCK_TOKENS,
    KEY_BYTES,
    POSITIONS,
    PromptRoute,
    blocks_of,
    route_of_packed,
    route_of_text,
    route_of_tokens,
)


def test_prompts_share_the_names_of_what_they_share() -> None:
    tokens = np.arange(2000)
    other = tokens.copy()
    other[1000] = -1
    first, second = route_of_tokens(tokens).names(), route_of_tokens(other).names()
    shared = [one for one, same in zip(first, second, strict=True) if one == same]
    assert shared == first[: len(shared)]
    assert blocks_of(len(shared)) * BLOCK_TOKENS <= 1000 < blocks_of(len(shared) + 1) * BLOCK_TOKENS
    assert not set(first) & set(route_of_tokens(tokens, "french").names())


def test_few_names_are_enough_for_long_prompts() -> None:
    assert [len(route_of_tokens([1] * count).names()) for count in (0, 31, 32, 64, 1024, 1279)] == [0, 0, 1, 2, 32, 32]
    assert len(route_of_tokens([1] * 500_000).keys) == KEY_BYTES * len(POSITIONS) <= 1024
    assert blocks_of(0) == 0


def test_tokens_are_named_alike_from_a_tensor_and_texts_otherwise() -> None:
    tokens = list(range(100))
    packed = np.asarray(tokens, "<i4").tobytes()
    assert route_of_packed(memoryview(packed)) == route_of_tokens(tokens)
    assert not set(route_of_text(packed).names()) & set(route_of_tokens(tokens).names())
    assert route_of_text(b"a" * 400).tokens == 101


def test_what_is_no_route_is_none() -> None:
    route = route_of_tokens(range(64), max_tokens=2**40)
    assert PromptRoute.unpack(route.pack()) == PromptRoute(64, 2**32 - 1, route.keys)
    for packed in (b"", b"1234567", bytes(12), bytes(8 + 8 * len(POSITIONS) + 8)):
        assert PromptRoute.unpack(packed) is None
