"""Workers: each runs the batches of one instance, and replaces the instance when it dies.

An instance over arrays has its own thread, which joins, runs, cuts and packs a batch before the event loop hears of it.
An instance over requests runs as a coroutine. `instance_pool` decides which worker gets a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from charonia import failpoints
from charonia.backend import (
    BatchInstance,
    DeviceLost,
    InstanceDied,
    InstanceSpec,
    Interrupted,
    InterruptibleInstance,
    RequestInstance,
    SelfCheckingInstance,
    StreamingInstance,
)
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, InternalError, error_of_model
from charonia.exchange.exchanging_instance import ExchangingInstance
from charonia.tasks import MODEL_ERRORS
from charonia.wire import RequestRecord
from executors.backends.given_objects import code_of_models
from executors.batches.assembly import Planner, Workspace
from executors.batches.batch_results import Death, Executed
from executors.batches.execution import Batch
from executors.batches.sequences import Sequences
from executors.batches.wave_columns import is_prompt
from executors.batches.wave_execution import ExecutedWaves, WaveBatch
from executors.host.host_policy import restrict_thread
from executors.isolation.strings_apart import StringsApart

from .submitted_batch import SubmittedBatch, instance_died_error
from .task_queue import LOOKS, TaskQueue
from .thread_queue import INTERRUPTER, ThreadQueue, WaitingThread

_log = logging.getLogger(__name__)

Instance = BatchInstance | RequestInstance | StreamingInstance

_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 30.0
_TRIES_BEFORE_FAILING = 3
"""After as many failures in a row to make an instance again, the batches that wait are failed if no other is left."""


class Pool(Protocol):
    """What a worker needs of its pool. Implemented by `executors.running.instance_pool.InstancePool`."""

    version: int
    ceiling_s: float
    sequences: Sequences | None
    planner: Planner
    apart: StringsApart | None

    @property
    def create(self) -> Callable[[InstanceSpec], Awaitable[Instance]]: ...

    def execution_of(self, batch: SubmittedBatch, generation: int) -> Batch: ...

    def all_down(self) -> bool: ...

    def revived(self) -> None: ...

    def fail_queued(self, error: CharoniaError) -> None: ...

    def finish(self, batch: SubmittedBatch, executed: Executed) -> None: ...

    def finish_stream(self, batch: SubmittedBatch) -> None: ...

    def freed(self, batch: SubmittedBatch) -> None: ...


class Turn:
    """A batch that an instance over arrays runs in a thread: the instance, its input buffers, and what runs now."""

    __slots__ = ("instance", "is_apart", "running", "thread", "workspace")

    def __init__(self) -> None:
        self.instance: BatchInstance | None = None
        self.is_apart = False
        """Whether the current or last batch runs in another process, which has a time limit of its own."""
        self.running: tuple[SubmittedBatch, int] | None = None
        """The current batch and its start (monotonic ns)."""
        self.thread: threading.Thread | None = None
        self.workspace = Workspace()

    def stack(self) -> str:
        """The thread's current stack as text, innermost call last."""
        frame = sys._current_frames().get(self.thread.ident or 0) if self.thread is not None else None
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


