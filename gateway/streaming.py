"""The responses of one request as its caller reads them, counted once for the request (M1)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable

from charonia.calls.refused import failure_reason
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, shed
from charonia.inference import InferenceRequest, InferenceResponse
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord

from .metrics import RequestCounts
from .tracing.trace import answered, left
from .tracing.trace import failed as trace_failed


async def only(coming: Awaitable[ResponseRecord]) -> AsyncGenerator[ResponseRecord]:
    """The one answer of a request as a stream of it."""
    yield await coming


async def until(
    end: asyncio.Future[ResponseRecord], answers: AsyncGenerator[ResponseRecord]
) -> AsyncGenerator[ResponseRecord]:
    """The answers, until there are no more or `end` fails."""
    async with contextlib.aclosing(answers):
        while True:
            coming = asyncio.ensure_future(anext(answers))
            try:
                await asyncio.wait({coming, end}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    await end
            finally:
                coming.cancel()
                await asyncio.wait({coming})
            try:
                answer = coming.result()
            except StopAsyncIteration:
                return
            yield answer


async def responses_of(
    records: AsyncGenerator[ResponseRecord],
    request: InferenceRequest,
    counts: RequestCounts,
    started_ns: int,
    *,
    ensemble: bool,
) -> AsyncGenerator[InferenceResponse]:
    """See `Handler.stream`. A request fails or succeeds by the last response that said anything, as in statistics."""
    failed: CharoniaError | None = None
    counted = False
    seen = 0
    try:
        async with contextlib.aclosing(records):
            async for record in records:
                if not _is_flag(record):
                    failed = record.error
                    if not seen and counts.latencies is not None:
                        counts.latencies.responded(monotonic_ns() - started_ns)
                if record.final:  # before it is given: its reader may not come again
                    counted = True
                    if failed is not None:
                        counts.failed(failed, ensemble=ensemble)
                    else:
                        counts.succeeded(monotonic_ns() - started_ns)
                    if request.trace is not None:
                        answered(request.trace, record)
                yield InferenceResponse(
                    request.model,
                    record.version,
                    wanted_outputs(record.outputs, request.outputs),
                    request.id,
                    record.parameters,
                    record.error,
                    record.final,
                    record.place or (0, seen),
                )
                seen += 1
                del record  # the next one may be long in coming
    except CharoniaError as error:
        if counted:
            return
        counts.failures[failure_reason(error, executed=False)] += 1
        if request.trace is not None:
            trace_failed(request.trace, error)
        ended = InferenceResponse(request.model, request.version, [], request.id, error=shed(error))
    except (asyncio.CancelledError, GeneratorExit):
        if not counted:
            counts.failures["CANCELED"] += 1
            if request.trace is not None:
                left(request.trace)
        raise
    else:
        return
    yield ended


def _is_flag(record: ResponseRecord) -> bool:
    return record.final and not record.outputs and not record.parameters and record.error is None


def wanted_outputs(outputs: list[Tensor], wanted: tuple[str, ...]) -> list[Tensor]:
    """The outputs in the order they were asked for (H12)."""
    if not wanted or len(outputs) < 2:
        return outputs
    by_name = {t.name: t for t in outputs}
    return [by_name[name] for name in wanted if name in by_name]
