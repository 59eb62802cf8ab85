"""The worker of an instance that has several batches under way, so that its device finds the next one joined.

One thread takes batches from the queue while the instance has less than its depth. Each batch is joined, submitted,
waited for and packed by a thread of its own, as `workers` does it for one batch at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from charonia.backend import BatchInstance, InstanceDied, InstanceSpec, Interrupted, SelfCheckingInstance
from charonia.errors import InternalError, error_of_model
from charonia.tasks import MODEL_ERRORS
from charonia.wire import RequestRecord
from executors.backends.submissions import CancellablePart, depth_of, parts_of
from executors.batches.batch_results import Executed
from executors.batches.execution import Batch
from executors.batches.wave_execution import ExecutedWaves, WaveBatch
from executors.host.host_policy import restrict_thread

from .submitted_batch import SubmittedBatch
from .thread_queue import ThreadQueue
from .workers import Pool, ThreadWorker, Turn, is_unwanted, self_checking

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _ThreadedTurn(Turn):
    """A turn with a thread of its own, which does what comes to `jobs`; None ends it."""

    __slots__ = ("jobs", "started_for")

    def __init__(self) -> None:
        super().__init__()
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.started_for: object = None
        """The instance that has been notified of this thread."""


class DeepWorker(ThreadWorker):
    """Runs an instance with a depth of 2 or more, in as many threads."""

    def __init__(
        self, pool: Pool, spec: InstanceSpec, instance: BatchInstance, passive: bool, queue: ThreadQueue
    ) -> None:
        self.depth = depth_of(instance)
        self._threaded = [_ThreadedTurn() for _ in range(self.depth)]
        self._state = threading.Condition()
        """Held to change what is below."""
        self._free = list(self._threaded)
        self._is_dead = False
        self._is_shared = False
        """Whether other batches were under way when the instance died."""
        super().__init__(pool, spec, instance, passive, queue)
        self.turns = list(self._threaded)

    async def prepare(self) -> None:
        if hasattr(self._instance, "started"):
            for turn in self._threaded:
                await self._in_turn(turn, partial(self._start, turn))

    async def execute(self, records: Sequence[RequestRecord]) -> Executed:
        turn, execution = self._threaded[0], self._warm_up(records)
        return await self._in_turn(turn, lambda: self._execute(execution, turn))

    async def leave(self) -> None:
        for turn in self._threaded:
            if turn.thread is not None:
                turn.jobs.put(None)
                if self._takes_batches:
                    turn.thread.join()
                else:  # it may be in a warm-up that waits for the loop
                    await asyncio.to_thread(turn.thread.join)
        await super().leave()

    @property
    def idle_self_check(self) -> SelfCheckingInstance | None:
        return None if any(turn.running is not None for turn in self.turns) else self_checking(self._instance)

    def cancel(self, batch: SubmittedBatch) -> None:
        """Cancel a batch none of whose requests is wanted any more, unless the instance has begun it.

        Another batch that is cancelled, as this one just ended, runs again.
        """
        for turn in self.turns:
            running, part = turn.running, turn.instance
            if running is None or running[0] is not batch or not is_unwanted(batch):
                continue
            if isinstance(part, CancellablePart):
                part.cancel()

    async def _create(self) -> None:
        created = await self._pool.create(self.spec)
        assert isinstance(created, BatchInstance)
        if depth_of(created) != self.depth:
            await asyncio.to_thread(created.close)
            raise InternalError(f"it had a depth of {self.depth} before, and {depth_of(created)} now")
        self._take(created)

    def _take(self, instance: BatchInstance) -> None:
        self._instance = instance
        for turn, part in zip(self._threaded, parts_of(instance), strict=True):
            turn.instance = part

    async def _unload(self) -> None:
        for turn in self._threaded:
            turn.started_for = None
        await super()._unload()

    # -- threads ------------------------------------------------------------------------------------------------------

    async def _in_turn(self, turn: _ThreadedTurn, call: Callable[[], T]) -> T:
        """Call a function in the thread of a turn, which takes no batches yet."""
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(call())
            except BaseException as error:  # an exit would end the event loop that waits for it
                done.set_exception(error if isinstance(error, Exception) else error_of_model(error))

        self._put(turn, work)
        return await asyncio.wrap_future(done)

    def _put(self, turn: _ThreadedTurn, job: Callable[[], None]) -> None:
        turn.jobs.put(job)
        if turn.thread is None:
            # a daemon, as the thread of any instance
            name = f"instance {self.spec.name}"
            turn.thread = threading.Thread(target=self._serve, args=(turn,), name=name, daemon=True)
            turn.thread.start()

    def _serve(self, turn: _ThreadedTurn) -> None:
        restrict_thread(self.spec.cores)
        with contextlib.suppress(RuntimeError):  # the loop is gone only when the process ends without draining
            while (job := turn.jobs.get()) is not None:
                job()

    def _work(self) -> None:
        """Take batches while the instance is alive and has a free turn."""
        if self._first.get() is not None or not self._takes_batches:
            return
        with contextlib.suppress(RuntimeError):
            while True:
                with self._state:
                    self._state.wait_for(lambda: self._free and not self._is_dead)
                    self._waiting.under_way = self.depth - len(self._free)
                batch = self._queue.get(self._waiting)
                if batch is None:
                    break
                self._begin(batch)
            with self._state:
                self._state.wait_for(lambda: len(self._free) == self.depth)
            self._loop.call_soon_threadsafe(self._ended.set)

    def _begin(self, batch: SubmittedBatch) -> None:
        """Have a batch run; one that came to an instance which has died since goes back."""
        with self._state:
            turn = None if self._is_dead else self._free.pop()
        if turn is None:
            self._queue.put_back(batch)
        else:
            self._put(turn, partial(self._run_in, turn, batch))

    def _run_in(self, turn: _ThreadedTurn, batch: SubmittedBatch) -> None:
        executed = self._run(batch, turn)
        if executed.death is not None and not turn.is_apart:
            with self._state:  # before the owner of the batch hears of it, and sends the next one
                self._is_dead = True
        if batch.settler is not None and isinstance(executed, ExecutedWaves):
            batch.settler.answer(batch, executed)  # the event loop is a wake-up away
        self._loop.call_soon_threadsafe(self._pool.finish, batch, executed)
        with self._state:
            # nothing is under way in a dead instance then, and nothing begins
            is_last = self._is_dead and len(self._free) == self.depth - 1
            if not is_last:
                self._give_back(turn)
        if is_last:
            self._revive(turn)
            with self._state:
                self._is_dead = self._is_shared = False
                self._give_back(turn)

    def _give_back(self, turn: _ThreadedTurn) -> None:
        """Have a turn free again; `_state` is held."""
        self._free.append(turn)
        self._waiting.under_way = self.depth - len(self._free)
        self._state.notify_all()

    def _revive(self, turn: _ThreadedTurn) -> None:
        is_new = False
        while not is_new:
            asyncio.run_coroutine_threadsafe(self._replace(), self._loop).result()
            try:
                self._start(turn)
                is_new = True
            except MODEL_ERRORS as error:
                _log.error("instance %s cannot be made again: %s", self.spec.name, error)
                is_new = self._closing.is_set()

    def _start(self, turn: _ThreadedTurn) -> None:
        """Notify the instance of the thread of a turn, once."""
        instance = self._instance
        if instance is not None and turn.started_for is not instance:
            self._started()
            turn.started_for = instance

    def _execute(self, execution: Batch | WaveBatch, turn: Turn) -> Executed:
        assert isinstance(turn, _ThreadedTurn)
        if turn.started_for is not self._instance:
            try:
                self._start(turn)
            except MODEL_ERRORS as error:
                raise InstanceDied(f"a thread of it cannot be started: {error}", blameless=True) from error
        try:
            return super()._execute(execution, turn)
        except Interrupted:
            raise
        except InstanceDied as death:
            with self._state:
                self._is_dead = self._takes_batches  # before its turn is free: none that begins now is to blame
                others = sum(one.running is not None for one in self.turns) > 1
                self._is_shared |= others and not death.blameless
                death.shared |= self._is_shared
            raise
