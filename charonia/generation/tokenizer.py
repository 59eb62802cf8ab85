"""A model's tokens: text to token ids, and the exact bytes of each token.

`detokenizer` makes text of tokens that come one by one. The library is Hugging Face's `tokenizers`. Its `encode` keeps
the GIL for the whole text, its `encode_batch_fast` only while it reads the text and writes the ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from charonia.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from charonia.generation.text_assets import TextAssets

MISSING_EXTRA = "{what} needs the package {package}: install charonia[llm]"
MAX_BAD_WORD_SEQUENCES = 512
MAX_VOCABULARY = 1 << 21
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SHRINKING_NORMALIZERS = 4
"""How many times shorter a normalizer may make a text before the check of its length is wrong."""
_KEEPING_NORMALIZERS = frozenset({"Prepend", "Replace", "ByteLevel"})
"""Normalizers that do not shorten a text (of `Replace`, those of sentencepiece: a space by a longer character)."""


class Tokenizer:
    """Text to ids and back. Threads may share it.

    `vocabulary` counts the ids, which are below it; `end_tokens` end a text; `special_tokens` are those that are no
    text, such as the marks of a chat's turns.
    """

    def __init__(self, library: Any, description: Mapping[str, Any], assets: TextAssets) -> None:
        self._library = library
        pieces, self.special_tokens = _pieces(description)
        self.vocabulary = len(pieces)
        self.assets = assets
        self.end_tokens = frozenset(token for token in assets.end_tokens if 0 <= token < self.vocabulary)
        added = {each["id"] for each in description.get("added_tokens") or ()}
        to_bytes, self._strips_first = _decoder(description.get("decoder"))
        self._bytes: list[bytes] = [
            piece.encode(errors="replace") if token in added else to_bytes(piece) for token, piece in enumerate(pieces)
        ]
        self._longest = max(map(len, self._bytes), default=1) or 1
        if not _normalizers(description.get("normalizer")) <= _KEEPING_NORMALIZERS:
            self._longest *= _SHRINKING_NORMALIZERS
        self._decoder = description.get("decoder")

    @classmethod
    def from_bytes(cls, tokenizer_json: bytes, assets: TextAssets) -> Tokenizer:
        """Returns the tokenizer of a `tokenizer.json`.

        Raises `InvalidArgument` for one that cannot be read, `Unsupported` for a decoder that is not known or if the
        package `tokenizers` is not installed.
        """
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise Unsupported(MISSING_EXTRA.format(what="a tokenizer", package="tokenizers")) from None
        try:
            description = orjson.loads(tokenizer_json)
            library = Library.from_buffer(tokenizer_json)
            library.no_truncation()
            library.no_padding()
        except Exception as error:  # the library raises plain Exceptions
            raise InvalidArgument(f"tokenizer.json cannot be read: {error}") from None
        return cls(library, description, assets)

    def most_characters(self, tokens: int) -> int:
        """Returns how many characters a text of so many tokens has at most."""
        return tokens * self._longest

    def encode(self, text: str, *, special: bool, limit: int | None = None) -> list[int]:
        """Returns the ids of a text; `special` adds what the tokenizer puts around a text, such as a first token.

        Raises `InvalidArgument` for text that is not Unicode, and for one of more than `limit` tokens. A text that is
        far too long is refused without being encoded.
        """
        if limit is not None and len(text) > self.most_characters(limit):
            fewest = -(-len(text) // self._longest)
            raise InvalidArgument(f"the text has more than {fewest - 1} tokens, but at most {limit} are allowed")
        try:
            # one text runs in this thread
            ids: list[int] = self._library.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except (UnicodeEncodeError, TypeError):
            raise InvalidArgument("the text must be Unicode: it has half of a pair of surrogates") from None
        if limit is not None and len(ids) > limit:
            raise InvalidArgument(f"the text has {len(ids)} tokens, but at most {limit} are allowed")
        return ids

    def decode(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes of a text from its beginning. Raises `InvalidArgument` for an id out of the vocabulary."""
        found = b"".join(map(self.token_bytes, ids))
        return found[1:] if self._strips_first and found[:1] == b" " else found

    def token_bytes(self, token: int) -> bytes:
        """Returns what a token adds to a text that already has others: maybe a part of a character."""
        if not 0 <= token < self.vocabulary:
            raise InvalidArgument(
                f"token id {token} is out of the vocabulary: the tokenizer has {self.vocabulary} tokens"
            )
        return self._bytes[token]

    def token_text(self, token: int) -> str:
        """Returns a token as the vocabulary writes it, such as "Ġis" for " is"; "" for an id that it leaves out."""
        return self._library.id_to_token(token) or ""

    def all_bytes(self) -> Sequence[bytes]:
        """Returns the bytes of every token, by id."""
        return self._bytes


