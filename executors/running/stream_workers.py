"""Workers for streaming instances, whose requests may have several responses.

An instance that frees its batch gets the next one. The freed batch continues as a task until its requests have ended.
`executors.running.streamed_batch` tracks the responses, `executors.settling.response_writer` writes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from charonia import failpoints
from charonia.backend import (
    InstanceDied,
    InstanceSpec,
    ModelRequest,
    ModelResponse,
    ResponseStream,
    SelfCheckingInstance,
    StreamingInstance,
)
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, InternalError, as_error, error_of_model
from charonia.tasks import ends_caller
from charonia.wire import RequestRecord
from executors.backends.given_objects import code_of_models
from executors.batches.assembly import are_many_strings, request_inputs
from executors.batches.batch_results import OTHER, Death, Executed
from executors.batches.execution import Planned, model_request
from executors.batches.sequence_batch import BatchSteps

from .streamed_batch import FlowControl, Outgoing, StreamedBatch, StreamRun
from .submitted_batch import SubmittedBatch, instance_died_error, take_all
from .workers import Pool, Worker, close_instance_of, replacement_delay_s, self_checking

_log = logging.getLogger(__name__)

_BUSY_GRACE_S = 5.0
"""Extra time for an instance that has not freed its batch: a backend with processes ends a silent one itself first."""
_DEAD_GRACE_S = 5.0
"""Time for the calls of a dead instance to end by themselves. Those that do not are cancelled."""
_LONG_LIFE_NS = 60 * 10**9
"""An instance that dies later than this while it runs nothing is made again without back-off."""


class StreamWorker(Worker):
    """Runs the batches of one `StreamingInstance`, each in a task."""

    def __init__(
        self,
        pool: Pool,
        spec: InstanceSpec,
        instance: StreamingInstance,
        passive: bool,
        queue: asyncio.Queue[SubmittedBatch | None],
    ) -> None:
        super().__init__(pool, spec, passive)
        self._queue = queue
        self._instance: StreamingInstance | None = instance
        self._flow = FlowControl()
        self._task: asyncio.Task[None] | None = None
        self._open: dict[asyncio.Task[None], SubmittedBatch] = {}
        self._dead = asyncio.Event()
        self._shared_death = False
        self._calls: set[asyncio.Task[None]] = set()
        """The calls of the instance that have not ended."""
        self._made_ns = monotonic_ns()
        """When the instance was made (monotonic)."""
        self._idle_deaths = 0
        """How many instances in a row died soon, and of no request."""

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work(), name=f"instance {self.spec.name}")

    def submit(self, batch: SubmittedBatch) -> None:
        self._queue.put_nowait(batch)

    async def execute(self, records: Sequence[RequestRecord]) -> Executed:
        """Run a warm-up batch; its responses are discarded."""
        collector = _Collector(len(records))
        streamed = StreamedBatch(self._warm_up(records), [1] * len(records), (), FlowControl(), collector)
        streamed.begin()
        await self._run(streamed)
        return streamed.part(collector.finals)

    async def close(self) -> None:
        self._closing.set()
        if self._task is not None:
            self._queue.put_nowait(None)
            await self._task
        await self._unload()
        if self._open:
            await asyncio.wait(self._open)

    async def ended(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task})

    async def leave(self) -> None:
        if self._open:  # others wait for their responses
            await asyncio.wait(self._open)
        self._closing.set()
        await self._unload()

    def take_queued(self) -> list[SubmittedBatch]:
        return take_all(self._queue)

    def cancel(self, batch: SubmittedBatch, ids: frozenset[bytes]) -> None:
        """Notify the model that these requests are no longer wanted, if it runs this batch."""
        if batch.stream is not None and batch in self._open.values():
            batch.stream.cancel(ids, self._instance)

    def ask_to_end(self, batch: SubmittedBatch, ids: frozenset[bytes]) -> None:
        """Notify the model that these requests are cancelled, if it runs this batch."""
        if batch.stream is not None and batch in self._open.values():
            batch.stream.ask_to_end(ids, self._instance)

    def allow(self, batch: SubmittedBatch, request_id: bytes, count: int) -> None:
        """Let a request send its responses below index `count`, if this instance runs its batch."""
        if batch.stream is not None and batch in self._open.values():
            batch.stream.allow(request_id, count)

    @property
    def idle_self_check(self) -> SelfCheckingInstance | None:
        """The instance's health check, unless it is starting a batch. Freed batches do not count."""
        beginning = any(batch.stream is None or not batch.stream.freed.is_set() for batch in self._open.values())
        return None if beginning else self_checking(self._instance)

    def found_dead(self, instance: object) -> bool:
        if instance is not self._instance or self._task is None or self._dead.is_set():
            return False
        _log.error("instance %s was found dead by its health check", self.spec.name)
        if not self._open:
            soon = monotonic_ns() - self._made_ns < _LONG_LIFE_NS
            self._idle_deaths = self._idle_deaths + 1 if soon else 0
        self._note_death(shared=False)
        return True

    def _note_death(self, *, shared: bool) -> None:
        """The instance is dead, as its health check or the first of its batches says; `shared`: with others."""
        if self._dead.is_set():
            return
        # before the batches hear of it: all that run share this death
        running = sum(not batch.stream.all_ended for batch in self._open.values() if batch.stream)
        self._shared_death = shared or running > 1
        self._dead.set()
        if self._calls:
            asyncio.get_running_loop().call_later(_DEAD_GRACE_S, self._end_calls, self._instance)

    def _end_calls(self, instance: object) -> None:
        """Cancel the calls of a dead instance that have not ended: it is replaced when its batches have."""
        if instance is self._instance and self._dead.is_set():
            for call in self._calls:
                call.cancel()

    async def _create(self) -> None:
        created = await self._pool.create(self.spec)
        assert isinstance(created, StreamingInstance)
        self._instance = created
        self._made_ns = monotonic_ns()

    async def _unload(self) -> None:
        instance, self._instance = self._instance, None
        if instance is not None:
            await close_instance_of(instance, self.spec.name)

    # -- taking batches ------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            batch = await self._next()
            if batch is None and not self._dead.is_set():
                return
            if batch is not None:
                await self._begin(batch)
            if batch is not None and not self._dead.is_set():
                self._pool.freed(batch)
            if self._dead.is_set():
                while self._open:
                    await asyncio.wait(self._open)
                self._dead.clear()
                await self._replace(replacement_delay_s(self._idle_deaths))

    async def _next(self) -> SubmittedBatch | None:
        """Wait for the next batch; None at the end, and when the instance died while waiting."""
        taking = asyncio.ensure_future(self._queue.get())
        dying = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({taking, dying}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            dying.cancel()
        if not taking.done():
            taking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            batch = await taking
            if batch is None and self._dead.is_set():
                self._queue.put_nowait(None)  # the caller handles the death first, and takes the end next time
            return batch
        return None

    async def _begin(self, batch: SubmittedBatch) -> None:
        """Start a batch, and wait until the instance is free or has died."""
        execution = self._pool.execution_of(batch, self.generation)  # such a pool takes no waves
        assert batch.responses is not None
        assert batch.header is not None
        streamed = StreamedBatch(execution, batch.header.attempts, batch.unwanted, self._flow, batch.responses.writer)
        batch.stream = streamed
        if batch.progress:
            streamed.resume(batch.progress)
        for request_id, count in batch.allowed.items():
            streamed.allow(request_id, count)
        streamed.ask_to_end(batch.cancelled, None)
        batch.responses.writer.open(streamed, batch, batch.responses.settle)
        batch.planned = execution.planned
        task = asyncio.get_running_loop().create_task(
            self._run_to_end(batch, streamed), name=f"batch on {self.spec.name}"
        )
        self._open[task] = batch
        task.add_done_callback(self._open.pop)
        freed = asyncio.ensure_future(streamed.freed.wait())
        try:
            await asyncio.wait({task, freed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            freed.cancel()

    # -- running batches -----------------------------------------------------------------------------------------------

    async def _run_to_end(self, batch: SubmittedBatch, streamed: StreamedBatch) -> None:
        """Run a batch until all its responses are in the log, or its instance's death is reported."""
        assert batch.responses is not None
        writer = batch.responses.writer
        death: InstanceDied | None = None
        try:
            streamed.begin()
            failpoints.hit("executor.executing")
            if self._dead.is_set():  # it came in the moment in which the instance was found dead
                raise InstanceDied(instance_died_error(self.spec.name).message, blameless=True)
            await self._run(streamed)
        except InstanceDied as ended:
            death = ended
        except Exception as error:  # our fault, not the model's: the callers still get an answer
            _log.exception("instance %s could not execute a batch", self.spec.name)
            streamed.fail_open(as_error(error))
        if death is None:
            self._idle_deaths = 0
        elif not self._dead.is_set():
            self._note_death(shared=death.shared)
            _log.error("instance %s died: %s %s", self.spec.name, death, death.stderr)
        streamed.set_freed()
        await writer.written(streamed)
        writer.close(streamed)
        if death is None or streamed.all_ended:
            self._pool.finish_stream(batch)
            return
        blameless = death.blameless or self._closing.is_set()
        executed = Executed([b""] * len(batch.records))
        executed.death = Death(self.spec.name, str(death), death.stderr, blameless, self._shared_death)
        self._pool.finish(batch, executed)

    async def _run(self, streamed: StreamedBatch) -> None:
        """Call the instance and wait until all requests have ended. Raises `InstanceDied`."""
        runs = list(streamed.batch.runs())
        calls: list[asyncio.Task[None]] = []
        over = asyncio.ensure_future(streamed.over.wait())
        try:
            for number, planned in enumerate(runs):
                run = streamed.run_of(planned)
                call = asyncio.get_running_loop().create_task(self._call(streamed, run, planned))
                calls.append(call)
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
                freed = asyncio.ensure_future(run.freed.wait())
                try:
                    await self._until(streamed, run, {call, freed})
                finally:
                    freed.cancel()
                if call.done():
                    _check(call)
                if number == len(runs) - 1:
                    streamed.set_freed()
            await self._settle_calls(streamed, calls, over)
        finally:
            over.cancel()
            for call in calls:
                call.cancel()

    async def _settle_calls(
        self, streamed: StreamedBatch, calls: list[asyncio.Task[None]], over: asyncio.Future[Any]
    ) -> None:
        """Wait for the calls until all requests have ended. A call that ends early fails the requests it left open."""
        while not streamed.all_ended:
            going = {call for call in calls if not call.done()}
            if not going:
                break
            await self._until(streamed, None, {*going, over})
            for call in calls:
                if call.done():
                    _check(call)

    async def _until(self, streamed: StreamedBatch, run: StreamRun | None, waited: set[asyncio.Future[Any]]) -> None:
        """Wait for the first of these. Fails the batch when the instance sends nothing for longer than its limit."""
        ceiling_s = self._pool.ceiling_s
        while True:
            wait_s = None
            if ceiling_s > 0:
                most_s = ceiling_s + (_BUSY_GRACE_S if run is not None else 0.0)
                wait_s = max(0.01, most_s - (monotonic_ns() - streamed.last_response_ns) / 1e9)
            done, _ = await asyncio.wait(waited, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if self._flow.full or streamed.blocked:
                streamed.last_response_ns = monotonic_ns()  # the reader of its responses is slow, not the model
            elif (monotonic_ns() - streamed.last_response_ns) / 1e9 >= most_s:
                name = streamed.batch.interface.name
                text = f"model '{name}' sent no response for {ceiling_s:g} s (charonia.max_execution_s)"
                streamed.notify_cancelled(self._instance)
                streamed.fail_open(InternalError(text))
                return

    async def _call(self, streamed: StreamedBatch, run: StreamRun, planned: list[Planned]) -> None:
        """Call the instance once. Raises `InstanceDied`; every other error is answered to the callers."""
        interface, records = streamed.batch.interface, streamed.batch.records
        requests: list[ModelRequest] = []
        sent: list[int] = []
        for index, plan in planned:
            if not streamed.is_open(index):
                continue
            record = records[index]
            try:
                if self._pool.planner.strings.taken and are_many_strings((record,)):
                    inputs = await asyncio.to_thread(request_inputs, interface, plan, record)
                else:
                    inputs = request_inputs(interface, plan, record)
            except CharoniaError as error:
                streamed.fail_open(error, (index,), reason=OTHER)
                continue
            sent.append(index)
            request = model_request(record, plan, inputs)
            request.progress = streamed.accepted(index)
            requests.append(request)
        if not sent:
            return
        instance = self._instance
        run.begin(sent, requests, instance)
        if instance is None:
            raise InstanceDied(instance_died_error(self.spec.name).message, blameless=True)
        failure: CharoniaError
        streamed.begun(instance)
        try:
            steps = streamed.batch.steps
            if steps is None:
                await instance.execute_stream(requests, run)
            else:
                for index, request in zip(sent, requests, strict=True):
                    steps.prepare(index, request)
                await execute_steps(instance, steps, sent, requests, run)
            if not any(map(streamed.is_open, sent)):
                return
            failure = InternalError(f"model '{interface.name}' ended without a final response")
        except InstanceDied:
            raise
        except BaseException as error:
            if ends_caller(error):
                raise
            if not isinstance(error, CharoniaError):
                _log.exception("model %r failed to execute a batch", interface.name)
            failure = error_of_model(error)
        streamed.fail_open(failure, sent)


def _check(call: asyncio.Task[None]) -> None:
    """Raise what an ended call raised; one that was cancelled was of a dead instance."""
    if call.cancelled():
        raise InstanceDied("it is dead, and a call of it did not end")
    call.result()


class _Collector:
    """Keeps the final responses of a warm-up batch."""

    def __init__(self, count: int) -> None:
        self.finals: dict[int, bytes] = {}
        self._count = count

    def put(self, outgoing: Outgoing) -> None:
        outgoing.batch.flow.written(outgoing.record)
        if outgoing.final:
            self.finals[outgoing.index] = outgoing.record

    def freed(self, streamed: StreamedBatch) -> None:
        """Do nothing: no batch waits for the slot of a warm-up."""


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

    async def execute() -> None:
        with code_of_models():  # an exit would end the event loop, as this is a task of its own
            await instance.execute_stream(requests, discarded)

    call = asyncio.ensure_future(execute())
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
