"""The models behind the OpenAI API: their names, adapters and text assets, and prompts as tokens.

A model's tokenizer and chat template come from a blob whose digest stands in its loaded configuration. Prompts become
tokens before anything enters the log, so that one that is too long is refused here. `text_serving` makes the requests.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from charonia.catalog.served import ServedVersion
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, ErrorCode, InvalidArgument, Unavailable
from charonia.generation.text_tensors import ADAPTERS_PARAMETER, ASSETS_PARAMETER
from gateway.handler import Handler

from .shapes.api_errors import CONTEXT_LENGTH, MODEL_NOT_FOUND, ApiError
from .shapes.chat_shapes import ChatRequest

if TYPE_CHECKING:
    from charonia.generation.text_assets import TextAssets
    from charonia.generation.tokenizer import Tokenizer

TASK_PARAMETER = "charonia.openai_task"
"""A parameter of a model's configuration: a word of `TASKS`; that a model generates is known by its tensors."""
TASKS = frozenset(("embed", "score", "moderate", "transcribe"))

TOOLS_PARAMETER = "charonia.tool_format"
"""A parameter of a model's configuration: how it writes calls, a name of `tool_calls.FORMATS`."""

_CACHED_ASSETS = 16
"""Tokenizers held, of 10 to 50 MB each."""

_ENCODED_IN_LOOP = 1024
"""Characters that are tokenized in the loop: it takes half a millisecond."""


