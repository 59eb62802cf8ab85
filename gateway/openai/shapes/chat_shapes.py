"""Chat completions: the request read, the answer and its chunks written. Pure.

`text_answers` has what an answer is made of, `completion_shapes` the older form without messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from charonia.generation.tool_calls import CallReader, ToolDelta

from .api_errors import ApiError, missing
from .forced_calls import FREE, ToolCalls, ToolChoice, call_id, grammar_of, reader_of, tools_of
from .sampling_fields import (
    check_size,
    choices_of,
    counts_always,
    flag,
    includes_usage,
    priority_of,
    prompt_logprobs_of,
    sampling_of,
    structure_field,
    structure_of,
    text,
    token_ids,
    whole,
)
from .text_answers import TextDelta, TextFold, TokenBytes, TokenLogprob, prompt_logprobs, token_logprobs, usage
from .token_options import NO_OPTIONS, TokenOptions, chosen_ids, token_options

MAX_MESSAGES = 2048
MAX_TOP_LOGPROBS = 20
MAX_ROLE_CHARACTERS = 64
PROMPT_IDS = "kv_transfer_params.prompt_token_ids"
"""The member with the tokens that another stage made of the prompt, as vLLM's routers pass them on."""
_MOST = 2**31 - 1
_NO_IDS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat as it was asked for. `max_tokens` None: as many as the context has room for.

    `top_logprobs` None: no log probabilities. `tool_choice` none: `tools` are still shown to the template.
    """

    model: str
    messages: list[dict[str, Any]]
    sampling: dict[str, Any]
    count: int = 1
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: ToolChoice = FREE
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Further names for the chat template (`chat_template_kwargs`, `documents`)."""
    prompt_logprobs: bool = False
    """Whether the answer lists log probabilities of the prompt."""
    priority: int = 0
    """The priority level, 0 for the model's default."""
    counts_always: bool = False
    """Whether each chunk of a stream has the usage so far."""
    options: TokenOptions = NO_OPTIONS
    echo: str = ""
    """The text before the answer's own: with `echo` that of the last message, if it is of the assistant, too."""
    prompt_ids: list[int] | None = None
    """The prompt's tokens where the caller has them already; then the messages are not rendered."""
    structured_by: str = ""
    """The field that says what form the text has to have, if one does."""


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """The request of a body. Raises `ApiError`."""
    model = text(body, "model")
    messages = read_messages(body)
    stream = flag(body, "stream")
    sampling = sampling_of(body)
    tools, choice = tools_of(body)
    structure = structure_of(body)
    forced = grammar_of(tools, choice, parallel=flag(body, "parallel_tool_calls", True))
    if forced is not None or structure is not None:
        sampling["structured_outputs"] = forced or structure
    goes_on = flag(body, "continue_final_message")
    arguments = body.get("chat_template_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise ApiError("'chat_template_kwargs' must be an object", param="chat_template_kwargs")
    check_size(arguments, "chat_template_kwargs")
    if (documents := body.get("documents")) is not None:
        if not isinstance(documents, list) or not all(isinstance(one, Mapping) for one in documents):
            raise ApiError("'documents' must be a list of objects", param="documents")
        arguments = {**arguments, "documents": documents}
    wanted = whole(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if wanted is not None and not flag(body, "logprobs"):
        raise ApiError("`top_logprobs` can only be used when `logprobs` is True", param="top_logprobs")
    top = (wanted or 0) if flag(body, "logprobs") else None
    if top is not None:
        sampling["logprobs"] = top
    if chosen := chosen_ids(body, has_logprobs=top is not None):
        sampling["logprob_token_ids"] = chosen
        top = len(chosen) + 1  # all of them are shown, and the sampled token
    scored = prompt_logprobs_of(body, stream=stream)
    if scored is not None:
        sampling["prompt_logprobs"] = scored
    max_tokens = whole(body, "max_completion_tokens", 1, _MOST)
    if max_tokens is None:
        max_tokens = whole(body, "max_tokens", 1, _MOST)
    echo = messages[-1]["content"] if flag(body, "echo") and messages[-1]["role"] == "assistant" else ""
    return ChatRequest(
        model,
        messages,
        sampling,
        choices_of(body),
        max_tokens,
        stream,
        includes_usage(body, stream=stream),
        top,
        tools,
        choice,
        flag(body, "add_generation_prompt", not goes_on),
        goes_on,
        dict(arguments),
        scored is not None,
        priority_of(body),
        counts_always(body),
        token_options(body),
        echo,
        None if flag(body, "echo") else _earlier_prompt(body),
        structure_field(body) if forced is None else "tools",
    )


def _earlier_prompt(body: Mapping[str, Any]) -> list[int] | None:
    """The tokens of the prompt that another stage has made; None where it gave none."""
    given = body.get("kv_transfer_params")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ApiError("'kv_transfer_params' must be an object", param="kv_transfer_params")
    if given.get("prompt_token_ids") is None:
        return None
    found = token_ids(given["prompt_token_ids"], PROMPT_IDS)
    if not found:
        raise ApiError(f"'{PROMPT_IDS}' must not be empty", param=PROMPT_IDS)
    return found


def read_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages, each with `content` as one string. Raises `ApiError`."""
    given = body.get("messages")
    if given is None:
        raise missing("messages")
    if not isinstance(given, list) or not given:
        raise ApiError("'messages' must be a list that is not empty", param="messages")
    if len(given) > MAX_MESSAGES:
        raise ApiError(f"'messages' has {len(given)} messages, the bound is {MAX_MESSAGES}", param="messages")
    return [_message(one, f"messages[{at}]") for at, one in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, Any]:
    role = given.get("role") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(role, str) or not role or not role.isprintable():
        raise ApiError(f"'{where}' must be an object with a 'role', such as user or assistant", param=where)
    if len(role) > MAX_ROLE_CHARACTERS:
        raise ApiError(f"'{where}.role' must have at most {MAX_ROLE_CHARACTERS} characters", param=f"{where}.role")
    message = dict(given)  # a role that OpenAI does not have is for the template, as in vLLM
    if message["role"] == "developer":
        message["role"] = "system"
    calls = given.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or given["role"] != "assistant":
            raise ApiError(f"'{where}.tool_calls' must be a list, of an assistant", param=f"{where}.tool_calls")
        message["tool_calls"] = [_earlier_call(call, where) for call in calls]
    message["content"] = _content(given.get("content"), where, needed=not calls and given["role"] != "assistant")
    return message


def _content(given: Any, where: str, *, needed: bool) -> str:
    if isinstance(given, str):
        return given
    if given is None and not needed:
        return ""
    if not isinstance(given, list):
        raise ApiError(f"'{where}.content' must be a string or a list of parts", param=f"{where}.content")
    texts: list[str] = []
    for part in given:
        kind = part.get("type") if isinstance(part, Mapping) else None
        word = "refusal" if kind == "refusal" else "text"
        if kind not in ("text", "refusal", "input_text", "output_text") or not isinstance(part.get(word), str):
            raise ApiError(
                f"'{where}.content' has a part of type '{str(kind)[:32]}', only text is supported",
                param=f"{where}.content",
            )
        texts.append(part[word])
    return "\n".join(texts)


def _earlier_call(given: Any, where: str) -> dict[str, Any]:
    """A call in an assistant's message. Templates write its arguments as JSON, so they are values here."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(f"'{where}.tool_calls' must have functions with names", param=f"{where}.tool_calls")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            pass  # shown to the model as it is
    return {**given, "function": {**function, "arguments": arguments}}


@dataclass(slots=True)
class _Choice:
    """One choice of an answer while it comes."""

    index: int
    reader: CallReader | None
    calls: ToolCalls = field(default_factory=ToolCalls)
    fold: TextFold = field(default_factory=TextFold)
    content: list[str] = field(default_factory=list)


class ChatAnswer:
    """Writes the answer to a chat, as chunks or whole, from the deltas of its choices.

    `auto_reader` makes what finds calls in free text (`tool_choice` auto), None where the model has no form of calls.
    """

    def __init__(
        self,
        request: ChatRequest,
        answer_id: str,
        created_s: int,
        bytes_of: TokenBytes | None = None,
        auto_reader: Callable[[], CallReader | None] = lambda: None,
    ) -> None:
        self.id = answer_id
        self._request = request
        self._created_s = created_s
        self._bytes_of = bytes_of
        choice = request.tool_choice
        readers = [auto_reader() if choice.mode == "auto" else reader_of(choice) for _ in range(request.count)]
        self.choices = [_Choice(index, reader) for index, reader in enumerate(readers)]
        self.prompt_tokens = 0
        self.prompt_ids: Sequence[int] | None = None
        """The prompt's tokens, where the model has a tokenizer here."""

    # -- chunks --------------------------------------------------------------------------------------------------------

    def opening(self) -> Iterator[dict[str, Any]]:
        """The first chunk of each choice."""
        for choice in self.choices:
            head = self._shown(prompt_token_ids=self.prompt_ids) if not choice.index else {}
            yield self._chunk(choice.index, {"role": "assistant", "content": self._request.echo}) | head

    def chunks(self, index: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """The chunks of a delta of a choice; the last one has its finish reason."""
        choice = self.choices[index]
        choice.fold.add(delta)
        parts = self._parts(choice, delta)
        logprobs = self._logprobs(delta.tokens, delta.logprobs)
        ids = self._shown(token_ids=delta.tokens) if delta.tokens else {}
        while len(parts) > 1 or (parts and not delta.finish):
            yield self._chunk(index, self._part(choice, parts.pop(0)), logprobs=logprobs, ids=ids)
            logprobs, ids = None, {}
        if delta.finish:
            body = self._part(choice, parts[0]) if parts else {}
            yield self._chunk(index, body, logprobs=logprobs, finish=self._finish(choice), ids=ids)
        elif ids or (logprobs is not None and logprobs["content"]):
            yield self._chunk(index, {"content": ""}, logprobs=logprobs, ids=ids)

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk of `stream_options.include_usage`."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()}

    def _parts(self, choice: _Choice, delta: TextDelta) -> list[str | ToolDelta]:
        if choice.reader is None:
            return [delta.text] if delta.text else []
        parts = [*choice.reader.push(delta.text)] if delta.text else []
        if delta.finish:
            parts += choice.reader.flush()
        for part in parts:
            if isinstance(part, ToolDelta):
                choice.calls.add(part)
        return [part for part in parts if part != ""]

    def _part(self, choice: _Choice, part: str | ToolDelta) -> dict[str, Any]:
        if isinstance(part, str):
            return {"content": part}
        call: dict[str, Any] = {"index": part.index}
        if part.name:
            call |= {"id": call_id(self.id, choice.index, part.index), "type": "function"}
            call["function"] = {"name": part.name, "arguments": part.arguments}
        else:
            call["function"] = {"arguments": part.arguments}
        return {"tool_calls": [call]}

    def _shown(self, **ids: Sequence[int] | None) -> dict[str, list[int] | None]:
        """Members of a chunk that have token ids; none where they were not asked for."""
        return self._request.options.shown(**ids) if self._request.options.shows_ids else {}

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        logprobs: Any = None,
        finish: str | None = None,
        ids: Mapping[str, Any] = _NO_IDS,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **ids}
        more = {"usage": self.usage() if self._request.counts_always else None} if self._request.include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **more}

    # -- the whole -----------------------------------------------------------------------------------------------------

    def add(self, index: int, delta: TextDelta) -> None:
        """Take a delta of a choice, for `document`."""
        choice = self.choices[index]
        choice.fold.add(delta)
        choice.content += [part for part in self._parts(choice, delta) if isinstance(part, str)]

    def document(self) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for choice in self.choices:
            calls = choice.calls.documents(self.id, choice.index)
            content = self._request.echo + "".join(choice.content)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": None if calls and not content else content,
                "refusal": None,
                "annotations": [],
            }
            if calls:
                message["tool_calls"] = calls
            logprobs = self._logprobs(choice.fold.tokens, choice.fold.logprobs)
            finish = self._finish(choice)
            ids = self._request.options.shown(token_ids=choice.fold.tokens)
            said = {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": finish}
            choices.append({**said, **ids})
        more: dict[str, Any] = {"prompt_logprobs": None}  # these are null where vLLM has them as null
        more |= self._request.options.shown(prompt_token_ids=self.prompt_ids)
        if self._request.prompt_logprobs:  # of a chat's one prompt, beside its choices, as vLLM has it
            more["prompt_logprobs"] = prompt_logprobs(self.choices[0].fold.prompt_logprobs or (), self._bytes_of)
        return {**self._head("chat.completion"), "choices": choices, "usage": self.usage(), **more}

    # -- both ----------------------------------------------------------------------------------------------------------

    @property
    def completion_tokens(self) -> int:
        return sum(choice.fold.count for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        counted = [choice.fold.prompt_tokens for choice in self.choices if choice.fold.prompt_tokens is not None]
        return usage(self.prompt_tokens or max(counted, default=0), self.completion_tokens)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created_s,
            "model": self._request.model,
            "service_tier": None,
            "system_fingerprint": None,
        }

    def _finish(self, choice: _Choice) -> str:
        called = choice.calls.names and self._request.tool_choice.mode != "named"
        return "tool_calls" if called and choice.fold.finish != "length" else choice.fold.finish or "stop"

    def _logprobs(self, tokens: Sequence[int], rows: Sequence[Mapping[str, Mapping[str, Any]]]) -> Any:
        if self._request.top_logprobs is None:
            return None
        named = self._request.options.names(self._bytes_of)
        found = token_logprobs(tokens, rows, self._request.top_logprobs, named)
        return {"content": [_logprob(one) for one in found], "refusal": None}


def _logprob(found: TokenLogprob) -> dict[str, Any]:
    candidates = [{"token": token, "logprob": logprob, "bytes": list(raw)} for token, raw, logprob in found.candidates]
    return {"token": found.token, "logprob": found.logprob, "bytes": list(found.raw), "top_logprobs": candidates}
