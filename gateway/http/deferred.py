"""Infer requests that ask for more than an answer: to be answered later, by a deadline, once per key (ADR 0004).

Joins what the headers and parameters say (`gateway.preferences`) with the handler's jobs. Reading the status of a job
later is `job_routes`'.
"""

from __future__ import annotations

import asyncio

import orjson

from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.inference import InferenceRequest, InferenceResponse
from gateway.delivery import ANYONE, Caller, DeliveryOptions
from gateway.handler import Handler
from gateway.preferences import Wish, earlier, read_wish, words_of_headers

from .errors import JSON_CONTENT_TYPE, Headers
from .job_json import location, receipt_json
from .response_codec import ReplyForm

Answer = tuple[InferenceResponse | None, Headers, bytes]
"""The response and headers to add to it, or None with all headers and the body of a 202."""


class Deferral:
    """How one front keeps such requests: on their way, waiting for at most as long as asked."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._endings: set[asyncio.Task[None]] = set()

    async def answer(
        self,
        request: InferenceRequest,
        form: ReplyForm,
        headers: list[tuple[bytes, bytes]],
        *,
        batching: bool,
        identifies: bool,
    ) -> Answer:
        """Raises what the handler raises, and `InvalidArgument` for a wish that is none."""
        caller: Caller = self._handler.identify(headers) if identifies else ANYONE
        words = {**form.delivery, **words_of_headers(headers)}
        wish = read_wish(words, wall_ns(), form=form.note(batching=batching), caller=caller)
        request.deadline_ns = earlier(request.deadline_ns, wish.deadline_ns)
        if wish.options.respond_async:
            return await self._submit(request, wish)
        return await self._handler.infer(request, options=wish.options), [], b""

    async def _submit(self, request: InferenceRequest, wish: Wish) -> Answer:
        handler, options = self._handler, wish.options
        receipt = await handler.submit_job(request, options)
        applied: Headers = [(b"preference-applied", wish.applied.encode())]
        if wish.wait_s > 0:
            try:
                response = await handler.job_result(receipt.id, options.caller, wish.wait_s)
            except asyncio.CancelledError:
                # nobody has read the id yet: without a key or a webhook the job is lost to its caller
                if _cancels(options):
                    self._cancel(receipt.id, options.caller)
                raise
            if response is not None:
                response.id = request.id
                return response, applied, b""
        state = "queued"
        if wish.wait_s > 0 or not receipt.created:
            state = (await handler.job(receipt.id, options.caller)).state.value
        body = orjson.dumps(receipt_json(receipt, state))
        return None, [JSON_CONTENT_TYPE, (b"location", location(receipt.id).encode()), *applied], body

    def _cancel(self, job_id: str, caller: Caller) -> None:
        async def cancel() -> None:
            try:
                await self._handler.cancel_job(job_id, caller)
            except CharoniaError:
                pass  # it ended, or the log is away: then it runs to its end

        task = asyncio.get_running_loop().create_task(cancel())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)


def _cancels(options: DeliveryOptions) -> bool:
    if options.on_disconnect:
        return options.on_disconnect == "cancel"
    return not options.idempotency_key and options.webhook is None