class Worker(ABC):
    """Runs batches on one instance. `down` while the instance is dead; a passive worker (C8) is never started."""

    depth = 1
    """How many batches it runs at a time."""

    def __init__(self, pool: Pool, spec: InstanceSpec, passive: bool) -> None:
        self.spec, self.passive, self.down = spec, passive, False
        self.generation = 1
        """Counts its instances: a new one does not know the state of the one before."""
        self._pool = pool
        self._closing = asyncio.Event()
        self._soon: Callable[..., object] | None = None
        """The event loop's `call_soon`, where instances run in it."""

    @abstractmethod
    def start(self) -> None:
        """Begin to take batches from the queue."""

    @abstractmethod
    def submit(self, batch: SubmittedBatch) -> None:
        """Queue a batch for this worker alone, where the queue is its own."""

    async def prepare(self) -> None:
        """Make the instance ready to execute, before `start`. Raises what the instance raises."""
        return

    @abstractmethod
    async def execute(self, records: Sequence[RequestRecord]) -> Executed:
        """Run one warm-up batch, outside the queue. Raises `InstanceDied`."""

    @abstractmethod
    async def close(self) -> None:
        """Stop after the batches that are queued before this call, then unload the instance."""

    @abstractmethod
    async def ended(self) -> None:
        """Wait until this worker takes no more batches: it took the end from a queue that several workers share."""

    @abstractmethod
    async def leave(self) -> None:
        """Unload the instance of a worker that takes no more batches, or never took one."""

    def found_dead(self, instance: object) -> bool:
        """Replace the instance, if it is this one; False: it is not, or the next batch finds out."""
        return False

    @property
    def idle_self_check(self) -> SelfCheckingInstance | None:
        """The instance, when it has a health check and runs nothing; else None."""
        return None

    @abstractmethod
    async def _create(self) -> None:
        """Make the instance. Raises what its backend raises."""

    @abstractmethod
    async def _unload(self) -> None:
        """Close the instance, if there is one. Errors are logged."""

    @property
    def is_stateless(self) -> bool:
        """Whether the instance declares that it keeps no state between executions."""
        return False

    def take_queued(self) -> list[SubmittedBatch]:
        """Remove and return the batches in its own queue, if it has one."""
        return []

    def _execution_of(self, batch: SubmittedBatch) -> Batch | WaveBatch:
        if batch.waves:
            planner, version = self._pool.planner, self._pool.version
            return WaveBatch(planner, version, batch.waves, batch.put_columns, batch.unwanted, self._soon)
        return self._pool.execution_of(batch, self.generation)

    def _warm_up(self, records: Sequence[RequestRecord]) -> Batch:
        sequences = self._pool.sequences
        steps = sequences.warm_up(len(records)) if sequences is not None else None
        return Batch(self._pool.planner, self._pool.version, records, steps=steps)

    def _died(self, execution: Batch | WaveBatch, death: InstanceDied) -> Executed:
        _log.error("instance %s died: %s %s", self.spec.name, death, death.stderr)
        # while closing, the instance was ended by us
        blameless = death.blameless or self._closing.is_set()
        execution.executed.death = Death(
            *(self.spec.name, str(death), death.stderr, blameless, death.shared),
            ends_process=isinstance(death, DeviceLost),
        )
        return execution.executed

    def _failed(self, execution: Batch | WaveBatch, error: Exception) -> Executed:
        """Answer the callers after an error of ours, which is not the model's fault."""
        _log.error("instance %s could not execute a batch", self.spec.name, exc_info=error)
        return execution.fail_all(InternalError(f"{type(error).__name__}: {error}"))

    async def _replace(self, delay_s: float = _FIRST_BACKOFF_S) -> None:
        """Make a new instance, with back-off from `delay_s` on, until it works or the pool closes.

        Batches wait meanwhile, however long that takes. They are failed when it has failed several times.
        """
        self.down = True
        self.generation += 1
        await self._unload()
        failures = 0
        while not await _set_within(self._closing, delay_s):
            try:
                await self._create()
                self.down = False
                self._pool.revived()
                return
            except Exception as error:
                _log.error("instance %s cannot be made again: %s", self.spec.name, error)
                failures += 1
                if failures >= _TRIES_BEFORE_FAILING and self._pool.all_down():
                    self._pool.fail_queued(instance_died_error(self.spec.name))
            delay_s = min(delay_s * 2, _LAST_BACKOFF_S)


def replacement_delay_s(times: int) -> float:
    """Return how long to wait before an instance is made again after this many that ended soon, in seconds."""
    return float(min(_FIRST_BACKOFF_S * 2 ** min(times, 16), _LAST_BACKOFF_S))


def is_unwanted(batch: SubmittedBatch) -> bool:
    """Whether a batch may be ended, as no request of it is wanted any more."""
    return batch.steps is None and bool(batch.records) and all(one.id in batch.unwanted for one in batch.records)


def self_checking(instance: object) -> SelfCheckingInstance | None:
    """Return the instance if it has a health check (P6), else None."""
    return instance if isinstance(instance, SelfCheckingInstance) and instance.checks_health else None


async def close_instance_of(instance: RequestInstance | StreamingInstance, name: str) -> None:
    """Close a cooperative instance. Errors are logged."""
    try:
        with code_of_models():
            await instance.close_instance()
    except CharoniaError as error:
        _log.error("instance %s failed to finalize: %s", name, error)
    except Exception:
        _log.exception("instance %s failed to close", name)


