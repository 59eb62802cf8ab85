"""Completions without messages: the request read, the answer and its chunks written. Pure.

`chat_shapes` does the same for chats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia.generation.parameters import DEFAULT_MAX_TOKENS, MAX_LOGPROBS

from .api_errors import ApiError, missing
from .sampling_fields import (
    MAX_CHOICES,
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
from .text_answers import TextDelta, TextFold, TokenBytes, prompt_logprobs, token_logprobs, usage
from .token_options import NO_OPTIONS, TokenOptions, chosen_ids, token_options

Prompt = str | list[int]

_UNKNOWN: Mapping[str, Any] = {"logprob": 0.0, "rank": 1}
"""Stands for the first token of a prompt, which has no probability."""

_NO_IDS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A completion as it was asked for: `count` texts for each prompt. `logprobs` None: no log probabilities."""

    model: str
    prompts: list[Prompt]
    sampling: dict[str, Any]
    count: int = 1
    max_tokens: int = DEFAULT_MAX_TOKENS
    stream: bool = False
    include_usage: bool = False
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    prompt_logprobs: int | None = None
    """The candidates for each token of the prompts that the answer lists; None: it does not."""
    only_prompt: bool = False
    """`echo` with `max_tokens` 0: the model has to give a token, which is left out of the answer."""
    priority: int = 0
    """The priority level, 0 for the model's default."""
    counts_always: bool = False
    """Whether each chunk of a stream has the usage so far."""
    options: TokenOptions = NO_OPTIONS
    structured_by: str = ""
    """The field that says what form the text has to have, if one does."""


def read_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """The request of a body. Raises `ApiError`."""
    model = text(body, "model")
    prompts = _prompts(body.get("prompt"))
    if body.get("suffix") not in (None, ""):
        raise ApiError("'suffix' is not supported", param="suffix")
    stream = flag(body, "stream")
    sampling = sampling_of(body)
    if (structure := structure_of(body)) is not None:
        sampling["structured_outputs"] = structure
    logprobs = whole(body, "logprobs", 0, MAX_LOGPROBS)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    count = choices_of(body)
    if count * len(prompts) > MAX_CHOICES:
        raise ApiError(f"'prompt' and 'n' ask for {count * len(prompts)} texts, the bound is {MAX_CHOICES}", param="n")
    echo = flag(body, "echo")
    scored = prompt_logprobs_of(body, stream=stream)
    if scored is not None or (echo and logprobs is not None):
        sampling["prompt_logprobs"] = logprobs if scored is None else scored
    max_tokens = whole(body, "max_tokens", 0 if echo else 1, 2**31 - 1)
    if chosen := chosen_ids(body, has_logprobs=logprobs is not None):
        if max_tokens == 0:
            raise ApiError("'logprob_token_ids' needs tokens: 'max_tokens' is 0", param="logprob_token_ids")
        sampling["logprob_token_ids"] = chosen
        logprobs = len(chosen) + 1  # all of them are shown, and the sampled token
    return CompletionRequest(
        model,
        prompts,
        sampling,
        count,
        DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens or 1,
        stream,
        includes_usage(body, stream=stream),
        logprobs,
        echo,
        flag(body, "add_special_tokens", True),
        scored,
        max_tokens == 0,
        priority_of(body),
        counts_always(body),
        token_options(body),
        structure_field(body),
    )


def _prompts(given: Any) -> list[Prompt]:
    if given is None:
        raise missing("prompt")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise ApiError("'prompt' must be a string, token ids, or a list of either", param="prompt")
    if type(given[0]) is int:
        return [token_ids(given, "prompt")]
    if len(given) > MAX_CHOICES:
        raise ApiError(f"'prompt' has {len(given)} prompts, the bound is {MAX_CHOICES}", param="prompt")
    if all(isinstance(one, str) for one in given):
        return given
    if not all(isinstance(one, list) and one for one in given):
        raise ApiError("'prompt' must be a string, token ids, or a list of either", param="prompt")
    return [token_ids(one, "prompt") for one in given]


@dataclass(slots=True)
class _Choice:
    fold: TextFold = field(default_factory=TextFold)
    offset: int = 0
    """Characters before the next token, of prompt and text."""
    begun: bool = False


