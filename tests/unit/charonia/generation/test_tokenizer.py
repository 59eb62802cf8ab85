"""The exact bytes of tokens, compared with what the library makes of whole texts."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import pytest
import small_tokenizers
from tokenizers import Tokenizer as Library

from charonia.errors import InvalidArgument, Unsupported
from charonia.generation.text_assets import TextAssets
from charonia.generation.tokenizer import Tokenizer, bad_word_sequences

ALL = [*small_tokenizers.TEXTS, " ", "", "a", "  two  spaces ", "\x00\x01", "💩", "line\r\nline\t"]


@pytest.mark.parametrize("make", [small_tokenizers.byte_level, small_tokenizers.sentencepiece_like])
@pytest.mark.parametrize("text", ALL)
def test_a_text_comes_back(make: object, text: str) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.decode(ids) == text.encode()
    assert b"".join(map(tokenizer.token_bytes, ids)).lstrip(b" ") == text.encode().lstrip(b" ")


@pytest.mark.parametrize("make", [small_tokenizers.byte_level, small_tokenizers.sentencepiece_like])
@pytest.mark.parametrize("special", [False, True])
def test_ids_are_those_of_the_library(make: Any, special: bool) -> None:
    """Which has several ways to encode; the post-processor adds a first token."""
    tokenizer: Tokenizer = make()
    description = json.loads(tokenizer.assets.tokenizer_json)
    first = {"SpecialToken": {"id": "first", "type_id": 0}}
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"first": {"id": "first", "ids": [1], "tokens": ["first"]}},
    }
    blob = json.dumps(description).encode()
    library, ours = Library.from_buffer(blob), Tokenizer.from_bytes(blob, TextAssets(blob, context=512))
    for text in (*ALL, "<|im_start|>user\n<s> a</s><|im_end|>", "".join(ALL) * 50):
        ids = ours.encode(text, special=special)
        assert ids == library.encode(text, add_special_tokens=special).ids
        assert (ids[:1] == [1]) >= special


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = small_tokenizers.byte_level()
    texts = ["".join(small_tokenizers.TEXTS) * times for times in (2_000, 10_000, 50_000)]
    done = threading.Event()
    wakes = 0

    def encode(text: str) -> None:
        tokenizer.encode(text, special=False)
        done.set()

    def wake() -> None:
        nonlocal wakes
        # at real-time priority a thread leaves its processor to no other of that priority; those it starts inherit this
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        for text in texts:  # a longer one where the machine is so quick that few wakes fit in
            done.clear()
            encoding = threading.Thread(target=encode, args=(text,))
            encoding.start()
            wakes = 0
            while not done.wait(0.001):
                wakes += 1
            encoding.join()
            if wakes > 20:
                break

    waking = threading.Thread(target=wake)
    waking.start()
    waking.join()
    assert wakes > 20, "hundreds, and a few where the library keeps the GIL"


def test_byte_tokens_are_single_bytes() -> None:
    tokenizer = small_tokenizers.sentencepiece_like()
    (byte,) = [token for token in range(tokenizer.vocabulary) if tokenizer.token_text(token) == "<0xE2>"]
    assert tokenizer.token_bytes(byte) == b"\xe2"
    level = small_tokenizers.byte_level()
    assert {level.token_bytes(token) for token in range(3, 259)} == {bytes([byte]) for byte in range(256)}


def test_special_tokens_are_known_and_parsed() -> None:
    tokenizer = small_tokenizers.byte_level()
    assert tokenizer.encode("<|im_start|>a<|im_end|>", special=True)[::2] == [1, 2]
    assert tokenizer.special_tokens == {0, 1, 2}
    assert tokenizer.end_tokens == {2}
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert [tokenizer.token_text(token) for token in tokenizer.encode("<|im_start|> é", special=False)] == [
        *("<|im_start|>", "Ġ", "Ã", "©"),
    ]


@pytest.mark.parametrize("token", [-1, 464, 10**9])
def test_ids_out_of_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(
        InvalidArgument, match=f"token id {token} is out of the vocabulary: the tokenizer has 464 tokens"
    ):
        small_tokenizers.byte_level().decode([token])


def test_a_text_that_is_far_too_long_is_refused_without_being_encoded() -> None:
    begin = time.process_time()
    with pytest.raises(InvalidArgument, match=r"more than .* tokens, but at most 512 are allowed"):
        small_tokenizers.byte_level().encode("word " * 2_000_000, special=False, limit=512)
    assert time.process_time() - begin < 0.5
    with pytest.raises(InvalidArgument, match="has 7 tokens, but at most 5"):
        small_tokenizers.byte_level().encode("0123456", special=False, limit=5)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="must be Unicode"):
        small_tokenizers.byte_level().encode("\ud800", special=False)


@pytest.mark.parametrize(
    "wrong", [b"", b"{", b"{}", b"[]", b'{"model": {"type": "BPE", "vocab": {}, "merges": 4}}', b"[" * 100_000]
)
def test_a_broken_tokenizer_is_refused(wrong: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"tokenizer.json cannot be read"):
        Tokenizer.from_bytes(wrong, TextAssets(wrong, context=1))


def described(decoder: object, normalizer: object = None) -> Tokenizer:
    vocabulary = {"un": 0, "##able": 1, "do</w>": 2, "▁x": 3, "a": 4}
    description = {
        "added_tokens": [],
        "normalizer": normalizer,
        "decoder": decoder,
        "model": {"type": "WordPiece", "unk_token": "un", "continuing_subword_prefix": "##"}
        | {"max_input_chars_per_word": 100, "vocab": vocabulary},
    }
    blob = json.dumps(description).encode()
    return Tokenizer.from_bytes(blob, TextAssets(blob, context=1))


def test_other_decoders() -> None:
    assert described({"type": "WordPiece", "prefix": "##", "cleanup": True}).decode([0, 1, 4]) == b"unable a"
    assert described({"type": "BPEDecoder", "suffix": "</w>"}).decode([2, 4]) == b"do a"
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    assert described(metaspace).decode([3, 3]) == b"x x"
    assert described(metaspace | {"prepend_scheme": "never"}).decode([3, 3]) == b" x x"
    assert described(None).decode([0, 4]) == b"un a"
    with pytest.raises(Unsupported, match="'CTC' is not supported"):
        described({"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": True})


def test_bad_words_become_sequences_with_and_without_a_space() -> None:
    tokenizer = small_tokenizers.byte_level()
    found = bad_word_sequences(tokenizer, ["capital", " capital"])
    texts = [b"".join(map(tokenizer.token_bytes, sequence)) for sequence in found]
    assert texts[0] == b"capital"
    assert set(texts) <= {b"capital", b" capital"}
    with pytest.raises(InvalidArgument, match="at least one token, got '  '"):
        bad_word_sequences(tokenizer, ["  "])


def test_the_tokenizer_of_smollm2() -> None:
    tokenizer = small_tokenizers.smollm2()
    if tokenizer is None:
        pytest.skip(f"{small_tokenizers.GGUF_VARIABLE} names no file")
    assert tokenizer.vocabulary == 49152
    for text in ALL:
        assert tokenizer.decode(tokenizer.encode(text, special=True)) == text.encode()
