"""The workers of one loaded model version: one per instance, all taking from one queue, so that none waits beside work.

An instance over arrays has a thread of its own, in which joining, running, cutting and packing happen; the event loop
only hears of finished batches. An instance over requests is a coroutine. An instance that dies is made anew, with
back-off, while the others go on. What a batch's end means for the log is `executors.intake`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia.backend import BatchInstance, InstanceDied, InstanceSpec, RequestInstance
from charonia.errors import CharoniaError, InternalError
from charonia.models.interface import ModelInterface
from charonia.wire import BatchHeader, RequestRecord

from .accounting import Executed
from .assembly import Planner, Workspace
from .execution import Batch

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 30.0

Instance = BatchInstance | RequestInstance
Create = Callable[[InstanceSpec], Awaitable[Instance]]


@dataclass(slots=True, eq=False)
class Job:
    """One batch on its way through an instance. `done` is called in the event loop when it has been executed."""

    records: Sequence[RequestRecord]
    done: Callable[[Job, Executed], None]
    header: BatchHeader | None = None
    stream: bytes = b""
    entry_id: bytes = b""


def died(instance: str) -> InternalError:
    """P19's text: the instance's process is gone."""
    return InternalError(f"Stub process '{instance}' is not healthy.")


@dataclass(slots=True, eq=False)
class InstancePool:
    """The instances of one loaded version and their common queue. Made, used and closed in one event loop."""

    interface: ModelInterface
    version: int
    create: Create
    planner: Planner = field(init=False)
    unfinished: int = 0
    _workers: list[_ThreadWorker | _TaskWorker] = field(default_factory=list)
    _blocking: queue.SimpleQueue[Job | None] = field(default_factory=queue.SimpleQueue)
    _cooperative: asyncio.Queue[Job | None] = field(default_factory=asyncio.Queue)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.planner = Planner(self.interface)
        self._idle.set()

    @property
    def slots(self) -> int:
        """Batches executed at once."""
        return sum(not worker.passive for worker in self._workers)

    def add(self, spec: InstanceSpec, instance: Instance, *, passive: bool = False) -> None:
        """Give a created instance a worker. A passive one (C8) is held but never given work."""
        worker: _ThreadWorker | _TaskWorker
        if isinstance(instance, BatchInstance):
            worker = _ThreadWorker(self, spec, instance, passive, self._blocking)
        else:
            worker = _TaskWorker(self, spec, instance, passive, self._cooperative)
        self._workers.append(worker)

    def start(self) -> None:
        """Start taking work. All instances of a version are of one kind: a backend's."""
        for worker in self._workers:
            if not worker.passive:
                worker.start()

    def submit(self, job: Job) -> None:
        """Queue a batch for the next free instance."""
        self.unfinished += 1
        self._idle.clear()
        if self._workers and isinstance(self._workers[0], _TaskWorker):
            self._cooperative.put_nowait(job)
        else:
            self._blocking.put(job)

    def take_back(self) -> list[Job]:
        """The batches no instance has begun; they will not be executed here."""
        taken: list[Job] = []
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._blocking.get_nowait()
                if job is not None:
                    taken.append(job)
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                job = self._cooperative.get_nowait()
                if job is not None:
                    taken.append(job)
        self._finished(len(taken))
        return taken

    async def idle(self) -> None:
        """Wait until every submitted batch has been executed or taken back."""
        await self._idle.wait()

    async def close(self) -> None:
        """Stop the workers after what is queued and unload the instances."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def warm_up(
        self, batches: Sequence[Sequence[RequestRecord]]
    ) -> list[tuple[Sequence[RequestRecord], Executed]]:
        """Run batches on every instance before `start`; what they did, to be counted (I12).

        Raises the first request's error: a warm-up that fails, fails the load (C17).
        """
        done: list[tuple[Sequence[RequestRecord], Executed]] = []
        for worker in self._workers:
            for records in batches:
                try:
                    executed = await worker.execute(records)
                except InstanceDied:
                    raise died(worker.spec.name) from None
                if executed.failures:
                    raise executed.failures[0].error
                done.append((records, executed))
        return done

    def all_down(self) -> bool:
        return all(worker.down for worker in self._workers if not worker.passive)

    def finish(self, job: Job, executed: Executed) -> None:
        """A worker has executed a batch. In the event loop."""
        try:
            job.done(job, executed)
        finally:
            self._finished(1)

    def _finished(self, count: int) -> None:
        self.unfinished -= count
        if self.unfinished == 0:
            self._idle.set()


class _ThreadWorker:
    """A `BatchInstance` and its thread."""

    def __init__(
        self,
        pool: InstancePool,
        spec: InstanceSpec,
        instance: BatchInstance,
        passive: bool,
        jobs: queue.SimpleQueue[Job | None],
    ) -> None:
        self.spec, self.passive, self.down = spec, passive, False
        self._pool, self._jobs = pool, jobs
        self._instance: BatchInstance | None = instance
        self._workspace = Workspace()
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._ended = asyncio.Event()

    def start(self) -> None:
        # a daemon: a native library that hangs must not keep the process from ending
        self._thread = threading.Thread(target=self._work, name=f"instance {self.spec.name}", daemon=True)
        self._thread.start()

    async def execute(self, records: Sequence[RequestRecord]) -> Executed:
        """One batch outside the queue."""
        return await asyncio.to_thread(self._execute, Batch(self._pool.planner, self._pool.version, records))

    async def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._jobs.put(None)
            await self._ended.wait()
            self._thread.join()
        instance, self._instance = self._instance, None
        if instance is not None:
            await asyncio.to_thread(_close_quietly, self.spec, instance)

    def _execute(self, batch: Batch) -> Executed:
        if self._instance is None:
            raise InstanceDied(died(self.spec.name).message)
        return batch.run_on(self._instance, self._workspace)

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                batch = Batch(self._pool.planner, self._pool.version, job.records)
                try:
                    executed = self._execute(batch)
                except InstanceDied as death:
                    _log.error("instance %s died: %s %s", self.spec.name, death, death.stderr)
                    executed = batch.fail_all(died(self.spec.name))
                    self._tell(job, executed)
                    self._replace()
                except Exception as error:  # ours, not the model's: the callers still get an answer
                    _log.exception("instance %s could not execute a batch", self.spec.name)
                    self._tell(job, batch.fail_all(InternalError(f"{type(error).__name__}: {error}")))
                else:
                    self._tell(job, executed)
        finally:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ended.set)

    def _tell(self, job: Job, executed: Executed) -> None:
        # the loop is gone only when the process ends without draining
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._pool.finish, job, executed)

    def _replace(self) -> None:
        self.down = True
        old, self._instance = self._instance, None
        if old is not None:
            _close_quietly(self.spec, old)
        delay_s = _FIRST_BACKOFF_S
        while not self._closing.wait(delay_s):
            created: Any = asyncio.run_coroutine_threadsafe(_create(self._pool, self.spec), self._loop)
            try:
                self._instance = created.result()
                self.down = False
                return
            except Exception as error:
                _log.error("instance %s cannot be made again: %s", self.spec.name, error)
                if self._pool.all_down():
                    self._fail_queued()
            delay_s = min(delay_s * 2, _LAST_BACKOFF_S)

    def _fail_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is None:
                    self._jobs.put(None)
                    return
                batch = Batch(self._pool.planner, self._pool.version, job.records)
                self._tell(job, batch.fail_all(died(self.spec.name)))


class _TaskWorker:
    """A `RequestInstance` and its task."""

    def __init__(
        self,
        pool: InstancePool,
        spec: InstanceSpec,
        instance: RequestInstance,
        passive: bool,
        jobs: asyncio.Queue[Job | None],
    ) -> None:
        self.spec, self.passive, self.down = spec, passive, False
        self._pool, self._jobs = pool, jobs
        self._instance: RequestInstance | None = instance
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work(), name=f"instance {self.spec.name}")

    async def execute(self, records: Sequence[RequestRecord]) -> Executed:
        return await self._execute(Batch(self._pool.planner, self._pool.version, records))

    async def close(self) -> None:
        self._closing.set()
        if self._task is not None:
            self._jobs.put_nowait(None)
            await self._task
        instance, self._instance = self._instance, None
        if instance is not None:
            await _close_request_instance(self.spec, instance)

    async def _execute(self, batch: Batch) -> Executed:
        if self._instance is None:
            raise InstanceDied(died(self.spec.name).message)
        return await batch.run_requests_on(self._instance)

    async def _work(self) -> None:
        while (job := await self._jobs.get()) is not None:
            batch = Batch(self._pool.planner, self._pool.version, job.records)
            try:
                executed = await self._execute(batch)
            except InstanceDied as death:
                _log.error("instance %s died: %s %s", self.spec.name, death, death.stderr)
                self._pool.finish(job, batch.fail_all(died(self.spec.name)))
                await self._replace()
            except Exception as error:  # ours, not the model's: the callers still get an answer
                _log.exception("instance %s could not execute a batch", self.spec.name)
                self._pool.finish(job, batch.fail_all(InternalError(f"{type(error).__name__}: {error}")))
            else:
                self._pool.finish(job, executed)

    async def _replace(self) -> None:
        self.down = True
        old, self._instance = self._instance, None
        if old is not None:
            await _close_request_instance(self.spec, old)
        delay_s = _FIRST_BACKOFF_S
        while not await _set_within(self._closing, delay_s):
            try:
                created = await _create(self._pool, self.spec)
                assert isinstance(created, RequestInstance)
                self._instance = created
                self.down = False
                return
            except Exception as error:
                _log.error("instance %s cannot be made again: %s", self.spec.name, error)
                if self._pool.all_down():
                    self._fail_queued()
            delay_s = min(delay_s * 2, _LAST_BACKOFF_S)

    def _fail_queued(self) -> None:
        while not self._jobs.empty():
            job = self._jobs.get_nowait()
            if job is None:
                self._jobs.put_nowait(None)
                return
            batch = Batch(self._pool.planner, self._pool.version, job.records)
            self._pool.finish(job, batch.fail_all(died(self.spec.name)))


async def _create(pool: InstancePool, spec: InstanceSpec) -> Instance:
    return await pool.create(spec)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _close_quietly(spec: InstanceSpec, instance: BatchInstance) -> None:
    try:
        instance.close()
    except Exception:
        _log.exception("instance %s failed to close", spec.name)


async def _close_request_instance(spec: InstanceSpec, instance: RequestInstance) -> None:
    try:
        await instance.close_instance()
    except CharoniaError as error:
        _log.error("instance %s failed to finalize: %s", spec.name, error)
    except Exception:
        _log.exception("instance %s failed to close", spec.name)
