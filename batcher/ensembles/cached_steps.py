"""Answers steps of an ensemble whose models cache their responses (K4), from the cache or through one shared request.

A step that is not in the cache is sent as an ordinary request; its answer arrives on the ensemble's reply stream and is
passed on here. Equal steps share that answer. If the request of the sent step no longer wants it, the next equal step
is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from charonia.calls.cache.cache_keys import is_cachable
from charonia.calls.cache.cached_calls import CachedCalls
from charonia.catalog.catalog import ServedVersion
from charonia.errors import Cancelled, CharoniaError
from charonia.inference import InferenceRequest
from charonia.models.caching import CachingRules
from charonia.wire import ResponseRecord

Ended = Callable[[ResponseRecord | CharoniaError], None]


@dataclass(slots=True, eq=False)
class _Wait:
    """A waiting step; `answer` is set while this step is the one that was sent."""

    task: asyncio.Task[None] | None = None
    answer: asyncio.Future[ResponseRecord] | None = None


class CachedSteps:
    """The waiting steps, by step id."""

    def __init__(self, calls: CachedCalls) -> None:
        self._calls = calls
        self._waits: dict[bytes, _Wait] = {}

    def rules(self, request: InferenceRequest, served: ServedVersion) -> CachingRules | None:
        """The rules of a step that may share another step's answer; None for any other step."""
        return self._calls.rules(served) if is_cachable(request) else None

    def ask(
        self,
        step_id: bytes,
        request: InferenceRequest,
        served: ServedVersion,
        rules: CachingRules,
        tenant: str,
        send: Callable[[], None],
        ended: Ended,
        *,
        alone: bool = False,
    ) -> None:
        """Find the answer of an admitted step; `send` sends it. `ended` is called once, unless the step is given up.
        For `alone` see `ResponseCache.answer`.
        """
        wait = self._waits[step_id] = _Wait()

        async def run() -> ResponseRecord:
            if self._waits.get(step_id) is not wait:
                raise Cancelled("")
            wait.answer = asyncio.get_running_loop().create_future()
            send()
            return await wait.answer

        async def find() -> None:
            outcome: ResponseRecord | CharoniaError
            try:
                outcome = await self._calls.answer(request, served, rules, tenant, run, alone=alone)
            except CharoniaError as error:
                outcome = error
            if self._waits.get(step_id) is wait:
                del self._waits[step_id]
                ended(outcome)

        wait.task = asyncio.get_running_loop().create_task(find(), name=f"step of {served.model}")

    def waits(self, step_id: bytes) -> bool:
        return step_id in self._waits

    def answered(self, step_id: bytes, response: ResponseRecord) -> bool:
        """A step's answer has arrived; False when the step was not sent from here."""
        wait = self._waits.get(step_id)
        if wait is None or wait.answer is None:
            return False
        if not wait.answer.done():
            wait.answer.set_result(response)
        return True

    def give_up(self, step_id: bytes) -> None:
        """This step is no longer wanted; another step that waits for its answer is sent instead."""
        wait = self._waits.pop(step_id, None)
        if wait is None:
            return
        if wait.answer is not None and not wait.answer.done():
            wait.answer.set_exception(Cancelled(""))
            wait.answer.exception()  # retrieved, in case no step waits for it
        if wait.task is not None:
            wait.task.cancel()

    def close(self) -> None:
        for step_id in list(self._waits):
            self.give_up(step_id)
