"""Answers one line of a batch: its requests become jobs at the lowest priority level, and their answer a line's result.

A job's idempotency key is made of batch, line and form, and the seed of a line that has none of batch and line: a
gateway that takes a batch over asks for the same jobs. What the key stands for is the line, not its request, which may
have another date in its prompt the next time. Texts of a resumable model are asked for in parts, so that a
line goes on where it was when its executor dies. `batch_runs` says which lines, `batch_lines` how results are written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from charonia.clock import monotonic_ns
from charonia.errors import (
    CANCELLED,
    Cancelled,
    CharoniaError,
    InternalError,
    NotFound,
    ResourceExhausted,
    StreamInterrupted,
    Unavailable,
)
from charonia.generation.text_tensors import STREAM_INTERVAL
from charonia.inference import LOWEST_PRIORITY, InferenceRequest, InferenceResponse
from gateway.handler import Handler
from gateway.openai.embedding_routes import EmbeddingEndpoint
from gateway.openai.shapes.api_errors import MODEL_NOT_FOUND, ApiError, Failure, error_document, status_of
from gateway.openai.shapes.chat_shapes import read_chat
from gateway.openai.shapes.completion_shapes import read_completion
from gateway.openai.shapes.text_answers import read_delta
from gateway.openai.text_routes import Prepared, TextEndpoints
from gateway.openai.text_serving import keep_progress
from gateway.requests.delivery import DeliveryOptions

from .batch_lines import BatchLine, LineResult, seed_of
from .batch_runs import BatchRun
from .response_requests import ResponseRequest, read_response_request
from .response_routes import PREFIX, StoredResponses

_PATIENCE_S = 60.0
"""How long a batch waits for its model: a server that starts again loads its models first."""
_GRACE_S = 60
"""From the end of a batch's window to the deadline of its lines: before it a gateway ends them, with the reason."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_WAIT_S = 30.0
_INTERVAL = 32
"""Tokens of a part. The job of a line keeps its parts, and no client waits for them: a part of one token would be six
times as many bytes in the log, and writes in each step. An executor that dies takes a second of work at most along.
Gateways with another number would ask for other requests: it needs another `_PARTS`, too.
"""
_PARTS = ":parts"
"""Ends the key of a job in parts. Its request is not that of a whole text: under one key the second of them would be
refused. Gateways of older releases ask for whole texts alone, and a model may get the input `stream_interval` between
two tries of a line.
"""
_OF_LINE = ":line"
"""Ends all keys. Gateways of older releases, which ask without it, have the digest of the request under their keys."""

logger = logging.getLogger("charonia.gateway.openai")


