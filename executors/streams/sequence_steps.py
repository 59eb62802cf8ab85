"""Runs requests of sequences on a `StreamingInstance`: one per slot, with null requests in empty slots (S33, S34).

Responses to null requests are discarded and not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from charonia.backend import InstanceDied, ModelRequest, ModelResponse, ResponseStream, StreamingInstance
from executors.batches.sequence_batch import BatchSteps

_log = logging.getLogger(__name__)


async def execute_steps(
    instance: StreamingInstance,
    steps: BatchSteps,
    indices: Sequence[int],
    requests: Sequence[ModelRequest],
    responses: ResponseStream,
) -> None:
    """Call `StreamingInstance.execute_stream` for the requests at `indices` of their batch. Raises what it raises."""
    if steps.clears_slots:
        steps.clears_slots = False
        await _execute_null_requests(instance, steps.null_requests(requests[0]))
    spread = steps.spread(indices, requests)
    if len(spread) == len(requests):
        await instance.execute_stream(requests, responses)
        return
    places = {id(request): number for number, request in enumerate(requests)}
    numbers = [places.get(id(request)) for request in spread]
    await instance.execute_stream(spread, _SlotResponses(responses, numbers))


async def _execute_null_requests(instance: StreamingInstance, requests: Sequence[ModelRequest]) -> None:
    """Run null requests; returns when the instance can take the next call."""
    discarded = _DiscardedResponses()
    call = asyncio.ensure_future(instance.execute_stream(requests, discarded))
    freed = asyncio.ensure_future(discarded.freed.wait())
    try:
        await asyncio.wait({call, freed}, return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            call.result()
    except InstanceDied:
        raise
    except Exception as error:  # no request is affected
        _log.warning("empty slots could not be executed: %s", error)
    finally:
        for one in (call, freed):
            one.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await call


class _SlotResponses:
    """A `ResponseStream` over slots. `numbers` maps a slot to the number of its request, None for a null request."""

    def __init__(self, responses: ResponseStream, numbers: Sequence[int | None]) -> None:
        self._responses = responses
        self._numbers = numbers

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        number = self._numbers[index]
        if number is not None:
            self._responses.send(number, response, final=final)

    @property
    def full(self) -> bool:
        return self._responses.full

    @property
    def blocked(self) -> bool:
        return self._responses.blocked

    async def drain(self) -> None:
        await self._responses.drain()

    def free(self) -> None:
        self._responses.free()


class _DiscardedResponses:
    """A `ResponseStream` that drops all responses."""

    full = blocked = False

    def __init__(self) -> None:
        self.freed = asyncio.Event()

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None: ...

    async def drain(self) -> None: ...

    def free(self) -> None:
        self.freed.set()
