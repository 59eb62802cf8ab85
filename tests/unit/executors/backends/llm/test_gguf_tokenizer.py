"""Tokenizers that are made of a GGUF file's metadata."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from charonia.errors import InvalidArgument, Unsupported
from executors.backends.llm.gguf_tokenizer import hugging_face_files

BYTE_LEVEL: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<end>", "a", "b", "c", "ab", "\u0120", "1", "2", "12"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b", "1 2"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}
PIECES: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x41>", "\u2581", "a", "b", "ab", "\u2581ab"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -3.0, -4.0, -5.0, -1.0, -2.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def made(metadata: dict[str, Any]) -> Any:
    return tokenizers.Tokenizer.from_buffer(hugging_face_files(metadata)["tokenizer.json"])


def test_byte_level() -> None:
    tokenizer = made(BYTE_LEVEL)
    assert tokenizer.encode("ab 12<end>c").ids == [4, 5, 6, 7, 0, 3]  # digits stand alone
    assert made(BYTE_LEVEL | {"tokenizer.ggml.pre": "gpt-2"}).encode("12").ids == [8]


@pytest.mark.parametrize("split", ["llama-bpe", "qwen2", "default"])
def test_other_ways_to_split(split: str) -> None:
    tokenizer = made(BYTE_LEVEL | {"tokenizer.ggml.pre": split, "tokenizer.ggml.add_bos_token": False})
    assert tokenizer.encode("ab c").ids == [4, 5, 3]


def test_sentencepiece() -> None:
    tokenizer = made(PIECES)
    assert tokenizer.encode("ab abA").ids == [1, 8, 8, 3]  # the first token, and a byte that is no piece
    assert tokenizer.decode([8, 8, 3]) == "ab abA"
    assert made(PIECES | {"tokenizer.ggml.add_bos_token": False}).encode("b").ids == [4, 6]


def test_files_beside_the_tokenizer() -> None:
    files = {name: json.loads(content) for name, content in hugging_face_files(BYTE_LEVEL).items()}
    assert files["config.json"] == {"model_type": "llama", "max_position_embeddings": 64, "eos_token_id": [0]}
    assert files["tokenizer_config.json"] == {"eos_token": "<end>", "chat_template": "{{ messages }}"}


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"tokenizer.ggml.model": "bert"}, Unsupported, "of the kind 'bert'"),
        ({"tokenizer.ggml.pre": "other"}, Unsupported, "splits text as 'other', known are"),
        ({"tokenizer.ggml.tokens": []}, InvalidArgument, "no 'tokenizer.ggml.tokens'"),
        ({"tokenizer.ggml.merges": None}, InvalidArgument, "no 'tokenizer.ggml.merges'"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        hugging_face_files(BYTE_LEVEL | changes)


def test_scores_for_every_piece() -> None:
    with pytest.raises(InvalidArgument, match="not as many scores as tokens"):
        hugging_face_files(PIECES | {"tokenizer.ggml.scores": [0.0]})