class ModelLines:
    """Asks the models of one gateway."""

    def __init__(
        self, handler: Handler, texts: TextEndpoints, embeddings: EmbeddingEndpoint, responses: StoredResponses
    ) -> None:
        self._handler = handler
        self._texts = texts
        self._embeddings = embeddings
        self._responses = responses

    async def run(self, run: BatchRun, line: BatchLine) -> LineResult:
        """What became of a line, tried again while the server has no room for it or its model is not there yet.

        Raises `Cancelled` when the run is to stop before there is an answer; jobs that are not to be stored are deleted
        then, as the line is not asked again.
        """
        is_unstored = _is_unstored(run, line)
        try:
            result = await self._run(run, line)
        except Cancelled:
            if is_unstored and run.stop and not run.lost:
                await self.delete(run, run.jobs.get(line.number, ()))
            raise
        return replace(result, unstored=tuple(run.jobs.get(line.number, ()))) if is_unstored else result

    async def cancel(self, run: BatchRun, line: BatchLine) -> None:
        """See `LineCalls`; those that are not to be stored are deleted. The jobs are found by their keys, so nothing is
        asked for again.
        """
        if _is_unstored(run, line):
            await self.forget(run, line)
            return
        for job_id in await self._left(run, line):
            with contextlib.suppress(NotFound):  # it is forgotten
                await self._handler.jobs.cancel(job_id, run.caller)

    async def forget(self, run: BatchRun, line: BatchLine) -> None:
        """See `LineCalls`."""
        if _is_unstored(run, line):
            await self.delete(run, await self._left(run, line))

    async def _left(self, run: BatchRun, line: BatchLine) -> Sequence[str]:
        """The jobs of a line that are there, whichever gateway asked for them."""
        try:
            count = _choices(run.state.endpoint, line.body)
        except ApiError:
            return ()  # its body is wrong: there is no job of it
        keys = [
            _key(run, line, index, form, end)
            for index in range(count)
            for form in ("", _PARTS)
            for end in (_OF_LINE, "")
        ]
        if not keys:
            return ()
        queries, found = self._handler.jobs.queries, list[str]()
        for model in await self._models(run, line):
            found += await queries.of_keys(model, keys, run.caller)
        return found

    async def _models(self, run: BatchRun, line: BatchLine) -> Collection[str]:
        """The models that may have jobs of a line: those that were asked, and the line's own, which a gateway of an
        older release asked without a word. A batch that one started names none, and the line's name may have led to
        another model then: those are all that have had jobs.
        """
        if run.state.asked is None:
            return await self._handler.jobs.queries.models()
        try:
            return run.state.asked | {self._texts.models.find(line.body["model"]).served.model}
        except ApiError:
            return run.state.asked

    async def delete(self, run: BatchRun, job_ids: Sequence[str]) -> None:
        """See `LineCalls`."""
        for job_id in job_ids:
            try:
                stored = await self._responses.find(PREFIX + job_id, run.caller)
                await self._responses.delete(stored, run.caller)
            except (ApiError, CharoniaError):
                pass  # it is gone, or stays until its retention
            except Exception:
                logger.exception("job %s of batch %s could not be deleted", job_id, run.state.id)

    async def _run(self, run: BatchRun, line: BatchLine) -> LineResult:
        pause_s = _FIRST_PAUSE_S
        give_up_ns = run.begun_ns + int(_PATIENCE_S * 1e9)
        while True:
            if run.stop or run.lost:
                raise Cancelled(CANCELLED)
            try:
                body, job_id = await self._answer(run, line)
            except ApiError as error:
                if error.code != MODEL_NOT_FOUND or monotonic_ns() >= give_up_ns:
                    return _refused(line, error)
            except _Ended as ended:
                return _refused(line, ended.error, ended.job_id)
            except (ResourceExhausted, Unavailable):
                pass  # nothing was accepted, or the log is away: the same key asks again
            except CharoniaError as error:
                if isinstance(error, Cancelled) and (run.stop or run.lost):
                    raise
                return _refused(line, error)
            except Exception:
                # an unforeseen line must not hold up the others
                logger.exception("line %d of batch %s could not be run", line.number, run.state.id)
                return _refused(line, InternalError("internal server error"))
            else:
                return LineResult(line.number, line.custom_id, 200, body, job_id, usage=_usage(body))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _answer(self, run: BatchRun, line: BatchLine) -> tuple[dict[str, Any], str]:
        """The body of the answer, and the id of its (first) job."""
        url, body = run.state.endpoint, dict(line.body)
        if url == "/v1/embeddings":
            return await self._embedded(run, body), ""
        if body.get("seed") in (None, -1):  # -1 is vLLM's word for a random one
            body["seed"] = seed_of(run.state.id, line.number)
        if url == "/v1/responses":
            return await self._response(run, line, body)
        chat = url == "/v1/chat/completions"
        prepared = await (self._texts.prepare_chat if chat else self._texts.prepare_completion)(body, run.caller)
        return await self._text(run, line, prepared)

    async def _embedded(self, run: BatchRun, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of a call that is no job. Raises `Cancelled` when the run stops: it may wait for ever, as where
        the model's queue is paused.
        """
        adjust = partial(_as_of_a_line, run)
        call = asyncio.ensure_future(self._embeddings.document(body, run.caller, adjust=adjust))
        run.calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if run.stop and not _is_cancelled():
                raise Cancelled(CANCELLED) from None
            raise
        finally:
            run.calls.discard(call)

    async def _text(self, run: BatchRun, line: BatchLine, prepared: Prepared) -> tuple[dict[str, Any], str]:
        text, answer = prepared
        jobs = run.jobs[line.number] = []
        tasks = [
            asyncio.create_task(self._job(run, line, index, request, jobs), name="batch-choice")
            for index, request in enumerate(text.requests)
        ]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # one that failed is tried again with all the others: their jobs go on meanwhile
            await asyncio.gather(*tasks, return_exceptions=True)
        for index, responses in enumerate(found):
            for response in responses:
                if response.error is not None:
                    raise _Ended(response.error, jobs[0])
                if not response.is_flag:
                    answer.add(index, read_delta(response))
        return answer.document(), jobs[0]

    async def _job(
        self, run: BatchRun, line: BatchLine, index: int, request: InferenceRequest, jobs: list[str]
    ) -> Sequence[InferenceResponse]:
        _as_of_a_line(run, request)
        whole = replace(request, inputs=list(request.inputs))
        if _in_parts(request):
            try:
                return await self._asked(run, request, _options(run, line, index, _PARTS), jobs)
            except _Ended as ended:
                if not ended.is_interrupted:
                    raise
        return await self._asked(run, whole, _options(run, line, index), jobs)

    async def _asked(
        self, run: BatchRun, request: InferenceRequest, options: DeliveryOptions, jobs: list[str]
    ) -> Sequence[InferenceResponse]:
        await run.will_ask(request.model)
        receipt = await self._handler.submit_job(request, options)
        jobs.append(receipt.id)
        return await self._result(run, receipt.id)

    async def _result(self, run: BatchRun, job_id: str) -> Sequence[InferenceResponse]:
        """The responses of a job, once it has ended. Raises `_Ended` for one that did not succeed."""
        while True:
            try:
                _, responses = await self._handler.jobs.queries.result(job_id, run.caller, _WAIT_S)
            except NotFound as error:
                raise Unavailable(error.message) from None  # forgotten: its line is asked for again
            except CharoniaError as error:
                view = await self._handler.jobs.queries.view(job_id, run.caller)
                if view.state.terminal:
                    if run.stop:
                        raise Cancelled(CANCELLED) from None
                    raise _Ended(error, job_id) from None
                await asyncio.sleep(_FIRST_PAUSE_S)
                continue
            if responses is not None:
                return responses
            await asyncio.sleep(_FIRST_PAUSE_S)  # while the gateway drains, waits end at once

    async def _response(self, run: BatchRun, line: BatchLine, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        request = read_response_request({**body, "background": False, "stream": False})
        try:
            job_id = await self._response_job(run, line, request)
        except _Ended as ended:
            if not ended.is_interrupted:
                raise
            job_id = await self._response_job(run, line, request, whole=True)
        stored = await self._responses.find(PREFIX + job_id, run.caller)
        return await self._responses.ended(stored, run.caller), job_id

    async def _response_job(
        self, run: BatchRun, line: BatchLine, request: ResponseRequest, *, whole: bool = False
    ) -> str:
        """The id of the job of a response, once it has ended. Raises as `_result`."""
        prepared = await self._responses.prepare(request, run.caller)
        _as_of_a_line(run, prepared.requests[0])
        form = _PARTS if not whole and _in_parts(prepared.requests[0]) else ""
        options = _options(run, line, 0, form)
        await run.will_ask(prepared.requests[0].model)
        job_id, _ = await self._responses.submit(request, prepared, options)
        jobs = run.jobs.setdefault(line.number, [])
        if job_id not in jobs:
            jobs.append(job_id)  # each try of the line finds the same job
        await self._result(run, job_id)
        return job_id


class _Ended(Exception):
    """A job that ended without an answer."""

    def __init__(self, error: CharoniaError, job_id: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.job_id = job_id

    @property
    def is_interrupted(self) -> bool:
        """Whether its text could not be continued. No client has seen its parts, so another text is as good."""
        return self.error.message.startswith(StreamInterrupted.PREFIX)


def _in_parts(request: InferenceRequest) -> bool:
    """Have a model that goes on with a text answer in parts, and say whether it will. One whose parts are single tokens
    answers whole: the log would have to keep each.
    """
    interface = request.served.interface if request.served is not None else None
    if interface is not None and interface.resumable and STREAM_INTERVAL.name in interface.inputs:
        keep_progress(request, _INTERVAL)
        return True
    return False


def _is_cancelled() -> bool:
    """Whether the present task is to end, and not only something that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _as_of_a_line(run: BatchRun, request: InferenceRequest) -> None:
    """Give a request what all of lines have: the lowest priority level, and a deadline, so that none outlives its batch
    where no gateway drives that, as in a queue that is paused.
    """
    request.priority = LOWEST_PRIORITY
    request.deadline_ns = (run.state.expires_s + _GRACE_S) * 1_000_000_000


def _is_unstored(run: BatchRun, line: BatchLine) -> bool:
    """Whether the jobs of a line are not to be stored."""
    return run.state.endpoint == "/v1/responses" and line.body.get("store") is False


def _choices(url: str, body: Mapping[str, Any]) -> int:
    """The number of texts that a body asks for, each a job. Raises `ApiError` for a wrong body."""
    if url == "/v1/chat/completions":
        return read_chat(body).count
    if url == "/v1/completions":
        wanted = read_completion(body)
        return wanted.count * len(wanted.prompts)
    return int(url == "/v1/responses")  # lines of embeddings are no jobs


def _key(run: BatchRun, line: BatchLine, index: int, form: str, end: str = _OF_LINE) -> str:
    """`form` is `_PARTS`, or nothing for a request that is answered whole. Gateways of older releases end it with
    nothing.
    """
    return f"{run.state.id}:{line.number}:{index}{form}{end}"


def _options(run: BatchRun, line: BatchLine, index: int, form: str = "") -> DeliveryOptions:
    key = _key(run, line, index, form)
    digest = blake2b(key.encode(), digest_size=16).digest()
    return DeliveryOptions(caller=run.caller, idempotency_key=key, digest=digest)


def _refused(line: BatchLine, error: Failure, job_id: str = "") -> LineResult:
    return LineResult(line.number, line.custom_id, status_of(error), error_document(error), job_id)


def _usage(body: dict[str, Any]) -> tuple[int, int]:
    """The tokens of prompt and answer, of any kind of answer."""
    usage = body.get("usage") or {}
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    answer = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return prompt or 0, answer or 0