@dataclass(frozen=True, slots=True)
class TextTools:
    """The tokenizer and the assets of a model."""

    tokenizer: Tokenizer
    assets: TextAssets

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.assets.context

    def encode(self, text: str, *, special: bool, is_cut: bool = False) -> list[int]:
        """The tokens of a text, at most those of the context; more where the text `is_cut` afterwards.

        Raises a 400 `ApiError`, at once for a text that is far too long. A text that is cut may have as many characters
        as one that is not, so it takes no more time and memory.
        """
        if is_cut and len(text) > (most := self.tokenizer.most_characters(self.context)):
            raise too_long_to_cut(most, len(text), "characters")
        try:
            return self.tokenizer.encode(text, special=special, limit=None if is_cut else self.context)
        except InvalidArgument as error:
            if not text.isascii() and not _is_unicode(text):
                raise ApiError(error.message) from None
            message = f"This model's maximum context length is {self.context} tokens: {error.message}."
            raise ApiError(message, code=CONTEXT_LENGTH) from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def size_of(text: str) -> int:
    """The bytes of a text in UTF-8, as requests have it."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def too_long(context: int, tokens: int | str, asked: int = 0) -> ApiError:
    """The refusal of a prompt that the context has no room for; `asked` tokens were wanted beside it."""
    message = f"This model's maximum context length is {context} tokens. However, "
    if asked:
        message += f"you requested {asked} tokens for the answer beside a prompt of {tokens} tokens. "
    else:
        message += f"your prompt has {tokens} tokens, and the answer needs at least one. "
    return ApiError(message + "Please reduce the length of the prompt or of the answer.", code=CONTEXT_LENGTH)


def too_long_to_cut(most: int, found: int, what: str) -> ApiError:
    """The refusal of a prompt that `truncate_prompt_tokens` does not cut; `what` is what is counted."""
    return ApiError(
        f"A prompt that 'truncate_prompt_tokens' cuts may have at most {most} {what}, but this one has {found}.",
        code=CONTEXT_LENGTH,
    )


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model by the name that a client gave. `adapter`: the adapter in the name, "" without one."""

    served: ServedVersion
    adapter: str = ""

    @property
    def name(self) -> str:
        return self.served.interface.name

    @property
    def generates(self) -> bool:
        """Whether it takes a prompt as text or tokens and gives text."""
        interface = self.served.interface
        output = interface.outputs.get("text_output")
        takes = interface.inputs.keys() & {"text_input", "prompt_token_ids"}
        return bool(takes) and output is not None and output.datatype is DataType.BYTES

    @property
    def task(self) -> str:
        """What its configuration says that it does, a word of `TASKS`; "" if it says nothing."""
        said = self.served.interface.parameters.get(TASK_PARAMETER, "")
        return said if said in TASKS else ""

    def tool_format(self, tools: TextTools | None) -> str:
        """How it writes calls of tools: what its configuration says, else what its chat template shows; "" for none."""
        said = self.served.interface.parameters.get(TOOLS_PARAMETER, "")
        return said or (tools.assets.tool_format if tools is not None else "")

    @property
    def adapters(self) -> list[str]:
        """The names of its adapters."""
        text = self.served.interface.parameters.get(ADAPTERS_PARAMETER, "").strip()
        if text.startswith("["):
            try:
                return [str(name) for name in orjson.loads(text)]
            except orjson.JSONDecodeError:
                return []
        return [name.strip() for name in text.split(",") if name.strip()]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a routing rule may ask of a call: headers, with names in lower case, and the tenant."""

    headers: Iterable[tuple[bytes, bytes]] = ()
    tenant: str = ""


NOBODY = Asked()


@dataclass(slots=True)
class TextModels:
    """The models that a handler serves. `separator` stands between a model and an adapter.

    `max_bytes` bounds what the requests of one call have together (`check_size`).
    """

    handler: Handler
    separator: str
    max_bytes: int
    _assets: OrderedDict[str, asyncio.Task[TextTools]] = field(default_factory=OrderedDict)

    def find(self, name: str, asked: Asked = NOBODY) -> TextModel:
        """The model `<model>`, `<model><separator><adapter>` or `<adapter>`. Raises a 404 `ApiError`.

        An adapter that the model does not list is refused, never answered by the model without one. The version is the
        one that the model's routing rule has for such a call.
        """
        served = self.served(name, asked)
        if served is not None:
            return TextModel(served)
        if self.separator and self.separator in name:
            base, _, adapter = name.rpartition(self.separator)
            served = self.served(base, asked)
            if served is not None and adapter in (model := TextModel(served, adapter)).adapters:
                return model
        for model in self.all():
            if name in model.adapters:
                return TextModel(model.served, name)
        raise ApiError(
            f"The model '{name[:256]}' does not exist or is not ready.",
            status=404,
            param="model",
            code=MODEL_NOT_FOUND,
        )

    def check_size(self, size_bytes: int, what: str, param: str) -> None:
        """Raises a 400 `ApiError` where one body would become requests of more bytes than a body may have.

        A text that stands once in a body, and is copied for each request, would otherwise fill the memory. `what` says
        what has the bytes.
        """
        if size_bytes > self.max_bytes:
            raise ApiError(
                f"{what} would have {size_bytes} bytes together, the bound is {self.max_bytes} (--http-max-input-size)",
                param=param,
            )

    def adapter_name(self, model: TextModel, adapter: str) -> str:
        """The name of an adapter that is listed: with its model's, unless there is no separator."""
        return f"{model.name}{self.separator}{adapter}" if self.separator else adapter

    def served(self, name: str, asked: Asked = NOBODY) -> ServedVersion | None:
        """The version that a call for this name gets; None for a model that is unknown or not ready."""
        try:
            return self.handler.version_for(name, asked.headers, asked.tenant)
        except CharoniaError as error:
            if error.code in (ErrorCode.NOT_FOUND, ErrorCode.INVALID_ARG):
                return None
            raise

    def all(self) -> list[TextModel]:
        """The ready models: first the ones that write text, as some clients take the first of a list; then by name."""
        found: dict[str, TextModel] = {}
        for entry in self.handler.repository_index(ready=True):
            if entry.name not in found and (served := self.served(entry.name)) is not None:
                found[entry.name] = TextModel(served)
        return sorted(found.values(), key=lambda model: (not model.generates, not model.task, model.name))

    async def tools(self, model: TextModel) -> TextTools | None:
        """The tokenizer and template of a model; None for one that has none. Raises `Unavailable`."""
        digest = model.served.interface.parameters.get(ASSETS_PARAMETER, "")
        if not digest:
            return None
        task = self._assets.get(digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._assets[digest] = asyncio.create_task(self._load(digest), name="text-assets")
            while len(self._assets) > _CACHED_ASSETS:
                self._assets.popitem(last=False)
        self._assets.move_to_end(digest)
        return await asyncio.shield(task)

    async def _load(self, digest: str) -> TextTools:
        blob = await self.handler.text_assets(digest)
        if blob is None:
            raise Unavailable("the model's tokenizer is not in the log yet")
        return await self.handler.offload.in_thread(len(blob), _read_assets, blob)

    async def encode(self, tools: TextTools, text: str, *, special: bool, is_cut: bool = False) -> list[int]:
        """The tokens of a text; a long one is tokenized in a thread. Raises as `TextTools.encode`."""
        if len(text) <= _ENCODED_IN_LOOP:
            return tools.encode(text, special=special, is_cut=is_cut)
        return await self.handler.offload.in_thread(len(text), _encode, tools, text, special, is_cut)

    async def encode_all(self, tools: TextTools, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """The tokens of each text; many are tokenized in a thread. Raises as `TextTools.encode`."""
        size = sum(map(len, texts))
        if size <= _ENCODED_IN_LOOP:
            return _encode_all(tools, texts, special)
        return await self.handler.offload.in_thread(size, _encode_all, tools, texts, special)

    async def render(self, tools: TextTools | None, chat: ChatRequest) -> str:
        """The prompt of a chat by the model's template. Raises a 400 `ApiError` where the template refuses."""
        if tools is None:
            return plain_prompt(chat.messages)
        size = sum(len(message["content"]) for message in chat.messages)
        try:
            return await self.handler.offload.in_thread(size, _render, tools, chat)
        except InvalidArgument as error:
            raise ApiError(error.message, param="messages") from None


def _encode(tools: TextTools, text: str, special: bool, is_cut: bool) -> list[int]:
    return tools.encode(text, special=special, is_cut=is_cut)


def _encode_all(tools: TextTools, texts: Sequence[str], special: bool) -> list[list[int]]:
    return [tools.encode(text, special=special) for text in texts]


def _render(tools: TextTools, chat: ChatRequest) -> str:
    from charonia.generation.templates import render_chat

    return render_chat(
        tools.assets,
        chat.messages,
        chat.tools or None,
        chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        arguments=chat.template_arguments,
    )


def _read_assets(blob: bytes) -> TextTools:
    from charonia.generation.text_assets import TextAssets
    from charonia.generation.tokenizer import Tokenizer

    assets = TextAssets.unpack(blob)
    return TextTools(Tokenizer.from_bytes(assets.tokenizer_json, assets), assets)


def plain_prompt(messages: Sequence[dict[str, Any]]) -> str:
    """The prompt of a chat with a model that has no template: a line for each message, and the assistant's begins."""
    lines = [f"{message['role']}: {message['content']}" for message in messages]
    return "\n".join([*lines, "assistant:"])
