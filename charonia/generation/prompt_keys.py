"""Names the beginnings of a prompt, so that requests which share one can be sent where it has been computed. Pure.

A name is a hash of the tokens, or of the text where no front has tokenised it, up to a multiple of `BLOCK_TOKENS`
tokens. The names are not those of an engine's blocks (`block_hashes`), whose size and salt only the engine knows.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCK_TOKENS = 32
_BLOCK_BYTES = 4 * BLOCK_TOKENS
"""Of tokens as INT32. English text of as many bytes has about as many tokens, which is all that is needed here."""

POSITIONS = (*range(1, 33), *range(40, 257, 8), *range(320, 4609, 64))
"""After how many blocks a beginning has a name: few are enough for long prompts. The last is at 147,456 tokens."""

KEY_BYTES = 8
_NUMBERS = struct.Struct("<II")
_MOST = 2**32 - 1
_TEXT_ROOT, _TOKENS_ROOT = b"text", b"tokens"


@dataclass(frozen=True, slots=True)
class PromptRoute:
    """What placement knows of a prompt. `max_tokens` of the answer: 0 if that is not known.

    `keys` are the names of the prompt's beginnings, of `KEY_BYTES` each, the shortest first.
    """

    tokens: int
    max_tokens: int = 0
    keys: bytes = b""

    def pack(self) -> bytes:
        """The wire form."""
        return _NUMBERS.pack(min(self.tokens, _MOST), min(self.max_tokens, _MOST)) + self.keys

    @staticmethod
    def unpack(packed: bytes) -> PromptRoute | None:
        """None for bytes that are none."""
        keys = packed[_NUMBERS.size :]
        if len(packed) < _NUMBERS.size or len(keys) % KEY_BYTES or len(keys) > KEY_BYTES * len(POSITIONS):
            return None
        tokens, max_tokens = _NUMBERS.unpack_from(packed)
        return PromptRoute(tokens, max_tokens, keys)

    def names(self) -> list[bytes]:
        """The keys one by one."""
        keys = self.keys
        return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def blocks_of(names: int) -> int:
    """How many blocks the longest of the first so many names stands for."""
    return POSITIONS[names - 1] if names else 0


def route_of_tokens(tokens: Sequence[int], adapter: str = "", max_tokens: int = 0) -> PromptRoute:
    """The route of a prompt that was tokenised. With another adapter it is another prompt."""
    data = np.asarray(tokens, "<i4").tobytes()
    return PromptRoute(len(tokens), max_tokens, _names(data, _TOKENS_ROOT + adapter.encode()))


def route_of_packed(data: bytes | memoryview) -> PromptRoute:
    """The route of the bytes of an INT32 tensor of tokens."""
    return PromptRoute(len(data) // 4, 0, _names(data, _TOKENS_ROOT))


def route_of_text(data: bytes | memoryview) -> PromptRoute:
    """The route of a prompt as UTF-8; its number of tokens is estimated."""
    return PromptRoute(len(data) // 4 + 1, 0, _names(data, _TEXT_ROOT))


def _names(data: bytes | memoryview, root: bytes) -> bytes:
    view, size = memoryview(data), len(data)
    hasher = hashlib.blake2b(root, digest_size=KEY_BYTES)
    names: list[bytes] = []
    begin = 0
    for blocks in POSITIONS:
        end = blocks * _BLOCK_BYTES
        if end > size:
            break
        hasher.update(view[begin:end])
        names.append(hasher.copy().digest())
        begin = end
    return b"".join(names)
