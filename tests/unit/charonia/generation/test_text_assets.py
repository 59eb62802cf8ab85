"""Text assets: one blob that reads back equal, and what the files of a model directory say."""

from __future__ import annotations

import json
import zlib

import pytest

from charonia.errors import InvalidArgument, InvalidRecord
from charonia.generation.text_assets import TextAssets, assets_of_files, digest_of

ASSETS = TextAssets(
    b'{"model": {}}' * 1000,
    context=8192,
    chat_template="{{ messages }}",
    named_templates={"tool_use": "é"},
    special_tokens={"bos_token": "<s>"},
    end_tokens=(2, 7),
    tool_format="hermes",
)


def test_assets_read_back_equal_and_have_one_name() -> None:
    blob = ASSETS.pack()
    assert TextAssets.unpack(blob) == ASSETS
    assert len(blob) < len(ASSETS.tokenizer_json)
    assert digest_of(blob) == digest_of(TextAssets.unpack(blob).pack())
    assert len(digest_of(blob)) == 32


def test_bytes_that_are_no_assets_are_refused() -> None:
    blob = ASSETS.pack()
    damaged = [b"", b"x", blob[:-1], blob[:20], b"CTXA\x09" + blob[5:], blob[:5] + b"\xff" * 4 + blob[9:], blob + b"x"]
    damaged.append(blob[:9] + zlib.compress(b"[]" * 500))
    for wrong in damaged:
        with pytest.raises(InvalidRecord, match="text assets"):
            TextAssets.unpack(wrong)


def test_a_blob_that_inflates_without_end_is_refused() -> None:
    bomb = ASSETS.pack()[:9] + zlib.compress(b"\0" * (200 << 20), 1)
    with pytest.raises(InvalidRecord, match="larger than"):
        TextAssets.unpack(bomb)


def files(**others: object) -> dict[str, bytes]:
    tokenizer = {"model": {"vocab": {"a": 0, "</s>": 1}}, "added_tokens": [{"id": 2, "content": "<|im_end|>"}]}
    given = {"tokenizer.json": tokenizer} | {name.replace("__", "."): value for name, value in others.items()}
    return {name: value if isinstance(value, bytes) else json.dumps(value).encode() for name, value in given.items()}


def test_a_model_directory_is_read() -> None:
    found = assets_of_files(
        files(
            tokenizer_config__json={
                "eos_token": {"content": "<|im_end|>"},
                "bos_token": "<s>",
                "pad_token": None,
                "chat_template": "T <tool_call>",
                "model_max_length": 10**30,
            },
            generation_config__json={"eos_token_id": [1, 2]},
            config__json={"max_position_embeddings": 4096, "eos_token_id": 0},
        )
    )
    assert found.end_tokens == (1, 2)
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert (found.context, found.chat_template, found.tool_format) == (4096, "T <tool_call>", "hermes")


def test_templates_may_have_names_or_a_file() -> None:
    several = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "[TOOL_CALLS]"}]
    found = assets_of_files(files(tokenizer_config__json={"chat_template": several}))
    assert (found.chat_template, found.named_templates) == ("D", {"tool_use": "[TOOL_CALLS]"})
    assert found.tool_format == "mistral"
    assert assets_of_files(files(chat_template__jinja=b"J")).chat_template == "J"
    assert assets_of_files(files(), context=77).context == 77
    assert assets_of_files(files()) == TextAssets(files()["tokenizer.json"], context=2048)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": b"{"}, "tokenizer.json is not JSON"),
        ({"tokenizer.json": b"[]"}, "tokenizer.json must be a JSON object, got list"),
        ({"tokenizer.json": b"{}", "chat_template.jinja": b"\xff"}, "chat_template.jinja is not UTF-8"),
    ],
)
def test_wrong_files_are_refused(given: dict[str, bytes], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        assets_of_files(given)
