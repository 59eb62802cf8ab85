"""Inferences with delivery preferences: answered later, within a time, or once per key (ADR 0004).

Applies `gateway.requests.preferences` through the handler's jobs, for every protocol alike; each front reads its
preferences and writes its answers. Where tenants are configured, every parsed request passes here: its caller is a part
of its `DeliveryOptions`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from charonia.catalog.served import ServedVersion
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, LogUnavailable, Unsupported
from charonia.inference import InferenceRequest, InferenceResponse, Parameters, earlier
from charonia.models.interface import ModelInterface
from charonia.tasks import Tasks
from protos.model_config_pb2 import ModelConfig

from .handler import Handler
from .requests.delivery import Caller, DeliveryOptions, JobReceipt, JobView
from .requests.preferences import Wish, read_wish


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer. `applied` lists the preferences that were honoured."""

    response: InferenceResponse
    applied: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job that is answered later; `state` is the value of its `charonia.facts.jobs.JobState`."""

    receipt: JobReceipt
    state: str
    applied: str


class Deferral:
    """The inferences of one front that have delivery preferences."""

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
        """Answer a request, or accept it as a job. Cancelling the task follows `DeliveryOptions.on_disconnect`.

        `call_deadline_ns` is the call's own deadline, which does not hold for a request that is answered later.
        `only_later` is set for decoupled models: the text of the `Unsupported` if they are asked for an answer at once.
        Raises as the handler does, and `InvalidArgument` for invalid `words`.
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
        """As `answer`: the responses of any model as they come (`Handler.stream`), or the job that will have them."""
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
        queries, state, response = handler.jobs.queries, "queued", None
        try:
            if wish.wait_s > 0:
                if not await self._waited(receipt.id, wish):
                    return Accepted(receipt, state, wish.applied)
                _, response = await queries.single(receipt.id, options.caller)
            if response is None and (wish.wait_s > 0 or not receipt.created):
                state = (await queries.view(receipt.id, options.caller)).state.value
        except LogUnavailable:  # as in `_waited`
            return Accepted(receipt, state, wish.applied)
        except asyncio.CancelledError:
            # no client has read the id: without a key or a webhook the job would be unreachable
            if receipt.created and _cancels(options):
                self._endings.spawn(self._cancel(receipt.id, options.caller))
            raise
        if response is not None:
            response.id = request.id  # the first caller with this key may have used another id
            return Answered(response, wish.applied)
        return Accepted(receipt, state, wish.applied)

    async def _waited(self, job_id: str, wish: Wish) -> bool:
        """Wait for an accepted job; False where waiting is refused: too many do, or the log is away.

        That is no reason to keep the job's id from its client, who would ask for another one.
        """
        try:
            await self._handler.jobs.queries.wait(job_id, wish.options.caller, wish.wait_s)
        except CharoniaError:
            return False
        return True

    async def _cancel(self, job_id: str, caller: Caller) -> None:
        with contextlib.suppress(CharoniaError):  # the log cannot be reached: the job runs to its end
            await self._handler.jobs.cancel(job_id, caller)

    async def _cancel_submitted(self, submitting: asyncio.Task[JobReceipt], caller: Caller) -> None:
        """Cancel a job whose client left while it was on its way into the log."""
        with contextlib.suppress(CharoniaError):
            receipt = await submitting
            if receipt.created:
                await self._cancel(receipt.id, caller)


def _at_once(wish: Wish) -> Wish:
    """The wish without a wait: a client that wants several responses follows the job."""
    return replace(wish, wait_s=0.0, applied="respond-async")


def served_of(handler: Handler, view: JobView) -> ServedVersion:
    """The model version for writing a job's answer; one that is no longer served has no labels (H19)."""
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
