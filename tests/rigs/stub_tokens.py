"""A tokenizer without a library: the letters from token 3 on; 0 ends a text, 1 and 2 are special."""

from __future__ import annotations

from charonia.errors import InvalidArgument

ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,:é€"
FIRST = 3


class StubTokenizer:
    """As `charonia.generation.tokenizer.Tokenizer`, as far as engines and their instances use it."""

    def __init__(self) -> None:
        self.end_tokens = frozenset({0})
        self.special_tokens = frozenset({0, 1, 2})
        self.vocabulary = FIRST + len(ALPHABET)

    def encode(self, text: str, *, special: bool, limit: int | None = None) -> list[int]:
        if limit is not None and len(text) > limit:
            raise InvalidArgument(f"the text has more than {limit} tokens")
        return [FIRST + ALPHABET.index(letter) for letter in text]

    def decode(self, ids: list[int]) -> bytes:
        return b"".join(self.token_bytes(token) for token in ids)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token < FIRST else ALPHABET[token - FIRST].encode()