class CompletionAnswer:
    """Writes the answer to a completion, as chunks or whole.

    `prompts` are the texts of `echo`, one for each prompt, and `prompt_ids` their tokens, where they are known.
    """

    def __init__(
        self,
        request: CompletionRequest,
        answer_id: str,
        created_s: int,
        bytes_of: TokenBytes | None = None,
        prompts: Sequence[str] = (),
        prompt_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        self.id = answer_id
        self._request = request
        self._created_s = created_s
        self._bytes_of = bytes_of
        self._prompts = prompts
        self._prompt_ids = prompt_ids
        self._echoes_logprobs = request.echo and request.logprobs is not None
        self.choices = [_Choice() for _ in range(request.count * len(request.prompts))]
        self.prompt_tokens = 0

    def opening(self) -> Iterator[dict[str, Any]]:
        """The chunks before any text: the prompts, where they are to be repeated."""
        for index in range(len(self.choices)):
            if self._request.echo and not self._echoes_logprobs:
                yield self._chunk(index, self._prompt(index), None, None)

    def chunks(self, index: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """The chunk of a delta of a choice; the last one has its finish reason."""
        choice = self.choices[index]
        choice.fold.add(delta)
        if self._echoes_logprobs and not choice.begun:
            yield self._chunk(index, self._prompt(index), self._prompt_logprobs(index), None)
        if self._request.only_prompt:
            delta = TextDelta("", finish=delta.finish)
        logprobs = self._logprobs(choice, delta.tokens, delta.logprobs)
        ids = self._ids(index, delta.tokens) if self._request.options.shows_ids else {}
        if choice.begun and ids:
            ids["prompt_token_ids"] = None
        choice.begun = True
        if delta.text or delta.finish or logprobs is not None or ids:
            yield self._chunk(index, delta.text, logprobs, delta.finish or None, ids)

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk of `stream_options.include_usage`."""
        return {**self._head(), "choices": [], "usage": self.usage()}

    def add(self, index: int, delta: TextDelta) -> None:
        """Take a delta of a choice, for `document`."""
        self.choices[index].fold.add(delta)

    def document(self) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for index, choice in enumerate(self.choices):
            fold = choice.fold
            before = self._prompt_logprobs(index) if self._echoes_logprobs else None
            left_out = self._request.only_prompt
            logprobs = self._logprobs(choice, *(((), ()) if left_out else (fold.tokens, fold.logprobs)))
            if before is not None and logprobs is not None:
                logprobs = {name: [*before[name], *values] for name, values in logprobs.items()}
            own_text = "" if left_out else fold.text
            whole_text = self._prompt(index) + own_text if self._request.echo else own_text
            document = {"index": index, "text": whole_text, "logprobs": logprobs}
            document |= {"finish_reason": fold.finish or "stop", "prompt_logprobs": None}  # null as vLLM has it
            document |= self._ids(index, [] if left_out else fold.tokens)
            if self._request.prompt_logprobs is not None:
                document["prompt_logprobs"] = prompt_logprobs(fold.prompt_logprobs or (), self._bytes_of)
            choices.append(document)
        return {**self._head(), "choices": choices, "usage": self.usage()}

    @property
    def completion_tokens(self) -> int:
        return 0 if self._request.only_prompt else sum(choice.fold.count for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        firsts = self.choices[:: self._request.count]
        return usage(
            self.prompt_tokens or sum(choice.fold.prompt_tokens or 0 for choice in firsts), self.completion_tokens
        )

    def _prompt(self, index: int) -> str:
        return self._prompts[index // self._request.count]

    def _ids(self, index: int, tokens: Sequence[int]) -> dict[str, list[int] | None]:
        """The members of a choice that have token ids, as vLLM's."""
        prompt = self._prompt_ids[index // self._request.count] if self._prompt_ids else None
        return self._request.options.shown(token_ids=tokens, prompt_token_ids=prompt)

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created_s,
            "model": self._request.model,
            "system_fingerprint": None,
        }

    def _chunk(
        self, index: int, new_text: str, logprobs: Any, finish: str | None, ids: Mapping[str, Any] = _NO_IDS
    ) -> dict[str, Any]:
        choice = {"index": index, "text": new_text, "logprobs": logprobs, "finish_reason": finish, **ids}
        more = {"usage": self.usage() if self._request.counts_always else None} if self._request.include_usage else {}
        return {**self._head(), "choices": [choice], **more}

    def _prompt_logprobs(self, index: int) -> dict[str, list[Any]]:
        """The members of `logprobs` for the tokens of a choice's prompt, whose first one has no probability."""
        choice = self.choices[index]
        rows = choice.fold.prompt_logprobs or ()
        ids = self._prompt_ids[index // self._request.count]
        found = self._logprobs(choice, ids, [{str(ids[0]): _UNKNOWN}, *(row or {} for row in rows[1:])])
        assert found is not None
        found["token_logprobs"][:1] = found["top_logprobs"][:1] = [None]
        return found

    def _logprobs(
        self, choice: _Choice, tokens: Sequence[int], rows: Sequence[Mapping[str, Mapping[str, Any]]]
    ) -> dict[str, Any] | None:
        most = self._request.logprobs
        if most is None:
            return None
        found = token_logprobs(tokens, rows, most, self._request.options.names(self._bytes_of))
        offsets: list[int] = []
        for one in found:
            offsets.append(choice.offset)
            choice.offset += len(one.token)
        return {
            "tokens": [one.token for one in found],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [
                {one.token: one.logprob, **{token: logprob for token, _, logprob in one.candidates}} for one in found
            ],
            "text_offset": offsets,
        }