class ThreadWorker(Worker):
    """Runs a `BatchInstance` in a thread."""

    def __init__(
        self, pool: Pool, spec: InstanceSpec, instance: BatchInstance, passive: bool, queue: ThreadQueue
    ) -> None:
        super().__init__(pool, spec, passive)
        self.turns = [Turn()]
        self._turn = self.turns[0]
        self._queue = queue
        self._waiting = WaitingThread(self)
        self._instance: BatchInstance | None = None
        self.interruptible: InterruptibleInstance | None = None
        """The instance, if it may run in the event loop: on any core, and only until it is interrupted."""
        self._take(instance)
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None
        self._first: SimpleQueue[tuple[Future[Executed | None], Batch | None] | None] = SimpleQueue()
        """What its thread does before it takes batches; None ends that."""
        self._takes_batches = False
        self._is_lent = False
        """The event loop executes in place of the thread: nothing may wait there."""
        self._ended = asyncio.Event()

    def start(self) -> None:
        self._takes_batches = True
        self._first.put(None)
        self._begin_thread()

    def _begin_thread(self) -> None:
        if self._thread is None:
            # a daemon: a native library that hangs must not keep the process from ending
            name = f"instance {self.spec.name}"
            self._turn.thread = self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def submit(self, batch: SubmittedBatch) -> None:
        self._queue.put(batch)

    @property
    def is_stateless(self) -> bool:
        return bool(getattr(self._instance, "stateless", False))

    def take_queued(self) -> list[SubmittedBatch]:
        return self._queue.take_all()

    async def prepare(self) -> None:
        if hasattr(self._instance, "started"):
            await self._in_thread(None)

    async def execute(self, records: Sequence[RequestRecord]) -> Executed:
        executed = await self._in_thread(self._warm_up(records))
        assert executed is not None
        return executed

    async def _in_thread(self, execution: Batch | None) -> Executed | None:
        """Execute in the instance's thread, which takes no batches yet; None tells the instance of its thread."""
        self._begin_thread()
        done: Future[Executed | None] = Future()
        self._first.put((done, execution))
        return await asyncio.wrap_future(done)

    @property
    def idle_self_check(self) -> SelfCheckingInstance | None:
        return None if self._turn.running is not None else self_checking(self._instance)

    def cancel(self, batch: SubmittedBatch) -> None:
        """End the execution of a batch none of whose requests is wanted any more, if the instance can be interrupted.

        Another execution that is interrupted, as this one just ended, runs again.
        """
        running, instance = self._turn.running, self._instance
        if running is None or running[0] is not batch or not isinstance(instance, InterruptibleInstance):
            return
        if is_unwanted(batch):
            with contextlib.suppress(Exception):  # one that cannot be interrupted runs to its end
                instance.interrupt()

    async def close(self) -> None:
        self._closing.set()
        if self._takes_batches:
            self._queue.put(None)
            await self._ended.wait()
        await self.leave()

    async def ended(self) -> None:
        await self._ended.wait()

    async def leave(self) -> None:
        self._closing.set()
        if self._thread is not None:
            if self._takes_batches:
                self._thread.join()
            else:  # it may be in a warm-up that waits for the loop
                self._first.put(None)
                await asyncio.to_thread(self._thread.join)
        await self._unload()

    async def replace(self) -> None:
        """Replace the instance, which died in the event loop, and end the loan of the thread."""
        await self._replace()
        self._queue.give_back(self._waiting)

    async def _create(self) -> None:
        created = await self._pool.create(self.spec)
        assert isinstance(created, BatchInstance)
        self._take(created)

    def _take(self, instance: BatchInstance) -> None:
        self._instance = self._turn.instance = instance
        self._turn.workspace = Workspace(instance.allocate if isinstance(instance, ExchangingInstance) else None)
        if hasattr(instance, "started"):
            return  # it wants the one thread
        if isinstance(instance, InterruptibleInstance) and self.spec.kind == "CPU" and not self.spec.cores:
            self.interruptible = instance

    async def _unload(self) -> None:
        instance, self._instance, self.interruptible = self._instance, None, None
        for turn in self.turns:
            turn.instance = None
            turn.workspace = Workspace()  # the old one may hold memory of the instance
        if instance is not None:
            try:
                with code_of_models():
                    await asyncio.to_thread(instance.close)
            except Exception:
                _log.exception("instance %s failed to close", self.spec.name)

    def _execute(self, execution: Batch | WaveBatch, turn: Turn) -> Executed:
        if turn.instance is None:
            raise InstanceDied(instance_died_error(self.spec.name).message, blameless=True)
        apart = self._pool.apart
        if apart is not None and not self._is_lent and execution.has_many_strings:
            return self._execute_apart(execution, turn, turn.instance, apart)
        return execution.run_on(turn.instance, turn.workspace)

    def _execute_apart(
        self, execution: Batch | WaveBatch, turn: Turn, instance: BatchInstance, apart: StringsApart
    ) -> Executed:
        """Execute where the strings of this batch keep no lock of this process; here where that cannot be had."""
        turn.is_apart = True
        other = apart.take(self.spec)
        if other is not None:
            try:
                return execution.run_on(other, turn.workspace)
            finally:
                apart.give_back(other)
        if turn.running is not None:
            turn.running = (turn.running[0], monotonic_ns())  # what was waited for is not the model's time
        turn.is_apart = False
        return execution.run_on(instance, turn.workspace)

    def _started(self) -> None:
        """Notify a new instance that this thread executes it from now on."""
        started = getattr(self._instance, "started", None)
        if started is not None:
            started()

    def _work(self) -> None:
        restrict_thread(self.spec.cores)
        while (first := self._first.get()) is not None:
            done, execution = first
            try:
                if execution is None:
                    self._started()
                done.set_result(None if execution is None else self._execute(execution, self._turn))
            except BaseException as error:  # an exit would end the event loop that waits for it
                done.set_exception(error if isinstance(error, Exception) else error_of_model(error))
        if not self._takes_batches:
            return
        # the loop is gone only when the process ends without draining
        with contextlib.suppress(RuntimeError):
            while (batch := self._queue.get(self._waiting)) is not None:
                executed = self._run(batch, self._turn)
                if batch.settler is not None and isinstance(executed, ExecutedWaves):
                    batch.settler.answer(batch, executed)  # the event loop is a wake-up away
                self._loop.call_soon_threadsafe(self._pool.finish, batch, executed)
                is_new = executed.death is None or self._turn.is_apart
                while not is_new:
                    asyncio.run_coroutine_threadsafe(self._replace(), self._loop).result()
                    is_new = self._begins_anew()
            self._loop.call_soon_threadsafe(self._ended.set)

    def _begins_anew(self) -> bool:
        """Whether the instance that replaces a dead one can be used in this thread."""
        try:
            self._started()
        except MODEL_ERRORS as error:
            _log.error("instance %s cannot be made again: %s", self.spec.name, error)
            return self._closing.is_set()
        return True

    def _run(self, batch: SubmittedBatch, turn: Turn) -> Executed:
        turn.running = (batch, monotonic_ns())
        try:
            while True:
                turn.is_apart = False
                try:
                    return self._attempt(batch, turn)
                except Interrupted:  # meant for an execution that ended before, or for requests that now are left out
                    continue
        finally:
            turn.running = None

    def _attempt(self, batch: SubmittedBatch, turn: Turn) -> Executed:
        execution = self._execution_of(batch)
        batch.planned = execution.planned
        failpoints.hit("executor.executing")
        try:
            return self._execute(execution, turn)
        except Interrupted:  # the batch runs again, and stores its answers again
            if isinstance(execution, WaveBatch) and batch.take_back is not None:
                for reference in execution.stored:
                    batch.take_back(reference)
            raise
        except InstanceDied as death:
            return self._died(execution, death)
        except Exception as error:
            return self._failed(execution, error)

    def run_here(self, batch: SubmittedBatch) -> Executed:
        """Execute a batch in the event loop while this worker's thread is borrowed. Raises `Interrupted`."""
        assert self.interruptible is not None
        INTERRUPTER.begin(self.interruptible)
        self._is_lent = True
        try:
            return self._attempt(batch, self._turn)
        finally:
            self._is_lent = False
            INTERRUPTER.end()


