"""Inputs made of other inputs, by chance from a seed: what a campaign does where no coverage guides it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

MAX_BYTES = 8192

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_TEXTS = (
    b"-1",
    b"0",
    b"9" * 19,
    b"9" * 400,
    b"1e999",
    b"NaN",
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"../",
    b"%2f",
    b"[" * 99,
)


def mutations(corpus: Sequence[bytes], words: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Endlessly: each is an input of the corpus with one to six changes. The same seed gives the same ones."""
    chance = Random(seed)
    while True:
        data = bytearray(chance.choice(corpus))
        for _ in range(chance.randint(1, 6)):
            _change(data, corpus, words, chance)
        yield bytes(data[:MAX_BYTES])


def _change(data: bytearray, corpus: Sequence[bytes], words: Sequence[bytes], chance: Random) -> None:
    at = chance.randint(0, len(data))
    end = min(len(data), at + chance.choice((1, 1, 2, 4, 8, 32, 256)))
    match chance.randrange(9):
        case 0 if at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        case 1 if at < len(data):
            data[at] = chance.randrange(256)
        case 2:
            del data[at:end]
        case 3:
            data[at:at] = data[at:end] * chance.choice((1, 2, 40))
        case 4:
            width = chance.choice((1, 2, 4, 8))
            number = chance.choice(_NUMBERS) & (1 << 8 * width) - 1
            data[at : at + width] = number.to_bytes(width, chance.choice(("little", "big")))
        case 5:
            data[at:at] = chance.choice(words or _TEXTS)
        case 6:
            data[at : at + chance.choice((0, 1, 4))] = chance.choice(_TEXTS)
        case 7:
            other = chance.choice(corpus)
            data[at:] = other[chance.randint(0, len(other)) :]
        case _:
            other = chance.choice(corpus)
            begin = chance.randint(0, len(other))
            data[at:at] = other[begin : begin + 64]
