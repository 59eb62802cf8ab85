"""Chats and completions as requests of models: made, sent together, and read as deltas while they run.

`shapes` reads bodies and writes answers, `text_models` has tokenizers, `text_routes` the endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument, Unsupported
from charonia.generation.parameters import (
    MAX_PROMPT_CANDIDATES,
    StructuredOutput,
    check_vocabulary,
    parse_sampling,
    structured_output,
)
from charonia.generation.prompt_keys import route_of_tokens
from charonia.generation.text_tensors import PROMPT_LOGPROBS, RETURN_PROMPT_LOGPROBS, STREAM_INTERVAL
from charonia.generation.tool_calls import MARKED_BY_SPECIAL_TOKENS
from charonia.inference import LATEST_VERSION, InferenceRequest
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from gateway.access.token_bounds import PendingTokens
from gateway.handler import Handler
from gateway.http.codec.error_replies import Headers
from gateway.requests.delivery import ANYONE, Caller, DeliveryOptions

from .shapes.api_errors import CONTEXT_LENGTH, ApiError
from .shapes.chat_shapes import PROMPT_IDS, ChatRequest
from .shapes.completion_shapes import CompletionRequest, Prompt
from .shapes.sampling_fields import seed_of
from .shapes.text_answers import TextDelta, read_delta
from .shapes.token_options import TokenOptions
from .text_metrics import TextCounts
from .text_models import NOBODY, Asked, TextModel, TextModels, TextTools, size_of, too_long, too_long_to_cut

_WAITING_DELTAS = 64
"""Deltas of all choices together that wait for a slow client; then their readers wait as well."""

_CUT_CONTEXTS = 16
"""A prompt of token ids that is cut may have so many times those that the context has room for."""

_FIRST_WORD = re.compile(r"\w+")
"""Of a message about parameters: the parameter that it is about."""

_FLAGS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_token_ids")


@dataclass(slots=True)
class PreparedText:
    """The requests of one call: a choice each, in the order of their index.

    `prompts` has for each prompt its text, "" where it was given as tokens; `prompt_tokens` is 0 where the model has no
    tokenizer here.
    """

    model: TextModel
    tools: TextTools | None
    requests: list[InferenceRequest]
    prompts: list[str]
    prompt_tokens: int = 0
    prompt_ids: Sequence[Sequence[int]] = ()
    """The tokens of each prompt, where the model has a tokenizer here."""
    tool_format: str = ""
    """How the model writes calls of tools, "" if it writes none."""
    text_tokens: Sequence[int] = ()
    """Of each request the tokens of its prompt and those it may generate. Without a tokenizer four bytes are one."""

    def set_priority(self, level: int) -> None:
        """Give all requests a priority level (S8)."""
        for request in self.requests:
            request.priority = level


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the prompts of a call are cut: at most `room` tokens of one are kept."""

    options: TokenOptions
    room: int

    @classmethod
    def of(cls, options: TokenOptions, model: TextModel, tools: TextTools | None, answer_tokens: int) -> _Cut | None:
        """None where nothing is to be cut. Raises a 400 `ApiError` where the model cannot be given tokens."""
        if options.kept is None:
            return None
        if tools is None or "prompt_token_ids" not in model.served.interface.inputs:
            raise ApiError(
                f"The model '{model.name}' takes no tokens: 'truncate_prompt_tokens' is not supported by its backend",
                param="truncate_prompt_tokens",
                code="unsupported_parameter",
            )
        return cls(options, max(1, tools.context - answer_tokens))


