"""Inferences that are asked for with more than the tensors: to be answered later, in time, once per key (ADR 0004).

Joins what callers write (`gateway.requests.preferences`) with the handler's jobs, the same for every protocol; where
the words stand and how an answer looks is each front's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from charonia.catalog.served import ServedVersion
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, Unsupported
from charonia.inference import InferenceRequest, InferenceResponse, Parameters
from charonia.models.interface import ModelInterface
from charonia.tasks import Tasks
from protos.model_config_pb2 import ModelConfig

from .handler import Handler
from .requests.delivery import Caller, DeliveryOptions, JobReceipt, JobView
from .requests.preferences import Wish, read_wish
from .requests.request_rules import earlier


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer. `applied` is what was honoured of Prefer."""

    response: InferenceResponse
    applied: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job that is answered later; `state` is that of a `charonia.facts.jobs.JobState`."""

    receipt: JobReceipt
    state: str
    applied: str


class Deferral:
    """One front's such inferences."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._endings = Tasks()

    async def answer(
        self,
        request: InferenceRequest,
        words: Parameters,
        caller: Caller,
        form: Mapping[str, Any],
        *,
        flush_interval_s: float = 0.0,
        call_deadline_ns: int = 0,
        only_later: str = "",
    ) -> Answered | Accepted:
        """`call_deadline_ns` is the call's own deadline, which holds for the request unless it is answered later.

        `only_later` is the text of the `Unsupported` for a request that is to be answered at once, which its model
        cannot: one that answers more than once.

        Raises what the handler raises, and `InvalidArgument` for `words` that say nothing sensible.

        Cancelling the awaiting task cancels the request as `DeliveryOptions.on_disconnect` has it.
        """
        wish = read_wish(words, wall_ns(), form=form, caller=caller)
        request.deadline_ns = earlier(request.deadline_ns, wish.deadline_ns)
        if wish.options.respond_async:
            return await self._submit(request, _at_once(wish) if only_later else wish)
        if only_later:
            raise Unsupported(only_later)
        request.deadline_ns = earlier(request.deadline_ns, call_deadline_ns)
        response = await self._handler.infer(request, flush_interval_s=flush_interval_s, options=wish.options)
        return Answered(response)

    def stream(
        self,
        request: InferenceRequest,
        words: Parameters,
        caller: Caller,
        form: Mapping[str, Any],
        *,
        flush_interval_s: float = 0.0,
        call_deadline_ns: int = 0,
    ) -> AsyncGenerator[InferenceResponse | Accepted]:
        """As `answer`, the responses of any model as they come (`Handler.stream`); or the job that will have them."""
        handler, options = self._handler, None
        if words or handler.identifies:
            wish = read_wish(words, wall_ns(), form=form, caller=caller)
            request.deadline_ns = earlier(request.deadline_ns, wish.deadline_ns)
            options = wish.options
            if options.respond_async:
                return self._accepted(request, _at_once(wish))
        request.deadline_ns = earlier(request.deadline_ns, call_deadline_ns)
        return handler.stream(request, flush_interval_s=flush_interval_s, options=options)

    async def _accepted(self, request: InferenceRequest, wish: Wish) -> AsyncGenerator[InferenceResponse | Accepted]:
        accepted = await self._submit(request, wish)
        assert isinstance(accepted, Accepted)
        yield accepted

    async def _submit(self, request: InferenceRequest, wish: Wish) -> Answered | Accepted:
        handler, options = self._handler, wish.options
        if wish.wait_s > 0 and _cancels(options):
            submitting = asyncio.get_running_loop().create_task(handler.submit_job(request, options))
            try:
                receipt = await asyncio.shield(submitting)
            except asyncio.CancelledError:
                self._endings.spawn(self._cancel_submitted(submitting, options.caller))
                raise
        else:
            receipt = await handler.submit_job(request, options)
        state = "queued"
        if wish.wait_s > 0:
            try:
                _, responses = await handler.job_result(receipt.id, options.caller, wish.wait_s)
            except asyncio.CancelledError:
                # no caller has read the id yet: without a key or a webhook the job is lost to its caller
                if receipt.created and _cancels(options):
                    self._endings.spawn(self._cancel(receipt.id, options.caller))
                raise
            if responses is not None:
                response = only(responses)
                response.id = request.id  # a known key's first caller may have given another
                return Answered(response, wish.applied)
        if wish.wait_s > 0 or not receipt.created:
            state = (await handler.job(receipt.id, options.caller)).state.value
        return Accepted(receipt, state, wish.applied)

    async def _cancel(self, job_id: str, caller: Caller) -> None:
        with contextlib.suppress(CharoniaError):  # the log is away: the job runs to its end
            await self._handler.cancel_job(job_id, caller)

    async def _cancel_submitted(self, submitting: asyncio.Task[JobReceipt], caller: Caller) -> None:
        """The caller went while its job was on its way into the log."""
        with contextlib.suppress(CharoniaError):
            receipt = await submitting
            if receipt.created:
                await self._cancel(receipt.id, caller)


def _at_once(wish: Wish) -> Wish:
    """The wish without its wait: a caller that wants several responses follows the job."""
    return replace(wish, wait_s=0.0, applied="respond-async")


def only(responses: Sequence[InferenceResponse]) -> InferenceResponse:
    """The one answer of a job that may give several. Raises its error, `Unsupported` where there are none or more."""
    if len(responses) != 1:
        raise Unsupported(f"the job has {len(responses)} responses: follow its events, or ask for it in a stream")
    if responses[0].error is not None:
        raise responses[0].error
    return responses[0]


def served_of(handler: Handler, view: JobView) -> ServedVersion:
    """What writing a job's answer needs of its model; one that is served no more only has no labels to give (H19)."""
    try:
        return handler.served_model(view.model, str(view.version))
    except CharoniaError:
        max_batch_size = 1 if view.form.get("batching") else 0
        interface = ModelInterface(view.model, "", "", max_batch_size, {}, {})
        return ServedVersion(view.model, view.version, "", ModelConfig(), interface, {}, {})


def _cancels(options: DeliveryOptions) -> bool:
    if options.on_disconnect:
        return options.on_disconnect == "cancel"
    return not options.idempotency_key and options.webhook is None
