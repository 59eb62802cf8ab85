"""Runs batches with many strings in a process of their model's own, started for the first and ended some time after the
last, while all others run in the executor.

It is for libraries that keep the interpreter's lock while they copy strings: no part of the executor waits for that
then. The strings of such a batch stay encoded here (`executors.batches.encoded_strings`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from charonia.backend import InstanceSpec, ModelSource
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, InternalError

from .isolated_batch import IsolatedBatches
from .isolated_model import IsolatedModel

_log = logging.getLogger(__name__)

IDLE_S = 30.0
"""So long after its last batch the process ends, as workers of gateways do."""

_PAUSE_NS = 60_000_000_000
"""So long no process is tried after one that could not be had: each batch would wait for the next one to fail."""


class StringsApart:
    """The process for one load of a model. Made and closed in the event loop, used in threads of instances.

    A batch that runs longer than `ceiling_s` seconds (0: no limit) ends the process.
    """

    def __init__(self, source: ModelSource, ceiling_s: float, idle_s: float = IDLE_S) -> None:
        self._source = replace(source, isolation="process")
        self._ceiling_s = ceiling_s
        self._idle_s = idle_s
        self._model: IsolatedModel | None = None
        self._free: list[IsolatedBatches] = []
        self._taken = 0
        self._ending: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._none_before_ns = 0
        self._loop = asyncio.get_running_loop()

    def take(self, spec: InstanceSpec) -> IsolatedBatches | None:
        """An instance like this one in the process; None where none can be had. Blocks; call it in a thread."""
        if monotonic_ns() < self._none_before_ns:
            return None
        try:
            return asyncio.run_coroutine_threadsafe(self._take(spec), self._loop).result()
        except (CharoniaError, OSError, RuntimeError) as error:
            self._none_before_ns = monotonic_ns() + _PAUSE_NS
            _log.warning(
                "batches of %s with many strings run in the executor, as no process can be had for them: %s",
                self._source.name,
                error,
            )
            return None

    def give_back(self, instance: IsolatedBatches) -> None:
        """Return what `take` gave; from any thread."""
        self._loop.call_soon_threadsafe(self._given_back, instance)

    async def close(self) -> None:
        """End the process. No batch is under way."""
        self._is_closed = True
        self._end()
        await asyncio.gather(*self._tasks)

    async def _take(self, spec: InstanceSpec) -> IsolatedBatches:
        self._check_open()
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._taken += 1
        try:
            while self._free:
                if not (instance := self._free.pop()).is_dead:
                    return instance
                instance.disconnect()
            if self._model is None:
                self._model = IsolatedModel(self._source, ceiling_s=self._ceiling_s, in_bulk=True)
            made = await self._model.create_instance(replace(spec, calls=None))
            assert isinstance(made, IsolatedBatches)
            try:
                self._check_open()
            except InternalError:
                made.disconnect()
                raise
            _log.info("batches of %s with many strings run in process %d", spec.name, made.pid)
            return made
        except BaseException:
            self._returned()
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise InternalError("the model is being unloaded")

    def _given_back(self, instance: IsolatedBatches) -> None:
        if instance.is_dead or self._is_closed:
            instance.disconnect()
        else:
            self._free.append(instance)
        self._returned()

    def _returned(self) -> None:
        self._taken -= 1
        if not self._taken and not self._is_closed:
            self._ending = self._loop.call_later(self._idle_s, self._end)

    def _end(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        model, self._model = self._model, None
        free, self._free = self._free, []
        if model is None:
            return
        task = self._loop.create_task(_ended(model, free))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _ended(model: IsolatedModel, instances: list[IsolatedBatches]) -> None:
    for instance in instances:
        await asyncio.to_thread(instance.close)
    await model.close()