@dataclass(slots=True)
class TextServing:
    """Makes and sends the requests of texts."""

    handler: Handler
    models: TextModels
    counts: TextCounts = field(default_factory=TextCounts)
    pending: PendingTokens = field(init=False)
    """The tokens of the calls that run here, by tenant."""

    def __post_init__(self) -> None:
        self.pending = PendingTokens(self.handler.token_bounds)

    # -- making --------------------------------------------------------------------------------------------------------

    async def prepare_chat(self, chat: ChatRequest, caller: Caller = ANYONE, asked: Asked = NOBODY) -> PreparedText:
        """The requests of a chat. Raises `ApiError`; nothing has entered the log then."""
        bound = self.pending.bounds(caller.tenant).text
        model = self._generating(chat.model, asked)
        tools = await self.models.tools(model)
        await self._check_structure(chat.sampling, tools, chat.structured_by)
        prompt: Prompt
        if chat.prompt_ids is None:
            prompt = await self.models.render(tools, chat)
        elif tools is None or "prompt_token_ids" not in model.served.interface.inputs:
            raise ApiError(f"The model '{model.name}' takes no tokens", param=PROMPT_IDS, code="unsupported_parameter")
        else:
            prompt = chat.prompt_ids
        cut = _Cut.of(chat.options, model, tools, chat.max_tokens or 1)
        tokens = [await self._tokens(tools, prompt, cut, PROMPT_IDS, special=False)] if tools is not None else []
        max_tokens = chat.max_tokens
        if max_tokens is None and tools is not None:
            longest = min(bound, tools.context) if bound else tools.context
            max_tokens = max(1, longest - len(tokens[0]))
        if chat.prompt_logprobs:
            _check_scores(model, tools, "prompt_logprobs")
        tool_format, sampling = model.tool_format(tools), chat.sampling
        if chat.tool_choice.mode == "auto" and tool_format in MARKED_BY_SPECIAL_TOKENS:
            sampling = {**sampling, "skip_special_tokens": False}
        prompts = [prompt if isinstance(prompt, str) else ""]
        found = self._prepared(model, tools, prompts, tokens, sampling, chat.count, max_tokens, stream=chat.stream)
        _check_length(found, bound)
        found.tool_format = tool_format
        found.set_priority(chat.priority)
        return found

    async def prepare_completion(
        self, wanted: CompletionRequest, caller: Caller = ANYONE, asked: Asked = NOBODY
    ) -> PreparedText:
        """The requests of a completion. Raises `ApiError`; nothing has entered the log then."""
        model = self._generating(wanted.model, asked)
        tools = await self.models.tools(model)
        await self._check_structure(wanted.sampling, tools, wanted.structured_by)
        if "prompt_logprobs" in wanted.sampling:
            _check_scores(model, tools, "echo" if wanted.prompt_logprobs is None else "prompt_logprobs")
        cut = _Cut.of(wanted.options, model, tools, wanted.max_tokens)
        prompts = [prompt if isinstance(prompt, str) and cut is None else "" for prompt in wanted.prompts]
        tokens: list[list[int]] = []
        for prompt in wanted.prompts:
            if tools is not None:
                tokens.append(await self._tokens(tools, prompt, cut, "prompt", special=wanted.add_special_tokens))
            elif not isinstance(prompt, str):
                if "prompt_token_ids" not in model.served.interface.inputs:
                    raise ApiError("the model has no tokenizer: 'prompt' must be text", param="prompt")
                tokens.append(prompt)
        if wanted.echo:
            prompts = [text or (self._text(tools, tokens[at]) if tokens else "") for at, text in enumerate(prompts)]
        found = self._prepared(
            *(model, tools, prompts, tokens, wanted.sampling, wanted.count, wanted.max_tokens), stream=wanted.stream
        )
        _check_length(found, self.pending.bounds(caller.tenant).text)
        found.set_priority(wanted.priority)
        return found

    def _generating(self, name: str, asked: Asked) -> TextModel:
        model = self.models.find(name, asked)
        if not model.generates:
            raise ApiError(
                f"The model '{name}' does not generate text: it has no text_input and text_output", param="model"
            )
        return model

    async def _tokens(
        self, tools: TextTools, prompt: Prompt, cut: _Cut | None, param: str, *, special: bool
    ) -> list[int]:
        if isinstance(prompt, str):
            found = await self.models.encode(tools, prompt, special=special, is_cut=cut is not None)
        elif cut is None and len(prompt) > tools.context:
            raise too_long(tools.context, len(prompt))
        elif len(prompt) > (most := tools.context * _CUT_CONTEXTS):
            raise too_long_to_cut(most, len(prompt), "tokens")
        elif (largest := max(prompt, default=0)) >= (known := tools.tokenizer.vocabulary):
            raise ApiError(
                f"'{param}' has token id {largest}, out of vocabulary: the model has {known} tokens", param=param
            )
        else:
            found = prompt
        return found if cut is None else cut.options.cut(found, cut.room)

    def _text(self, tools: TextTools | None, tokens: list[int]) -> str:
        return tools.tokenizer.decode(tokens).decode("utf-8", "replace") if tools is not None else ""

    def _prepared(
        self,
        model: TextModel,
        tools: TextTools | None,
        prompts: list[str],
        tokens: list[list[int]],
        sampling: Mapping[str, Any],
        count: int,
        max_tokens: int | None,
        *,
        stream: bool,
    ) -> PreparedText:
        if count > 1:
            # each choice is a request with the whole prompt; `echo` repeats its text, too
            sizes = [max(size_of(prompt), 4 * len(tokens[at]) if tokens else 0) for at, prompt in enumerate(prompts)]
            self.models.check_size(count * sum(sizes), f"the prompts of 'n' = {count} choices", "n")
        _check_candidates(sampling, tokens, count)
        requests = []
        seed = sampling.get("seed")
        seed = secrets.randbits(62) if seed is None or seed == -1 else seed
        wanted = {**sampling, **({"max_tokens": max_tokens} if max_tokens is not None else {})}
        if model.adapter:
            wanted["lora_name"] = model.adapter
        for at, prompt in enumerate(prompts):
            ids = tokens[at] if tokens else None
            if not ids and (ids is not None or not prompt):
                raise ApiError("the prompt has no tokens", param="prompt")
            if tools is not None and ids is not None:
                if len(ids) >= tools.context:
                    raise too_long(tools.context, len(ids))
                if (max_tokens or 0) + len(ids) > tools.context:
                    raise too_long(tools.context, len(ids), max_tokens or 0)
            self._check(wanted, tools, len(ids or ()))
            route = None if ids is None else route_of_tokens(ids, model.adapter, max_tokens or 0)
            for index in range(count):
                number = at * count + index
                own = {**wanted, "seed": seed_of(seed, number)}
                requests.append(_request(model, prompt, ids, own, stream=stream))
                requests[-1].prompt = route
        counted = sum(map(len, tokens)) if tools is not None else 0
        lengths = [len(tokens[at]) if tokens else -(-size_of(prompt) // 4) for at, prompt in enumerate(prompts)]
        texts = [length + (max_tokens or 0) for length in lengths for _ in range(count)]
        return PreparedText(model, tools, requests, prompts, counted, tokens, text_tokens=texts)

    async def _check_structure(self, sampling: Mapping[str, Any], tools: TextTools | None, param: str) -> None:
        """Raises a 400 `ApiError` for a schema or grammar that no engine would take, or that takes too much work.

        `param` is the field that it is in.
        """
        given = sampling.get("structured_outputs")
        if given is None:
            return
        try:
            structured = structured_output(given)
            await self.handler.offload.in_thread(len(structured.text), _compile, structured, tools)
        except InvalidArgument as error:
            raise ApiError(error.message, param=param) from None
        except Unsupported:
            pass  # only engines have the library: they check

    def _check(self, wanted: Mapping[str, Any], tools: TextTools | None, prompt_tokens: int) -> None:
        """Raises a 400 `ApiError` for parameters that no engine would take."""
        context = tools.context if tools is not None else 2**31 - 1
        try:
            parameters = parse_sampling(wanted, context=context, prompt_tokens=prompt_tokens, seed=lambda: 0)
            if tools is not None:
                check_vocabulary(parameters, tools.tokenizer.vocabulary)
        except InvalidArgument as error:
            named = _FIRST_WORD.match(error.message)
            raise ApiError(error.message, param=named[0] if named and named[0] in wanted else None) from None

    # -- running -------------------------------------------------------------------------------------------------------

    async def deltas(
        self, prepared: PreparedText, caller: Caller = ANYONE, endpoint: str = ""
    ) -> AsyncGenerator[tuple[int, TextDelta]]:
        """What all choices add, with the index of the choice, as it comes; every choice ends with a finish reason.

        Raises the error of a choice, which ends the others. Closing the generator cancels the requests; what was
        generated until then is counted.
        """
        if prepared.model.served.interface.resumable:
            for request in prepared.requests:
                keep_progress(request)
        name = prepared.model.name
        with (
            self.counts.call(endpoint, name, caller.tenant, prepared.prompt_tokens) as counted,
            self.pending.of_call(caller.tenant, name, sum(prepared.text_tokens)),
        ):
            async with contextlib.aclosing(self._merged(prepared.requests, caller)) as merged:
                async for index, delta in merged:
                    counted.add(index, delta)
                    yield index, delta

    def token_headers(self, prepared: PreparedText, caller: Caller) -> Headers:
        """The headers of a caller with a bound on tokens: the bound, and what is left of it beside this call."""
        bound = self.pending.bounds(caller.tenant).pending
        if not bound:
            return []
        left = self.pending.remaining(caller.tenant, prepared.model.name) - sum(prepared.text_tokens)
        return [(b"x-ratelimit-limit-tokens", b"%d" % bound), (b"x-ratelimit-remaining-tokens", b"%d" % max(0, left))]

    async def _merged(
        self, requests: Sequence[InferenceRequest], caller: Caller
    ) -> AsyncGenerator[tuple[int, TextDelta]]:
        if len(requests) == 1:
            async with contextlib.aclosing(self._one(requests[0], caller)) as deltas:
                async for only in deltas:
                    yield 0, only
            return
        queue: asyncio.Queue[tuple[int, TextDelta | None]] = asyncio.Queue(_WAITING_DELTAS)

        async def read(index: int, request: InferenceRequest) -> None:
            try:
                async with contextlib.aclosing(self._one(request, caller)) as deltas:
                    async for delta in deltas:
                        await queue.put((index, delta))
            finally:
                if not task_of[index].cancelling():
                    await queue.put((index, None))

        task_of = {
            index: asyncio.create_task(read(index, request), name="openai-choice")
            for index, request in enumerate(requests)
        }
        try:
            left = len(task_of)
            while left:
                index, delta = await queue.get()
                if delta is not None:
                    yield index, delta
                    continue
                left -= 1
                await task_of[index]
        finally:
            for task in task_of.values():
                task.cancel()
            await asyncio.gather(*task_of.values(), return_exceptions=True)

    async def _one(self, request: InferenceRequest, caller: Caller) -> AsyncGenerator[TextDelta]:
        """The deltas of one request; the last has a finish reason, and only that one."""
        options = DeliveryOptions(caller=caller) if caller is not ANYONE else None
        held: TextDelta | None = None
        async with contextlib.aclosing(self.handler.stream(request, options=options)) as responses:
            async for response in responses:
                if response.error is not None:
                    raise response.error
                if not response.outputs:  # it adds nothing, and the last one may have none
                    continue
                if held is not None:
                    yield held
                held = None
                delta = read_delta(response)
                if delta.finish or response.final:
                    held = delta  # more may come only as a flag
                else:
                    yield delta
        yield held if held is not None and held.finish else _ended(held)


def keep_progress(request: InferenceRequest, interval: int = 1) -> None:
    """Have the model answer in parts, also for a call that is answered whole: then a text goes on where it was when its
    executor dies, and does not begin again. A model that can gives parts of `interval` tokens.
    """
    for at, tensor in enumerate(request.inputs):
        if tensor.name == "stream":
            request.inputs[at] = Tensor(tensor.name, tensor.datatype, tensor.shape, b"\1")
    if interval > 1 and request.served is not None and STREAM_INTERVAL.name in request.served.interface.inputs:
        shape = shape_of(request.served.interface, STREAM_INTERVAL.name, 1)
        request.inputs.append(Tensor(STREAM_INTERVAL.name, DataType.INT32, shape, interval.to_bytes(4, "little")))


def _compile(structured: StructuredOutput, tools: TextTools | None) -> None:
    from charonia.generation.grammar import check

    check(structured, tools.tokenizer if tools is not None else None)


def _ended(delta: TextDelta | None) -> TextDelta:
    """The last delta of a model that does not say why its text ended."""
    if delta is None:
        return TextDelta("", finish="stop")
    return replace(delta, finish="stop")


def _request(
    model: TextModel, prompt: str, tokens: Sequence[int] | None, sampling: Mapping[str, Any], *, stream: bool
) -> InferenceRequest:
    """The request of one choice, with those of the tensors that the model has."""
    interface = model.served.interface
    inputs: list[Tensor] = []

    def add(name: str, datatype: DataType, count: int, data: bytes) -> None:
        if name in interface.inputs:
            inputs.append(Tensor(name, datatype, shape_of(interface, name, count), data))

    if tokens is not None and "prompt_token_ids" in interface.inputs:
        add("prompt_token_ids", DataType.INT32, len(tokens), np.asarray(tokens, "<i4").tobytes())
    else:
        add("text_input", DataType.BYTES, 1, element(prompt.encode("utf-8", "replace")))
    add("stream", DataType.BOOL, 1, b"\1" if stream else b"\0")
    add("sampling_parameters", DataType.BYTES, 1, element(orjson.dumps(sampling)))
    add("exclude_input_in_output", DataType.BOOL, 1, b"\1")
    for name in _FLAGS:
        add(name, DataType.BOOL, 1, b"\1")
    if sampling.get("logprobs") is not None:
        add("return_logprobs", DataType.BOOL, 1, b"\1")
    if sampling.get("prompt_logprobs") is not None:
        add(RETURN_PROMPT_LOGPROBS.name, DataType.BOOL, 1, b"\1")
    return InferenceRequest(interface.name, LATEST_VERSION, inputs, served=model.served)


def _check_scores(model: TextModel, tools: TextTools | None, param: str) -> None:
    """Raises a 400 `ApiError` for a model that does not say how likely the tokens of prompts are."""
    interface = model.served.interface
    gives = RETURN_PROMPT_LOGPROBS.name in interface.inputs and PROMPT_LOGPROBS.name in interface.outputs
    if not gives or tools is None:
        raise ApiError(
            f"The model '{model.name}' gives no log probabilities of prompts: 'prompt_logprobs', and 'echo' with "
            "'logprobs', are not supported by its backend",
            param=param,
            code="unsupported_parameter",
        )


def _check_length(prepared: PreparedText, bound: int) -> None:
    """Raises a 400 `ApiError` for a text that may have more tokens than the caller's tenant may ask for."""
    longest = max(prepared.text_tokens, default=0)
    if bound and longest > bound:
        raise ApiError(
            f"a text may have {longest} tokens with its prompt, the bound is {bound}: reduce the length of the "
            "prompt or of the answer",
            code=CONTEXT_LENGTH,
        )


def _check_candidates(sampling: Mapping[str, Any], tokens: Sequence[Sequence[int]], count: int) -> None:
    """Raises a 400 `ApiError` for more candidates of prompts than one answer may have: each choice has those of its
    prompt. `parse_sampling` refuses a single prompt with too many.
    """
    asked = sampling.get("prompt_logprobs")
    if asked is None or count * len(tokens) <= 1:
        return
    total = sum(map(len, tokens))
    if (asked + 1) * count * total > MAX_PROMPT_CANDIDATES:
        raise ApiError(
            f"log probabilities of {asked} candidates, of {len(tokens)} prompts with {total} tokens in {count} choices "
            f"each, are more than {MAX_PROMPT_CANDIDATES} candidates: ask for fewer, or in several calls",
            param="n" if count > 1 else "prompt",
        )


def shape_of(interface: ModelInterface, name: str, count: int) -> tuple[int, ...]:
    """The shape of so many elements as the model declares this input: `[1]`, `[1,1]` and `[-1]` are all in use."""
    dims = [count if size == -1 else size for size in interface.inputs[name].dims]
    return (1, *dims) if interface.batching else tuple(dims)


def element(data: bytes) -> bytes:
    """One BYTES element in its raw encoding (T3)."""
    return len(data).to_bytes(4, "little") + data
