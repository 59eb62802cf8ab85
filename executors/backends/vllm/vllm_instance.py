"""An instance over vLLM's AsyncLLM: each request is a task that reads its tokens from the engine.

The engine batches by itself, so the instance takes the next batch at once. When the engine dies, all requests end with
`InstanceDied`: the executor ends the process and makes the instance again, and an idle instance says so when its health
is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from charonia.backend import InstanceDied, ModelRequest, ModelResponse, ResponseStream
from charonia.errors import Cancelled, CharoniaError, InternalError, InvalidArgument, StreamInterrupted

from .engine_arguments import EngineArguments
from .prompt_requests import PromptRequest, embedding_request, is_embedding, prompt_request
from .sampling_arguments import SamplingArguments, lora_number, sampling_arguments, scalar_kinds
from .stream_records import Recorded, continues_after_tokens, pack_record, read_record
from .text_responses import Gained, embedding_response, gained_by, text_response

CANCELLED = "Request was cancelled"
_FAILED = "Error generating stream: "
_INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are no whole character."""


class VllmInstance:
    """A `StreamingInstance` over one engine, which it shuts down. `supported` are the engine's tasks.

    With `resumes` its streams leave in the log what another run needs to go on after them.
    """

    checks_health = True
    reports_responses = False
    """As Triton's, whose vLLM backend is a python model."""

    def __init__(
        self,
        engine: Any,
        model: str,
        supported: frozenset[str],
        written: EngineArguments,
        *,
        resumes: bool = False,
    ) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        self._engine = engine
        self._model = model
        self._supported = supported
        self._written = written
        self._resumes = resumes
        self._names = frozenset(SamplingParams.__annotations__)
        self._kinds = scalar_kinds(SamplingParams.__annotations__)
        self._dead_errors: tuple[type[BaseException], ...] = (EngineDeadError,)
        self._running: dict[int, asyncio.Task[None]] = {}
        """By `id` of a request that is being executed."""
        self._cancelled: set[int] = set()
        """Those of them that are cancelled."""

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        """Answer requests with the engine's tokens. Raises `InstanceDied` when the engine is dead."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._answer(request, index, responses)) for index, request in enumerate(requests)]
        for request, task in zip(requests, tasks, strict=True):
            self._running[id(request)] = task
        responses.free()
        try:
            pending = set(tasks)
            while pending:
                ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    if task.cancelled():  # before it began
                        responses.send(tasks.index(task), ModelResponse(error=Cancelled(CANCELLED)), final=True)
                    else:
                        task.result()
        finally:
            for task in tasks:
                task.cancel()
            for request in requests:
                self._running.pop(id(request), None)
                self._cancelled.discard(id(request))

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        """End requests: the engine forgets them before its next step."""
        self._cancel([id(request) for request in requests])

    async def check_health(self) -> bool:
        """Whether the engine is alive. Raises `InstanceDied` when it is not: it stays dead."""
        try:
            await self._engine.check_health()
        except self._dead_errors as error:
            raise self._death(error) from None
        return True

    async def close_instance(self) -> None:
        """End running requests and the engine. A second call does nothing."""
        self._cancel(list(self._running))
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)

    def _cancel(self, ids: Sequence[int]) -> None:
        for one in ids:
            if one in self._running and one not in self._cancelled:
                self._cancelled.add(one)
                self._running[one].cancel()

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _answer(self, request: ModelRequest, index: int, responses: ResponseStream) -> None:
        """Answer one request. Raises `InstanceDied` and nothing else."""
        error: CharoniaError
        try:
            if is_embedding(request):
                await self._embed(request, index, responses)
            else:
                await self._generate(request, index, responses)
            return
        except InstanceDied:
            raise
        except self._dead_errors as dead:
            raise self._death(dead) from None
        except asyncio.CancelledError:
            if id(request) not in self._cancelled:
                raise
            error = Cancelled(CANCELLED)
        except Exception as failure:
            error = self._error_of(failure)
        responses.send(index, ModelResponse(error=error), final=True)

    async def _generate(self, request: ModelRequest, index: int, responses: ResponseStream) -> None:
        self._check_task("generate")
        asked = prompt_request(request)
        sampling = sampling_arguments(asked.parameters, self._names, self._kinds)
        lora = lora_number(sampling.lora, self._written.loras, enabled=self._written.enables_lora)
        if request.progress:
            sampling = sampling.computing_the_prompt()
        parameters = _sampling(sampling, streams=asked.streams)
        adapter = _lora_request(sampling.lora, lora, self._written)
        stream = _Stream(asked, parameters, request.outputs, index, responses, records=self._resumes and asked.streams)
        recorded: Recorded | None = None
        prompt = _prompt(asked)
        if request.progress:
            recorded = Recorded(request.progress)
            for record in request.progress:
                stream.send_again(record)
            continued = self._continued(asked, parameters, recorded)
            if continued is not None:
                stream.input_tokens = recorded.input_tokens
                prompt, recorded = continued, None
            await responses.drain()
        outputs = self._engine.generate(prompt, parameters, uuid.uuid4().hex, lora_request=adapter)
        async with contextlib.aclosing(outputs) as found:
            async for output in found:
                stream.send(output, recorded)
                if output.finished:
                    return
                await responses.drain()
        raise InternalError("the engine ended a request without a last output")

    def _continued(self, asked: PromptRequest, parameters: Any, recorded: Recorded) -> Any:
        """The prompt with the recorded tokens, whose number is taken off the parameters; None to begin again."""
        if asked.images or not continues_after_tokens(parameters, recorded):
            return None
        tokenizer = self._engine.get_tokenizer()
        tokens = recorded.tokens[0]
        if tokenizer.decode(tokens).endswith(_INCOMPLETE):
            return None
        before = list(asked.token_ids) or tokenizer.encode(asked.text)
        if len(before) != recorded.input_tokens:
            return None
        if parameters.max_tokens is not None:
            parameters.max_tokens -= len(tokens)
        return {"prompt_token_ids": [*before, *tokens]}

    async def _embed(self, request: ModelRequest, index: int, responses: ResponseStream) -> None:
        from vllm.outputs import EmbeddingRequestOutput
        from vllm.pooling_params import PoolingParams

        self._check_task("embed")
        asked = embedding_request(request)
        parameters = PoolingParams(task="embed", dimensions=asked.dimensions or None)
        prompt = {"prompt_token_ids": list(asked.token_ids)} if asked.token_ids else asked.text
        outputs: AsyncIterator[Any] = self._engine.encode(prompt, parameters, uuid.uuid4().hex)
        async for output in outputs:
            if output.finished:
                found = EmbeddingRequestOutput.from_base(output)
                response = embedding_response(
                    found.outputs.embedding,
                    asked.returns,
                    input_tokens=len(found.prompt_token_ids),
                    outputs=request.outputs,
                )
                responses.send(index, response, final=True)
                return
        raise InternalError("the engine ended a request without an output")

    def _check_task(self, task: str) -> None:
        if task not in self._supported:
            raise InvalidArgument(f"Model {self._model} does not support '{task}' request")

    def _error_of(self, failure: Exception) -> CharoniaError:
        """The error of a request, in Triton's words: what vLLM refuses is the client's fault, the rest is not."""
        from vllm.exceptions import VLLMClientError

        cause = failure.__cause__ if not str(failure) and failure.__cause__ is not None else failure
        text = str(cause) or type(cause).__name__
        if isinstance(cause, StreamInterrupted):
            return cause
        if isinstance(cause, CharoniaError):
            plain = text.startswith("LoRA ")  # these come before the stream in Triton
            return type(cause)(text if plain else _FAILED + text)
        if isinstance(cause, VLLMClientError | ValueError):
            return InvalidArgument(_FAILED + text)
        return InternalError(_FAILED + text)

    def _death(self, error: BaseException) -> InstanceDied:
        return InstanceDied(f"the engine of model '{self._model}' is dead: {error}")


class _Stream:
    """The responses of one request to generate. With `records` each leaves its record in the log."""

    def __init__(
        self,
        asked: PromptRequest,
        parameters: Any,
        wanted: Sequence[str],
        index: int,
        responses: ResponseStream,
        *,
        records: bool,
    ) -> None:
        self.input_tokens = 0
        """The number of tokens of the prompt, where it is not what the engine was given."""
        self._asked = asked
        self._texts: int = parameters.n
        self._wanted = wanted
        self._index = index
        self._responses = responses
        self._records = records
        self._is_first = True

    def send_again(self, record: bytes) -> None:
        """Give a response again that an earlier run gave."""
        gained, input_tokens = read_record(record)
        self._send(gained, input_tokens, record, None, final=False)

    def send(self, output: Any, recorded: Recorded | None) -> None:
        """Give a response with what an output of the engine has beyond what is recorded, if there is something.

        Raises `StreamInterrupted` when it is not the same as what is recorded.
        """
        found: dict[int, Gained] = {}
        for one in output.outputs:
            gained = gained_by(one, with_logprobs="logprobs" in self._asked.returns)
            rest = gained if recorded is None else recorded.rest(one.index, gained)
            if rest is not None:
                found[one.index] = rest
        if not found and not output.finished:
            return
        gains = [found.get(index, Gained()) for index in range(self._texts)]
        input_tokens = self.input_tokens or len(output.prompt_token_ids or ())
        record = pack_record(gains, input_tokens) if self._records and not output.finished else b""
        self._send(gains, input_tokens, record, output.kv_transfer_params, final=output.finished)

    def _send(self, gained: Sequence[Gained], input_tokens: int, record: bytes, transfer: Any, *, final: bool) -> None:
        prompt = self._asked.text if self._asked.prepends_prompt else ""
        returns, wanted = self._asked.returns, self._wanted
        response = text_response(
            gained, returns, prompt=prompt, input_tokens=input_tokens, transfer=transfer, outputs=wanted
        )
        response.progress = record
        if self._is_first:
            self._is_first = False
            response.tokens += input_tokens
        self._responses.send(self._index, response, final=final)


def _sampling(sampling: SamplingArguments, *, streams: bool) -> Any:
    """vLLM's parameters. Raises vLLM's errors."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
    arguments = dict(sampling.arguments)
    if sampling.structured is not None:
        try:
            arguments["structured_outputs"] = StructuredOutputsParams(**sampling.structured)
        except TypeError as error:
            raise InvalidArgument(str(error)) from None
    return SamplingParams(**arguments, output_kind=kind)


def _lora_request(name: str, number: int, written: EngineArguments) -> Any:
    if not number:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, written.loras[name])


def _prompt(asked: PromptRequest) -> Any:
    """The prompt as vLLM takes it. Raises `InvalidArgument` for images that cannot be read."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(asked.token_ids)} if asked.token_ids else {"prompt": asked.text}
    if asked.images:
        from PIL import Image

        try:
            images = [Image.open(io.BytesIO(data)).convert("RGB") for data in asked.images]
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise InvalidArgument(f"'image' cannot be read: {error}") from None
        prompt["multi_modal_data"] = {"image": images}
    return prompt
