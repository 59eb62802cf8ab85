"""The files that a model directory in Hugging Face's form has, made from the metadata of a GGUF file.

Two families of tokenizers are known: byte-level BPE ("gpt2": those of SmolLM, Llama 3, Qwen 2) and the BPE of
sentencepiece ("llama": those of Llama 2, TinyLlama, Mistral).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from charonia.errors import InvalidArgument, Unsupported

_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA_3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace("{1,3}", "")
_PLAIN = frozenset(("default", "gpt-2", ""))
_BY_DIGIT = frozenset(("smollm", "starcoder", "refact", "command-r", "codeshell"))
_BY_PATTERN = {"llama-bpe": _LLAMA_3, "llama-v3": _LLAMA_3, "llama3": _LLAMA_3, "qwen2": _QWEN_2}
_SPACE = "\u2581"


def hugging_face_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """`tokenizer.json`, `tokenizer_config.json` and `config.json`.

    Raises `Unsupported` for a family or a way of splitting that is not known, `InvalidArgument` for missing keys.
    """
    tokens = _list(metadata, "tokenizer.ggml.tokens")
    special = {
        f"{name}_token": tokens[at]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if 0 <= (at := _id(metadata, key)) < len(tokens)
    }
    settings = {**special, "chat_template": metadata.get("tokenizer.chat_template", "")}
    family = str(metadata.get("general.architecture", ""))
    ends = {_id(metadata, name) for name in ("eos", "eot", "eom")}
    config = {
        "model_type": family,
        "max_position_embeddings": metadata.get(f"{family}.context_length"),
        "eos_token_id": sorted(end for end in ends if 0 <= end < len(tokens)),
    }
    files = {"tokenizer.json": _tokenizer(metadata, tokens), "tokenizer_config.json": settings, "config.json": config}
    return {name: json.dumps(content, ensure_ascii=False).encode() for name, content in files.items()}


def _tokenizer(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        done = _byte_level(metadata, tokens)
    elif kind == "llama":
        done = _sentencepiece(metadata, tokens)
    else:
        raise Unsupported(f"the GGUF file has a tokenizer of the kind '{kind}', known are 'gpt2' and 'llama'")
    types = metadata.get("tokenizer.ggml.token_type") or []
    added = [
        {
            "id": at,
            "content": tokens[at],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": what != _USER_DEFINED,
        }
        for at, what in enumerate(types[: len(tokens)])
        if what in (_CONTROL, _USER_DEFINED) or (what == _UNKNOWN and kind == "llama")
    ]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **done}


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    merges = [merge.split(" ", 1) for merge in _list(metadata, "tokenizer.ggml.merges")]
    split = str(metadata.get("tokenizer.ggml.pre", ""))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if split in _PLAIN:
        parts: list[dict[str, Any]] = [byte_level]
    elif split in _BY_DIGIT:
        parts = [{"type": "Digits", "individual_digits": True}, byte_level]
    elif split in _BY_PATTERN:
        pattern = {"Regex": _BY_PATTERN[split]}
        parts = [
            {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
            byte_level | {"use_regex": False},
        ]
    else:
        known = ", ".join(sorted((_PLAIN | _BY_DIGIT | _BY_PATTERN.keys()) - {""}))
        raise Unsupported(
            f"the GGUF file splits text as '{split}', known are {known}; put the model's tokenizer.json beside it"
        )
    model = _bpe(tokens, merges, ignore_merges=split in ("llama-bpe", "llama-v3", "llama3"))
    return {
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        "post_processor": _around(metadata, tokens, default=split.startswith("llama")),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    scores = _list(metadata, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise InvalidArgument("the GGUF file has not as many scores as tokens")
    ids = {token: at for at, token in enumerate(tokens)}
    merges = [
        (-scores[at], ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
        for at, token in enumerate(tokens)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    unknown = _id(metadata, "unknown")
    model = _bpe(tokens, [[left, right] for *_, left, right in sorted(merges)], byte_fallback=True, fuse_unk=True)
    prepends = metadata.get("tokenizer.ggml.add_space_prefix", True)
    normalizers = [{"type": "Prepend", "prepend": _SPACE}] if prepends else []
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    strips = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepends else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, replaced]},
        "pre_tokenizer": None,
        "post_processor": _around(metadata, tokens, default=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strips,
            ],
        },
        "model": model | {"unk_token": tokens[unknown] if 0 <= unknown < len(tokens) else None},
    }


def _bpe(tokens: list[str], merges: list[list[str]], **said: bool) -> dict[str, Any]:
    usual = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        **usual,
        **said,
        "vocab": {token: at for at, token in enumerate(tokens)},
        "merges": merges,
    }


def _around(metadata: Mapping[str, Any], tokens: list[str], *, default: bool) -> dict[str, Any] | None:
    """What stands before and after a text."""
    before = _id(metadata, "bos") if metadata.get("tokenizer.ggml.add_bos_token", default) else -1
    after = _id(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else -1
    named = {tokens[at]: at for at in (before, after) if 0 <= at < len(tokens)}
    if not named:
        return None

    def special(at: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": tokens[at], "type_id": 0}}] if 0 <= at < len(tokens) else []

    text: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": special(before) + text + special(after),
        "pair": special(before) + text + [{"Sequence": {"id": "B", "type_id": 0}}] + special(after),
        "special_tokens": {token: {"id": token, "ids": [at], "tokens": [token]} for token, at in named.items()},
    }


def _list(metadata: Mapping[str, Any], key: str) -> list[Any]:
    found = metadata.get(key)
    if not isinstance(found, list) or not found:
        raise InvalidArgument(f"the GGUF file has no '{key}': no tokenizer can be made of it")
    return found


def _id(metadata: Mapping[str, Any], name: str) -> int:
    found = metadata.get(f"tokenizer.ggml.{name}_token_id", -1)
    return found if isinstance(found, int) else -1
