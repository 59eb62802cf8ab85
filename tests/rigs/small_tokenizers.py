"""Tokenizers for tests: small ones that are trained in place, and that of SmolLM2 where its weights are."""

from __future__ import annotations

import functools
import json
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from charonia.generation.text_assets import TextAssets
from charonia.generation.tokenizer import Tokenizer

TEXTS = [
    "The capital of France is Paris. What is the capital of Germany? It is Berlin.",
    'Answer in JSON: {"city": "New York", "population": 8405837, "tags": ["a", "b"], "ok": true, "none": null}',
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Größe, naïve café, Ελληνικά, русский, 日本語, 한국어, العربية, 👩‍👩‍👧 🎉",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GGUF_VARIABLE = "CHARONIA_TEST_GGUF"
"""Names a GGUF file with a byte-level BPE, for tests with a tokenizer of full size."""
_GGUF_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@functools.cache
def byte_level(vocabulary: int = 600) -> Tokenizer:
    """A byte-level BPE as GPT-2's, with ChatML's special tokens."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS * 4, trainer)
    return _made(library.to_str(), ends=(2,))


@functools.cache
def sentencepiece_like() -> Tokenizer:
    """A BPE with byte fallback and "▁" for spaces, as Llama 2's."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, trainers

    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
        limit_alphabet=60,
    )
    library.train_from_iterator([text.replace(" ", "▁") for text in TEXTS[:3]] * 4, trainer)
    description = json.loads(library.to_str())
    # byte tokens belong to the vocabulary, but are no special tokens
    description["added_tokens"] = [each for each in description["added_tokens"] if each["content"] in specials]
    return _made(json.dumps(description), ends=(2,))


def smollm2() -> Tokenizer | None:
    """The tokenizer of the GGUF file that the environment names; None without one."""
    path = os.environ.get(GGUF_VARIABLE, "")
    return _of_gguf(path) if path else None


@functools.cache
def _of_gguf(path: str) -> Tokenizer:
    with Path(path).open("rb") as file:
        values = _metadata(file)
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    digits = {"type": "Digits", "individual_digits": True}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": at, "content": token} | flags for at, token in enumerate(tokens) if kinds[at] == 3],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, bytes_]},
        "post_processor": None,
        "decoder": bytes_,
        "model": {
            "type": "BPE",
            "vocab": {token: at for at, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in values["tokenizer.ggml.merges"]],
        },
    }
    return _made(
        json.dumps(description),
        ends=(values["tokenizer.ggml.eos_token_id"],),
        template=values["tokenizer.chat_template"],
        context=values["llama.context_length"],
    )


def _made(description: str, *, ends: tuple[int, ...], template: str = "", context: int = 512) -> Tokenizer:
    assets = TextAssets(description.encode(), context=context, chat_template=template, end_tokens=ends)
    return Tokenizer.from_bytes(assets.tokenizer_json, assets)


def _metadata(file: BinaryIO) -> dict[str, Any]:
    """The key-value pairs at the begin of a GGUF file."""
    _magic, _version, _tensors, pairs = struct.unpack("<4sIQQ", file.read(24))
    found = {}
    for _ in range(pairs):
        key = _value(file, 8)
        found[key] = _value(file, _number(file, "I"))
    return found


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return file.read(_number(file, "Q")).decode()
    if kind == 9:
        of, length = _number(file, "I"), _number(file, "Q")
        return [_value(file, of) for _ in range(length)]
    return _number(file, _GGUF_NUMBERS[kind])


def _number(file: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]
