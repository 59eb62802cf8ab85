"""What turns a model's text into tokens and back: its tokenizer, chat template, special and end tokens, context length.

The executor that loads a model packs them into one blob; gateways read the blob by its digest, which stands in the
loaded configuration (`text_tensors.ASSETS_PARAMETER`). `tokenizer` and `templates` use them.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from charonia.errors import InvalidArgument, InvalidRecord

MAX_ASSETS_BYTES = 128 << 20
"""The largest blob once inflated: tokenizers of 256,000 tokens have 35 MB."""
DEFAULT_CONTEXT = 2048
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that chat templates may name."""
_HEADER = struct.Struct("<4sBI")
_MAGIC = b"CTXA"
_VERSION = 1
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class TextAssets:
    """All that text and tokens of one model need.

    `tokenizer_json` is a Hugging Face `tokenizer.json`. `chat_template` is jinja text, "" for the default one;
    `named_templates` are others, by name ("tool_use"). `special_tokens` maps names such as `bos_token` to their texts.
    `end_tokens` end a text. `context` is the most tokens of prompt and answer together. `tool_format` is how the model
    writes calls of tools, a name of `tool_calls.FORMATS`; "" if it writes none.
    """

    tokenizer_json: bytes
    context: int
    chat_template: str = ""
    named_templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    end_tokens: tuple[int, ...] = ()
    tool_format: str = ""

    def pack(self) -> bytes:
        """Returns the assets as one blob; equal assets give equal bytes."""
        header = orjson.dumps(
            {
                "context": self.context,
                "chat_template": self.chat_template,
                "named_templates": dict(self.named_templates),
                "special_tokens": dict(self.special_tokens),
                "end_tokens": list(self.end_tokens),
                "tool_format": self.tool_format,
            },
            option=orjson.OPT_SORT_KEYS,
        )
        return _HEADER.pack(_MAGIC, _VERSION, len(header)) + zlib.compress(header + self.tokenizer_json, 6)

    @staticmethod
    def unpack(blob: bytes) -> TextAssets:
        """Returns the assets in a blob. Raises `InvalidRecord` for bytes that `pack` did not write."""
        try:
            magic, version, header_bytes = _HEADER.unpack_from(blob)
            if magic != _MAGIC or version != _VERSION:
                raise InvalidRecord(f"text assets of an unknown form or version: {bytes(blob[:5]).hex()}")
            inflater = zlib.decompressobj()
            data = inflater.decompress(memoryview(blob)[_HEADER.size :], MAX_ASSETS_BYTES)
            if not inflater.eof or inflater.unused_data or header_bytes > len(data):
                raise InvalidRecord(f"text assets that are cut, or larger than {MAX_ASSETS_BYTES} bytes")
            header = orjson.loads(data[:header_bytes])
            return TextAssets(
                tokenizer_json=data[header_bytes:],
                context=_positive(header["context"]),
                chat_template=str(header["chat_template"]),
                named_templates=_texts(header["named_templates"]),
                special_tokens=_texts(header["special_tokens"]),
                end_tokens=tuple(int(token) for token in header["end_tokens"]),
                tool_format=str(header["tool_format"]),
            )
        except (struct.error, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRecord(f"text assets that cannot be read: {error}") from None


def digest_of(blob: bytes) -> str:
    """Returns the name of packed assets: BLAKE2b of 16 bytes, in hexadecimal digits."""
    return hashlib.blake2b(blob, digest_size=_DIGEST_BYTES).hexdigest()


def assets_of_files(files: Mapping[str, bytes], *, context: int | None = None) -> TextAssets:
    """Returns the assets of a model directory in Hugging Face's form; `files` maps names to contents.

    Needs `tokenizer.json`; reads `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json`,
    `config.json`, `chat_template.jinja` and `chat_template.json` if they are there. `context` wins over theirs.
    Raises `InvalidArgument` for a file that is missing or of another form.
    """
    if "tokenizer.json" not in files:
        raise InvalidArgument("the model has no tokenizer.json")
    tokenizer_json = files["tokenizer.json"]
    tokens = _token_ids(_json(files, "tokenizer.json"))
    settings = _json(files, "special_tokens_map.json") | _json(files, "tokenizer_config.json")
    model, generation = _json(files, "config.json"), _json(files, "generation_config.json")
    special = {name: text for name in SPECIAL_TOKEN_NAMES if (text := _token_text(settings.get(name)))}
    template, named = _templates(files, settings)
    ends = _ids(generation.get("eos_token_id")) or _ids(model.get("eos_token_id"))
    if special.get("eos_token") in tokens:
        ends.append(tokens[special["eos_token"]])
    if context is None:
        context = next(
            (
                value
                for value in (model.get("max_position_embeddings"), settings.get("model_max_length"))
                if isinstance(value, int) and 0 < value < 1 << 31
            ),
            DEFAULT_CONTEXT,
        )
    return TextAssets(
        tokenizer_json=tokenizer_json,
        context=context,
        chat_template=template,
        named_templates=named,
        special_tokens=special,
        end_tokens=tuple(dict.fromkeys(ends)),
        tool_format=guessed_tool_format(named.get("tool_use", template)),
    )


def guessed_tool_format(template: str) -> str:
    """Returns the name of the form in which models with such a chat template write calls; "" if it shows none."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters": ' in template or "ipython" in template:
        return "llama3_json"
    return ""


def _positive(value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"a context of {value!r}")
    return value


def _texts(value: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()}


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        found = orjson.loads(files[name])
    except ValueError as error:
        raise InvalidArgument(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"{name} must be a JSON object, got {type(found).__name__}")
    return found


def _token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for added in tokenizer.get("added_tokens") or ():
        if isinstance(added, dict) and isinstance(added.get("id"), int):
            known[added.get("content")] = added["id"]
    return known


def _token_text(value: object) -> str:
    """A special token is a text, or the object of an added token."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int) and not isinstance(each, bool) and each >= 0]


def _templates(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode(), {}
        except UnicodeDecodeError:
            raise InvalidArgument("chat_template.jinja is not UTF-8") from None
    value = _json(files, "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(value, list):  # several, each with a name
        named = {
            str(each.get("name")): str(each.get("template", ""))
            for each in value
            if isinstance(each, dict) and each.get("name")
        }
        return named.pop("default", ""), named
    return (value, {}) if isinstance(value, str) else ("", {})