class TaskWorker(Worker):
    """Runs a `RequestInstance` in a task."""

    def __init__(
        self,
        pool: Pool,
        spec: InstanceSpec,
        instance: RequestInstance,
        passive: bool,
        queue: TaskQueue,
    ) -> None:
        super().__init__(pool, spec, passive)
        self._queue = queue
        self._instance: RequestInstance | None = instance
        self._task: asyncio.Task[None] | None = None
        self._current: SubmittedBatch | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._soon = loop.call_soon
        self._task = loop.create_task(self._work(), name=f"instance {self.spec.name}")

    def submit(self, batch: SubmittedBatch) -> None:
        self._queue.put(batch)

    @property
    def is_stateless(self) -> bool:
        return bool(getattr(self._instance, "stateless", False))

    def take_queued(self) -> list[SubmittedBatch]:
        return self._queue.take_all()

    async def execute(self, records: Sequence[RequestRecord]) -> Executed:
        return await self._execute(self._warm_up(records))

    async def close(self) -> None:
        self._closing.set()
        if self._task is not None:
            self._queue.put(None)
            await self._task
        await self.leave()

    async def ended(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task})

    async def leave(self) -> None:
        self._closing.set()
        await self._unload()

    @property
    def idle_self_check(self) -> SelfCheckingInstance | None:
        return None if self._current is not None else self_checking(self._instance)

    def cancel(self, batch: SubmittedBatch, ids: frozenset[bytes]) -> None:
        """Notify the model that these requests are no longer wanted, if it runs this batch."""
        if batch is self._current and batch.execution is not None and self._instance is not None:
            batch.execution.cancel(ids, self._instance)

    def ask_to_end(self, batch: SubmittedBatch, ids: frozenset[bytes]) -> None:
        """Notify the model that these requests are cancelled, if it runs this batch; no wave has such requests."""
        if batch is self._current and isinstance(batch.execution, Batch) and self._instance is not None:
            batch.execution.notify(ids, self._instance)

    def _remind(self, batch: SubmittedBatch) -> None:
        """Notify the model of what was cancelled before it had it, once it has."""
        if batch.cancelled:
            asyncio.get_running_loop().call_soon(self.ask_to_end, batch, batch.cancelled)

    async def _create(self) -> None:
        created = await self._pool.create(self.spec)
        assert isinstance(created, RequestInstance)
        self._instance = created

    async def _unload(self) -> None:
        instance, self._instance = self._instance, None
        if instance is not None:
            await close_instance_of(instance, self.spec.name)

    async def _execute(self, execution: Batch | WaveBatch) -> Executed:
        if self._instance is None:
            raise InstanceDied(instance_died_error(self.spec.name).message, blameless=True)
        return await execution.run_requests_on(self._instance)

    async def _work(self) -> None:
        while (batch := await self._queue.get(self)) is not None:
            executed = await self._run(batch)
            if batch.settler is not None and isinstance(executed, ExecutedWaves):
                batch.settler.answer(batch, executed)
            self._pool.finish(batch, executed)
            if executed.death is not None:
                await self._replace()

    def begin(self, batch: SubmittedBatch, *, looks: bool = False) -> None:
        """Begin with a batch of waves while this worker is borrowed, and end the loan when it has ended.

        So the model gets them now, and their answers leave when they come, without this worker's task; that does all
        that the instance takes or answers in another way. With `looks`, the answer is waited for for a moment.
        """
        instance, execution = self._instance, None
        try:
            execution = self._prepare(batch)
            begun = (
                isinstance(execution, WaveBatch)
                and is_prompt(instance)
                and execution.begin_on(instance, partial(self._replied, batch, execution))
            )
        except Exception:  # as if it had not begun: the task runs into the same
            begun = False
        if not begun:
            self._queue.hand(self, batch)
        elif looks and isinstance(execution, WaveBatch) and LOOKS.begin(monotonic_ns()):
            execution.look()
            LOOKS.end(monotonic_ns(), answered=self._current is not batch)

    def _replied(self, batch: SubmittedBatch, execution: WaveBatch) -> None:
        """The instance has answered a batch that has begun, or has died."""
        try:
            executed = execution.ended()
        except Exception as error:
            executed = self._failed(execution, error)
        if executed is None:
            self._queue.hand(self, batch)
            return
        self._current = batch.execution = None
        if batch.settler is not None and isinstance(executed, ExecutedWaves):
            batch.settler.answer(batch, executed)
        self._queue.give_back(self)
        # its owner, who may be submitting it right now, hears of the end later
        asyncio.get_running_loop().call_soon(self._pool.finish, batch, executed)

    def _prepare(self, batch: SubmittedBatch) -> Batch | WaveBatch:
        execution = batch.execution = self._execution_of(batch)
        if isinstance(execution, Batch):
            execution.on_running = partial(self._remind, batch)
        self._current = batch
        batch.planned = execution.planned
        failpoints.hit("executor.executing")
        return execution

    async def _run(self, batch: SubmittedBatch) -> Executed:
        prepared = batch.execution if self._current is batch else None
        execution = prepared or self._prepare(batch)
        try:
            return await self._execute(execution)
        except InstanceDied as death:
            return self._died(execution, death)
        except Exception as error:
            return self._failed(execution, error)
        finally:
            self._current = batch.execution = None


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
