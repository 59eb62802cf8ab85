"""The instances of one loaded version. All take batches from one queue, so that none idles while a batch waits.

`executors.running.workers` runs the batches, `executors.settling` settles them. The pool also detects batches that
exceed their execution time limit in a thread. A thread cannot be ended, so the pool reports such a batch, and the
executor's process ends in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from charonia.backend import (
    BatchInstance,
    InstanceDied,
    InstanceSpec,
    Interrupted,
    LateAnswering,
    ModelSource,
    RequestInstance,
    SelfCheckingInstance,
    StreamingInstance,
)
from charonia.batch_strategies import PARAMETER as STRATEGY
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, Unsupported
from charonia.models.ensemble import ENSEMBLE_SCHEDULING
from charonia.models.interface import InstanceGroup, ModelInterface
from charonia.models.latency_target import PARAMETER as TARGET
from charonia.tasks import Tasks
from charonia.wire import RequestRecord
from executors.backends.submissions import depth_of
from executors.batches.assembly import Planner
from executors.batches.batch_results import Death, Executed
from executors.batches.execution import Batch
from executors.batches.sequences import Sequences
from executors.batches.wave_execution import ExecutedWaves, WaveBatch
from executors.host.watchdog import LIMIT_S as STALL_LIMIT_S
from executors.isolation.strings_apart import StringsApart

from .deep_workers import DeepWorker
from .health import DEFAULT_INTERVAL_S
from .resource_grants import RateLimitedQueue, ResourceGrants
from .stream_workers import StreamWorker
from .submitted_batch import SubmittedBatch, instance_died_error, take_all
from .task_queue import TaskQueue
from .thread_queue import ThreadQueue
from .workers import Instance, TaskWorker, ThreadWorker, Worker

Create = Callable[[InstanceSpec], Awaitable[Instance]]
Hung = Callable[[SubmittedBatch, Death], None]

_MIN_WATCH_S = 0.01
_QUICK_NS = 150_000
"""A batch that takes longer gains little in the event loop, and would delay other batches."""
_QUICK_BYTES = 1 << 20
"""A batch with more bytes of tensors runs in a thread, however quick its model is: each copy of so many takes 0.15 ms,
and the model makes one, the answer another. With batches of 13 MB the event loop stood still for 3 to 5 ms."""
_PROMPT_NS = 400_000
"""The same of a batch that runs in another process, on the way to which most of the time is spent."""
_MEASURED = 4
"""The least of so many times is what a model takes: a busy machine adds to single ones."""
_CLOSED_NS = (1_000_000_000, 60_000_000_000)
"""For how long a model stays in its threads after an interrupted execution: at first, and at most."""


class Pace:
    """How quick the instances of one model version are: whether its waves may run in the event loop (docs/adr/0025)."""

    __slots__ = ("_closed_ns", "_closed_until_ns", "_least_ns", "_measured", "is_prompt", "is_quick")

    def __init__(self) -> None:
        self.is_quick = self.is_prompt = False
        self._least_ns = self._measured = 0
        self._closed_ns, _ = _CLOSED_NS
        self._closed_until_ns = 0

    def seen(self, executed: Executed) -> None:
        """Count the time of a batch."""
        took_ns = 0
        for run in executed.executions:
            took_ns += run.input_ns + run.infer_ns + run.output_ns
        if not self._measured or took_ns < self._least_ns:
            self._least_ns = took_ns
        self._measured += 1
        if self._measured == _MEASURED:
            self._measured = 0
            self.is_quick = self._least_ns <= _QUICK_NS and monotonic_ns() >= self._closed_until_ns
            self.is_prompt = self._least_ns <= _PROMPT_NS

    def interrupted(self) -> None:
        """An execution was interrupted: the model stays in its threads for a while, each time for longer."""
        self.is_quick = False
        self._measured = 0
        least_ns, most_ns = _CLOSED_NS
        now_ns = monotonic_ns()
        if now_ns - self._closed_until_ns > most_ns:
            self._closed_ns = least_ns
        self._closed_until_ns = now_ns + self._closed_ns
        self._closed_ns = min(most_ns, 2 * self._closed_ns)


@dataclass(slots=True, eq=False)
class InstancePool:
    """The instances of one loaded version and their queue. Create, use and close it in one event loop.

    When a thread has run a batch for `ceiling_s` seconds (0: no limit), `on_hung` is called once and the batch counts
    as finished. Its thread is lost, so `on_hung` must bring the process to an end. The same when an instance has died
    because this process has lost its GPU. With `resource_grants`, a rate
    limiter decides when an instance may take the next batch (Q1-Q4). With `sequences`, each batch is bound to one
    instance (S34).
    """

    interface: ModelInterface
    version: int
    create: Create
    ceiling_s: float = 0.0
    on_hung: Hung | None = None
    resource_grants: ResourceGrants | None = None
    sequences: Sequences | None = None
    close_model: Callable[[], Awaitable[None]] | None = None
    """Called once its instances are closed."""
    apart: StringsApart | None = None
    """Where batches with many strings run, if not on its instances."""
    planner: Planner = field(init=False)
    unfinished: int = 0
    used_ns: int = 0
    """Monotonic time of the last submitted batch; 0 for none."""
    streams: bool = False
    """Whether its instances may give several responses to a request."""
    _workers: list[ThreadWorker | TaskWorker | StreamWorker] = field(default_factory=list)
    _blocking: ThreadQueue = field(default_factory=ThreadQueue)
    _cooperative: TaskQueue = field(default_factory=TaskQueue)
    _streaming: asyncio.Queue[SubmittedBatch | None] = field(default_factory=asyncio.Queue)
    _pace: Pace = field(default_factory=Pace)
    _tasks: Tasks = field(default_factory=Tasks)
    _idle: asyncio.Event | None = None
    """Set when no batch is unfinished; made by the first call that waits for that."""
    _watch: asyncio.Task[None] | None = None
    _limited_queue: RateLimitedQueue | None = None
    _is_bound: bool = field(init=False)
    """Whether each batch is bound to one instance."""
    _may_run_here: bool = field(init=False)
    """Whether batches may run in the event loop. The ceiling is watched from there, so one that is shorter than a loop
    may stand still is kept only in threads; the default is longer."""
    _target_count: int = 0
    """The number of instances that stay while the pool shrinks; 0 when it does not."""

    def __post_init__(self) -> None:
        self.planner = Planner(self.interface)
        self._is_bound = self.interface.sequence_batching is not None
        self._may_run_here = not 0 < self.ceiling_s < STALL_LIMIT_S
        if self.resource_grants is not None:
            self._limited_queue = RateLimitedQueue(self.resource_grants, self._worker_of if self._is_bound else None)

    def _worker_of(self, batch: SubmittedBatch) -> ThreadWorker | TaskWorker | StreamWorker:
        """The worker of the instance that a batch is bound to."""
        active = [worker for worker in self._workers if not worker.passive]
        places = batch.header.sequences if batch.header is not None else None
        return active[places.instance % len(active) if places is not None else 0]

    def execution_of(self, batch: SubmittedBatch, generation: int) -> Batch:
        """A batch of requests, ready to run on an instance of this generation, with the steps of its sequences."""
        batch.generation = generation
        places = batch.header.sequences if batch.header is not None else None
        if self.sequences is not None and places is not None:
            if places.instance >= len(self._workers):
                generation = 0  # of an instance that has left: no other remembers its sequences
            batch.steps = self.sequences.begin(places, batch.records, generation)
        return Batch(
            self.planner, self.version, batch.records, batch.unwanted, batch.steps, batch.put, asyncio.to_thread
        )

    @property
    def is_stateless(self) -> bool:
        """Whether all instances declare that they keep no state between executions."""
        return all(worker.is_stateless for worker in self._workers)

    @property
    def slots(self) -> int:
        """How many batches can run at once: one in each instance, or its depth."""
        depths = [worker.depth for worker in self._workers if not worker.passive]
        return sum(depths[: self._target_count] if self._target_count else depths)

    @property
    def instance_count(self) -> int:
        """How many instances take batches, and stay."""
        return self._target_count or sum(not worker.passive for worker in self._workers)

    @property
    def limited_queue(self) -> RateLimitedQueue | None:
        """The queue behind the rate limiter; None without one."""
        return self._limited_queue

    @property
    def waiting_requests(self) -> int:
        """How many requests wait for resources; 0 without a rate limiter."""
        return self._limited_queue.waiting_requests if self._limited_queue is not None else 0

    def add(self, spec: InstanceSpec, instance: Instance, group: InstanceGroup | None = None) -> None:
        """Add a created instance of a group, with a worker. A passive instance (C8) gets no batches.

        Raises `InvalidArgument` when the rate limiter could never let it execute (Q3).
        """
        group = group or InstanceGroup(spec.name, 1, f"KIND_{spec.kind}")
        worker = self._worker_for(spec, instance, group)
        self._workers.append(worker)
        if self._limited_queue is not None:
            self._limited_queue.add(worker, group)

    def _worker_for(
        self, spec: InstanceSpec, instance: Instance, group: InstanceGroup
    ) -> ThreadWorker | TaskWorker | StreamWorker:
        worker: ThreadWorker | TaskWorker | StreamWorker
        if isinstance(instance, BatchInstance):
            is_free = self._limited_queue is None and not self._is_bound
            kind = DeepWorker if is_free and depth_of(instance) > 1 else ThreadWorker
            worker = kind(self, spec, instance, group.passive, self._blocking if is_free else ThreadQueue())
        elif isinstance(instance, StreamingInstance) and self._streams_on(instance):
            streaming = self._streaming if self._limited_queue is None and not self._is_bound else asyncio.Queue()
            worker = StreamWorker(self, spec, instance, group.passive, streaming)
            self.streams = True
        else:
            assert isinstance(instance, RequestInstance)
            own = self._cooperative if self._limited_queue is None and not self._is_bound else TaskQueue()
            worker = TaskWorker(self, spec, instance, group.passive, own)
        return worker

    def _streams_on(self, instance: StreamingInstance) -> bool:
        """Whether an instance answers request by request. Raises `Unsupported` when the model forbids it."""
        if self.interface.decoupled:
            return True
        block = self.interface.dynamic_batching
        ordered = block is not None and block.preserve_ordering
        if not isinstance(instance, RequestInstance):
            if ordered:
                raise Unsupported(
                    f"model '{self.interface.name}' is answered request by request, which preserve_ordering does not "
                    "allow"
                )
            return True
        return not ordered and not self._is_bound and isinstance(instance, LateAnswering) and instance.answers_later

    def start(self) -> None:
        """Start the workers. All instances of a version have one type: the backend's."""
        for worker in self._workers:
            if not worker.passive:
                worker.start()
        if self.ceiling_s > 0 and any(isinstance(worker, ThreadWorker) for worker in self._workers):
            self._watch = self._tasks.spawn(self._watch_ceiling(), "execution ceiling")

    def submit(self, batch: SubmittedBatch) -> None:
        """Queue a batch for the next free instance, or for the one it is bound to."""
        self.unfinished += 1
        self.used_ns = monotonic_ns()
        if self._limited_queue is not None:
            self._limited_queue.submit(batch)
        elif self._is_bound:
            self._worker_of(batch).submit(batch)
        elif self._workers and type(self._workers[0]) is TaskWorker:
            worker = self._cooperative.borrow() if batch.waves else None
            if worker is not None:
                worker.begin(batch, looks=self._pace.is_prompt and self.unfinished == 1)
            else:
                self._cooperative.put(batch)
        elif self._workers and type(self._workers[0]) is StreamWorker:
            self._streaming.put_nowait(batch)
        elif not (batch.waves and self._pace.is_quick and self._may_run_here and self._run_here(batch)):
            self._blocking.put(batch)

    def _run_here(self, batch: SubmittedBatch) -> bool:
        """Run and answer a batch of waves now, if it is small and an instance is free and may run in the event loop."""
        if sum([wave.size_bytes for wave in batch.waves]) > _QUICK_BYTES:
            return False
        if self.apart is not None and WaveBatch(self.planner, self.version, batch.waves).has_many_strings:
            return False
        waiting = self._blocking.borrow()
        if waiting is None:
            return False
        worker, executed = waiting.worker, None
        if worker is not None and worker.interruptible is not None:
            try:
                executed = worker.run_here(batch)
            except Interrupted:
                self._pace.interrupted()
        if executed is not None and batch.settler is not None and isinstance(executed, ExecutedWaves):
            batch.settler.answer(batch, executed)
        if worker is None or executed is None or executed.death is None:
            self._blocking.give_back(waiting)
        else:
            self._tasks.spawn(worker.replace())
        if executed is not None:  # its owner, who may be submitting it right now, hears of the end later
            asyncio.get_running_loop().call_soon(self.finish, batch, executed)
        return executed is not None

    def cancel(self, batch: SubmittedBatch, ids: frozenset[bytes]) -> None:
        """Cancel requests of a batch that were settled elsewhere: skip those not started, notify the others' model."""
        batch.unwanted |= ids
        for worker in self._workers:
            if isinstance(worker, ThreadWorker):
                worker.cancel(batch)
            else:
                worker.cancel(batch, ids)

    def ask_to_end(self, batch: SubmittedBatch, ids: frozenset[bytes]) -> None:
        """Requests of a batch are cancelled, and their responses are read: notify their model, once it has them."""
        batch.cancelled |= ids
        for worker in self._workers:
            if ids and isinstance(worker, TaskWorker | StreamWorker):
                worker.ask_to_end(batch, ids)

    def allow(self, batch: SubmittedBatch, request_id: bytes, count: int) -> None:
        """Let a request of a batch send its responses below index `count`."""
        if batch.stream is None:
            batch.allowed[request_id] = max(count, batch.allowed.get(request_id, 0))
        for worker in self._workers:
            if isinstance(worker, StreamWorker):
                worker.allow(batch, request_id, count)

    def take_queued(self) -> list[SubmittedBatch]:
        """Remove and return the batches that no instance has started."""
        taken = self._drain_queues()
        self._finished(len(taken))
        return taken

    def fail_queued(self, error: CharoniaError) -> None:
        """Answer the batches that no instance has started with an error, because no instance is left."""
        for batch in self._drain_queues():
            execution: Batch | WaveBatch
            if batch.waves:
                execution = WaveBatch(self.planner, self.version, batch.waves)
            else:
                execution = Batch(self.planner, self.version, batch.records, batch.unwanted)
            self.finish(batch, execution.fail_all(error))

    async def idle(self) -> None:
        """Wait until every submitted batch has been executed or taken out of the queue."""
        while self.unfinished:
            if self._idle is None:
                self._idle = asyncio.Event()
            await self._idle.wait()

    async def close(self) -> None:
        """Stop the workers after the queued batches, unload the instances, and then the model."""
        try:
            await asyncio.gather(*(worker.close() for worker in self._workers))
        finally:
            if self._watch is not None:
                self._watch.cancel()
            if self._limited_queue is not None:
                self._limited_queue.close()
            try:
                if self.apart is not None:
                    await self.apart.close()
            finally:
                if self.close_model is not None:
                    await self.close_model()

    async def warm_up(
        self, batches: Sequence[Sequence[RequestRecord]]
    ) -> list[tuple[Sequence[RequestRecord], Executed]]:
        """Prepare every instance, run batches on it before `start`, and return their results, which are counted (I12).

        Raises the first request's error: a failed warm-up fails the load (C17).
        """
        return [one for worker in self._workers for one in await _warm_up(worker, batches)]

    # -- adding and removing instances (R23) --------------------------------------------------------------------------

    @property
    def specs(self) -> list[InstanceSpec]:
        """The specifications from which its instances are made, and replaced when they die."""
        return [worker.spec for worker in self._workers]

    async def grow(
        self, specs: Sequence[InstanceSpec], group: InstanceGroup, batches: Sequence[Sequence[RequestRecord]]
    ) -> list[tuple[Sequence[RequestRecord], Executed]]:
        """Add instances of a group once they are made and warmed up, and return the results of their warm-up.

        Not with a rate limiter. Raises what a load raises; the pool is then unchanged.
        """
        workers: list[ThreadWorker | TaskWorker | StreamWorker] = []
        try:
            made = await asyncio.gather(*(self.create(spec) for spec in specs), return_exceptions=True)
            for spec, instance in zip(specs, made, strict=True):
                if not isinstance(instance, BaseException):
                    workers.append(self._worker_for(spec, instance, group))
            for failure in made:
                if isinstance(failure, BaseException):
                    raise failure
            done = [one for worker in workers for one in await _warm_up(worker, batches)]
        except BaseException:
            await asyncio.gather(*(worker.leave() for worker in workers))
            raise
        for worker in workers:
            self._workers.append(worker)
            worker.start()
        return done

    @property
    def is_shrinking(self) -> bool:
        return self._target_count > 0

    def set_target(self, count: int) -> None:
        """Set how many instances stay; `shrink` removes the others."""
        self._target_count = count

    async def shrink(self) -> None:
        """Remove instances down to the target after their current batches; returns when they are unloaded."""
        try:
            await (self._end_last() if self._is_bound else self._end_free())
        finally:
            self._target_count = 0

    async def _end_last(self) -> None:
        leaving = self._workers[self._target_count :]
        del self._workers[self._target_count :]
        await asyncio.gather(*(worker.close() for worker in leaving))

    async def _end_free(self) -> None:
        """End the first workers that become free: they share one queue."""
        count = len(self._workers) - self._target_count
        ends = {asyncio.ensure_future(worker.ended()): worker for worker in self._workers}
        for _ in range(count):
            if isinstance(self._workers[0], ThreadWorker):
                self._blocking.put(None)
            elif isinstance(self._workers[0], TaskWorker):
                self._cooperative.put(None)
            else:
                self._streaming.put_nowait(None)
        try:
            while count > 0:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in done:
                    worker = ends.pop(end)
                    self._workers.remove(worker)
                    count -= 1
                    await worker.leave()
        finally:
            for end in ends:
                end.cancel()

    def checking_instances(self) -> list[tuple[str, SelfCheckingInstance]]:
        """(name, instance) of the idle instances that have a health check (P6)."""
        return [
            (worker.spec.name, instance) for worker in self._workers if (instance := worker.idle_self_check) is not None
        ]

    def replace_dead(self, instance: SelfCheckingInstance) -> bool:
        """Make an instance again that was found dead while it ran nothing; False: its next batch will."""
        return any(worker.found_dead(instance) for worker in self._workers)

    def all_down(self) -> bool:
        return all(worker.down for worker in self._workers if not worker.passive)

    def finish(self, batch: SubmittedBatch, executed: Executed) -> None:
        """Pass on the result of a batch that was executed or whose instance died. Called in the event loop."""
        if batch.abandoned:
            return
        death = executed.death
        if death is not None and death.ends_process and self.on_hung is not None:
            batch.abandoned = True
            self.on_hung(batch, death)
            self._finished(1)
            return
        if batch.waves:
            self._pace.seen(executed)
        try:
            batch.done(batch, executed)
        finally:
            self._finished(1)
            if self._limited_queue is not None:
                self._limited_queue.finished(batch, died=executed.death is not None)

    def revived(self) -> None:
        """Called when a worker has a new instance in place of a dead one."""
        if self._limited_queue is not None:
            self._limited_queue.request_grants()

    def finish_stream(self, batch: SubmittedBatch) -> None:
        """Called when a streamed batch has ended. Its requests were settled one by one before."""
        if not batch.abandoned:
            self._finished(1)
        self.freed(batch)

    def freed(self, batch: SubmittedBatch) -> None:
        """Called when the batch's instance can take another batch."""
        if self._limited_queue is not None:
            self._limited_queue.finished(batch, died=False)

    def _drain_queues(self) -> list[SubmittedBatch]:
        taken: list[SubmittedBatch] = [] if self._limited_queue is None else self._limited_queue.take_all()
        if self._is_bound:
            return taken + [batch for worker in self._workers for batch in worker.take_queued()]
        return taken + self._blocking.take_all() + self._cooperative.take_all() + take_all(self._streaming)

    def _finished(self, count: int) -> None:
        self.unfinished -= count
        if self.unfinished == 0 and self._idle is not None:
            self._idle.set()
            self._idle = None

    # -- the execution time limit -------------------------------------------------------------------------------------

    async def _watch_ceiling(self) -> None:
        """Sleep until the oldest running batch could exceed its limit, so that a batch costs no timer of its own."""
        wait_s = self.ceiling_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self._check_ceiling(monotonic_ns())

    def _check_ceiling(self, now_ns: int) -> float:
        """Report batches past their limit; return the seconds until the next one could be."""
        wait_s = self.ceiling_s
        for worker in self._workers:
            if not isinstance(worker, ThreadWorker):
                continue
            for turn in worker.turns:
                running = turn.running
                if running is None or running[0].abandoned or turn.is_apart:
                    continue
                batch, since_ns = running
                left_s = self.ceiling_s - (now_ns - since_ns) / 1e9
                if left_s > 0:
                    wait_s = min(wait_s, left_s)
                    continue
                batch.abandoned = True
                if self.on_hung is not None:
                    text = f"it exceeded max_execution_s ({self.ceiling_s:g} s)"
                    self.on_hung(batch, Death(worker.spec.name, text, turn.stack()))
                self._finished(1)
        return max(wait_s, _MIN_WATCH_S)


