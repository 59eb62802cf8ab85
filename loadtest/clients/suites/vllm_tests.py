"""A plug-in of pytest for vLLM's tests of its entrypoints: `RemoteOpenAIServer` is a server that runs already.

The environment says where (`SUITE_URL`), and where its tokenizer is (`SUITE_TOKENIZER`). What else the tests import of
vLLM, which is not installed here, skips those that use it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import jinja2
import openai
import tokenizers

from .stand_ins import stand_for

_SECONDS = 600


class RemoteOpenAIServer:
    """Has the members of vLLM's class that tests use; models and options of `vllm serve` are not looked at."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, vllm_serve_args: list[str], **_: Any) -> None:
        self.url_root = os.environ["SUITE_URL"]

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return self.url_root + "/" + "/".join(parts)

    def get_client(self, **given: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._client(given, "v1"))

    def get_async_client(self, **given: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client(given, "v1"))

    def get_async_client_anthropic(self, **given: Any) -> Any:
        from anthropic import AsyncAnthropic

        return AsyncAnthropic(**self._client(given))

    def _client(self, given: dict[str, Any], *path: str) -> dict[str, Any]:
        base = self.url_for(*path) if path else self.url_root
        return {"base_url": base, "api_key": self.DUMMY_API_KEY, "timeout": _SECONDS, "max_retries": 0, **given}


class Tokenizer:
    """The model's tokenizer with the calls of Hugging Face's class that tests make."""

    def __init__(self, **_: Any) -> None:
        directory = Path(os.environ["SUITE_TOKENIZER"])
        self._library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        settings = json.loads((directory / "tokenizer_config.json").read_text())
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
        self._template = environment.from_string(settings["chat_template"])

    @property
    def vocabulary(self) -> int:
        return int(self._library.get_vocab_size())

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self._library.id_to_token(one) for one in ids]

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None = None,
        **_: Any,
    ) -> str:
        prompt = self._template.render(messages=conversation, tools=tools, add_generation_prompt=add_generation_prompt)
        if not continue_final_message:
            return prompt
        last = conversation[-1]["content"].strip()
        return prompt[: prompt.rindex(last) + len(last)]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return str(self._library.decode(ids, skip_special_tokens=skip_special_tokens))


class ModelConfig:
    """Says how many tokens the model has."""

    def __init__(self, **_: Any) -> None:
        self._tokens = Tokenizer().vocabulary

    def get_vocab_size(self) -> int:
        return self._tokens


class _Bounds:
    def __init__(self, _type: object) -> None:
        self.min, self.max = -(2**63), 2**63 - 1


class _Hub:
    """Downloads nothing: adapters are beside the model under the names that the tests ask for."""

    def snapshot_download(self, **_: Any) -> str:
        return "adapter"


stand_for(
    ("vllm", "torch", "tblib", "PIL"),
    tests__utils={"RemoteOpenAIServer": RemoteOpenAIServer},
    torch={"iinfo": _Bounds, "long": "long"},
    vllm={},
    vllm__config={"ModelConfig": ModelConfig},
    vllm__exceptions={"VLLMValidationError": ValueError},
    vllm__tokenizers={"get_tokenizer": Tokenizer},
    vllm__transformers_utils__repo_utils={"hf_api": _Hub},
)
