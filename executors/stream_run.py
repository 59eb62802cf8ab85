"""The responses of one call of an instance, as the instance hands them over (`charonia.backend.ResponseStream`).

What becomes of them is `streaming`'s.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from charonia.backend import ModelRequest, ModelResponse, WindowedInstance
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import InternalError

from .accounting import Execution

if TYPE_CHECKING:
    from .streaming import Answering, StreamedBatch


class StreamRun:
    """The responses of one call of an instance (`charonia.backend.ResponseStream`)."""

    def __init__(self, batch: StreamedBatch, planned: dict[int, Answering]) -> None:
        self._batch = batch
        self._windows = False
        self._planned = planned
        self._answering: list[Answering] = []
        self._start_ns = wall_ns()
        self._started_ns = monotonic_ns()
        self._begun_ns = self._started_ns
        self._rows = 0
        self.freed = asyncio.Event()

    def begin(self, indices: list[int], requests: list[ModelRequest], instance: object = None) -> None:
        """The instance is called with these requests now, which stand at `indices` of the batch."""
        self._batch.instance = instance
        self._batch.reports = self._batch.several and getattr(instance, "reports_responses", True)
        self._answering = [self._planned[index] for index in indices]
        for one, request in zip(self._answering, requests, strict=True):
            one.request = request
            one.heard_ns = monotonic_ns()
            if one.window:
                request.window = one.window - one.first
                self._windows = not isinstance(instance, WindowedInstance)
        self._rows = sum(one.plan.rows for one in self._answering)
        self._batch.heard_ns = self._begun_ns = monotonic_ns()

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        if response is None and not final:
            raise ValueError("neither a response nor a final flag")
        one = self._answering[index]
        if one.ended:
            if not one.cut and self._batch.several:
                raise InternalError("a response came after the final one of its request")
            return
        if self._batch.respond(one, response, final=final) and one.error is None and self._batch.wanted(one.index):
            self._count(one)

    @property
    def full(self) -> bool:
        return self._batch.flow.full

    @property
    def blocked(self) -> bool:
        return any(one.blocked for one in self._answering)

    async def drain(self) -> None:
        await self._batch.flow.room()
        if self._windows:
            await self._batch.unblocked(self._answering)

    def free(self) -> None:
        self.freed.set()

    def _count(self, one: Answering) -> None:
        now_ns = monotonic_ns()
        execution = Execution(
            (one.index,),
            self._rows,
            self._start_ns,
            self._start_ns + now_ns - self._started_ns,
            self._begun_ns - self._started_ns,
            now_ns - self._begun_ns,
            0,
        )
        self._batch.batch.executed.executions.append(execution)