def bad_word_sequences(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the sequences of tokens that no text may have, for `bad_words`: at a text's begin and after a space.

    Raises `InvalidArgument` for a word without tokens, and for too many sequences.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), special=False))
        if not plain:
            raise InvalidArgument(f"bad_words must have words of at least one token, got {word[:80]!r}")
        found[plain] = None
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), special=False))
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found[spaced] = None
        if len(found) > MAX_BAD_WORD_SEQUENCES:
            raise InvalidArgument(f"bad_words must have at most {MAX_BAD_WORD_SEQUENCES} sequences of tokens")
    return tuple(found)


def _pieces(description: Mapping[str, Any]) -> tuple[list[str], frozenset[int]]:
    """Every id's piece as the vocabulary writes it ("" for ids that it leaves out), and the ids of special tokens."""
    vocabulary = description["model"]["vocab"]
    if isinstance(vocabulary, list):  # unigram: pieces with their scores
        known = {at: piece for at, (piece, _score) in enumerate(vocabulary)}
    else:
        known = {token: piece for piece, token in vocabulary.items()}
    special = set()
    for added in description.get("added_tokens") or ():
        known[added["id"]] = added["content"]
        if added.get("special"):
            special.add(added["id"])
    size = max(known, default=-1) + 1
    if size > MAX_VOCABULARY:
        raise InvalidArgument(
            f"tokenizer.json has token ids up to {size - 1}, but at most {MAX_VOCABULARY} are allowed"
        )
    return [known.get(token, "") for token in range(size)], frozenset(special)


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return alphabet | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_ALPHABET = _byte_characters()


def _decoder(description: Mapping[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """How a piece becomes bytes, and whether a text loses the space that its first piece begins with."""
    steps: list[Callable[[str | bytes], str | bytes]] = []
    strips_first = False
    for step in _steps(description):
        kind = step.get("type")
        if kind == "ByteLevel":
            steps.append(_of_alphabet)
        elif kind == "ByteFallback":
            steps.append(_of_byte_token)
        elif kind == "Replace":
            pattern, content = step["pattern"], step["content"]
            if "String" not in pattern:
                raise Unsupported("the tokenizer's decoder replaces by a regular expression, which is not supported")
            steps.append(_replacing(pattern["String"], content))
        elif kind == "Metaspace":
            steps.append(_replacing(step.get("replacement", "▁"), " "))
            strips_first = strips_first or step.get("prepend_scheme", "always") != "never"
        elif kind == "WordPiece":
            steps.append(_of_word_piece(step.get("prefix", "##")))
            strips_first = True
        elif kind == "BPEDecoder":
            steps.append(_replacing(step.get("suffix", "</w>"), " "))
        elif kind == "Strip":
            strips_first = strips_first or (step.get("content") == " " and step.get("start", 0) > 0)
        elif kind != "Fuse":
            raise Unsupported(f"the tokenizer's decoder {kind!r} is not supported")
    if not steps:  # pieces are words
        steps, strips_first = [_of_word_piece("")], True

    def to_bytes(piece: str) -> bytes:
        value: str | bytes = piece
        for step in steps:
            value = step(value)
        return value if isinstance(value, bytes) else value.encode(errors="replace")

    return to_bytes, strips_first


def _steps(description: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if description is None:
        return []
    if description.get("type") == "Sequence":
        return [step for each in description["decoders"] for step in _steps(each)]
    return [description]


def _normalizers(description: Mapping[str, Any] | None) -> set[str]:
    if description is None:
        return set()
    if description.get("type") == "Sequence":
        return {kind for each in description["normalizers"] for kind in _normalizers(each)}
    return {str(description.get("type"))}


def _of_alphabet(piece: str | bytes) -> str | bytes:
    if isinstance(piece, bytes):
        return piece
    try:
        return bytes(map(_ALPHABET.__getitem__, piece))
    except KeyError:  # a token that was added as it is
        return piece.encode(errors="replace")


def _of_byte_token(piece: str | bytes) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes([int(match[1], 16)]) if match else piece


def _replacing(old: str, new: str) -> Callable[[str | bytes], str | bytes]:
    return lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece


def _of_word_piece(prefix: str) -> Callable[[str | bytes], str | bytes]:
    def convert(piece: str | bytes) -> str | bytes:
        if isinstance(piece, bytes):
            return piece
        return piece[len(prefix) :] if prefix and piece.startswith(prefix) else " " + piece

    return convert