@dataclass(slots=True, eq=False)
class LoadedVersion:
    """One loaded version of a model: its source, interface and instances. `executors.loading.loader` makes it."""

    model: str
    """The model's key."""
    source: ModelSource
    interface: ModelInterface
    content_hash: str
    pool: InstancePool
    labels: dict[str, list[str]]
    warmed: list[tuple[Sequence[RequestRecord], Executed]]
    """The results of its warm-up, which are counted (I12)."""
    load_ns: int
    health_interval_s: float = DEFAULT_INTERVAL_S
    health: asyncio.Task[None] | None = None
    """The task of its health checks while it is served (P6)."""
    memory: dict[str, int] = field(default_factory=dict)
    """What its backend says that it holds, in bytes, by kind of memory and number of the device: "GPU 0" (X7)."""
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.source.version

    @property
    def takes_waves(self) -> bool:
        """Whether its requests may come as waves: they may share any batch they fit, and are answered together."""
        interface, block = self.interface, self.interface.dynamic_batching
        if self.pool.streams or interface.decoupled or interface.sequence_batching is not None:
            return False
        if interface.scheduling == ENSEMBLE_SCHEDULING:
            return False  # its owner runs it, and it may contain sequence models
        if interface.has_ragged_input or STRATEGY in interface.parameters or TARGET in interface.parameters:
            return False
        if block is None:
            return True
        whole = {max(1, interface.max_batch_size)}
        return not block.preserve_ordering and set(block.preferred_batch_sizes) <= whole


async def _warm_up(
    worker: Worker, batches: Sequence[Sequence[RequestRecord]]
) -> list[tuple[Sequence[RequestRecord], Executed]]:
    done: list[tuple[Sequence[RequestRecord], Executed]] = []
    await worker.prepare()
    for records in batches:
        try:
            executed = await worker.execute(records)
        except InstanceDied:
            raise instance_died_error(worker.spec.name) from None
        if executed.failures:
            raise executed.failures[0].error
        done.append((records, executed))
    return done
