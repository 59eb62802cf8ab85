"""A `Model` whose file is opened in a process of its own, one for each device; its instances are threads there.

To the executor it is a `Model` like any other. A process that ended is started again by the next instance to be made.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace
from typing import Any

from charonia.backend import (
    API,
    Backend,
    BatchInstance,
    GraphSignature,
    InstanceSpec,
    Isolation,
    MemoryUse,
    ModelSource,
    RequestInstance,
    StreamingInstance,
)
from charonia.errors import InternalError
from executors.backends.python.custom_metrics import CustomMetrics
from executors.backends.python.frame_content import failure_of
from executors.backends.python.model_calls import PendingModelCalls
from executors.backends.python.process_settings import Limits
from executors.backends.python.protocol.frames import UNREADABLE, Kind
from executors.backends.python.protocol.shared_slots import ExecutorSlots
from executors.backends.python.python_instance import PythonInstance
from executors.configuration.time_parameters import max_execution_s
from protos.model_config_pb2 import ModelConfig

from .forms import Made, memory_of, signature_of, spec_content
from .isolated_batch import IsolatedBatches
from .isolated_requests import InstanceLink, IsolatedEither, IsolatedRequests, IsolatedStreams
from .isolation_choice import SANDBOX
from .process_handle import ModelProcess

_log = logging.getLogger(__name__)

_CLOSE_S = 10.0
_MEMORY_S = 10.0


class IsolatingBackend(Backend):
    """Stands for a backend in the executor: its models are isolated, and the backend is opened in their processes."""

    api = API

    def __init__(self, name: str, isolation: Isolation, metrics: CustomMetrics | None = None) -> None:
        """`metrics` has the boards of its models' processes, for a backend whose models write such."""
        self.name = name
        self.wanted = isolation
        self._metrics = metrics

    async def load(self, source: ModelSource) -> IsolatedModel:
        """Return the model; its process is started when something asks for it."""
        isolated = replace(source, isolation=self.wanted)
        return IsolatedModel(isolated, ceiling_s=max_execution_s(source), metrics=self._metrics)


class IsolatedModel:
    """One load of a model, isolated as its source says. An execution longer than `ceiling_s` seconds (0: no limit)
    ends its process.
    """

    def __init__(
        self, source: ModelSource, *, ceiling_s: float, metrics: CustomMetrics | None = None, in_bulk: bool = False
    ) -> None:
        """`in_bulk`: what runs in its processes leaves the processors to others, as workers of gateways do."""
        self._source = source
        self._in_bulk = in_bulk
        self._ceiling_s = ceiling_s
        self._metrics = metrics
        self._processes: dict[int, ModelProcess] = {}
        """By device, -1 for none."""
        self._spare: ModelProcess | None = None
        """The one that was asked for the signature: that of the first device that has an instance."""
        self._starting = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    async def signature(self) -> GraphSignature | ModelConfig | None:
        """What the model says of itself. Raises its errors, and `InternalError` when its process ends."""
        try:
            return signature_of(await (await self._any()).load_call(self._source, Kind.AUTO_COMPLETE, None))
        except UNREADABLE as error:
            raise InternalError(f"the signature of model '{self._source.name}' cannot be read: {error}") from None

    async def prefers_gpu(self) -> bool:
        """What its backend says. Raises as `signature` does."""
        return bool(await (await self._any()).load_call(self._source, Kind.PREFERS_GPU, None))

    async def create_instance(self, spec: InstanceSpec) -> BatchInstance | RequestInstance | StreamingInstance:
        """Make an instance in the process of its device. Raises a `CharoniaError` with the reason."""
        spec = replace(spec, source=replace(spec.source, isolation=self._source.isolation))
        process = await self._process_of(spec.device_id)
        if spec.calls is not None and not process.may_call:
            process.may_call = True
            # those of instances over arrays, and of a model that calls while it is made
            PendingModelCalls(process, self._source.name, spec.calls, {})
        ours, slots, made = await self._connected(process, spec, spec_content(spec))
        if not made.batch:
            try:
                return await self._over_requests(process, ours, slots, spec, made)
            except BaseException:
                ours.close()
                raise
        if slots is not None:
            # in bulk the memory is kept until the process ends: giving parts of it back keeps the interpreter's lock
            slots.keeps_pages = made.pins or self._in_bulk
        trusted = self._source.isolation != SANDBOX
        instance = IsolatedBatches(process, ours, slots, made, self._ceiling_s, trusted=trusted)
        try:
            for _ in range(1, made.depth):
                beside = await self._connected(process, spec, {"beside": made.number})
                instance.add_part(IsolatedBatches(process, *beside, self._ceiling_s, trusted=trusted))
        except BaseException:
            await asyncio.to_thread(instance.close)
            raise
        return instance

    async def _connected(
        self, process: ModelProcess, spec: InstanceSpec, content: Any
    ) -> tuple[socket.socket, ExecutorSlots | None, Made]:
        """Have the process make what `content` describes, with a socket and shared memory. Raises a `CharoniaError`."""
        slots = _slots(spec)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                descriptors = [theirs.fileno(), *(() if slots is None else (slots.descriptor,))]
                try:
                    socket.send_fds(process.passing, [b"i"], descriptors)
                except OSError:
                    raise InternalError(f"the process of model '{self._source.name}' has ended") from None
                call = process.load_call(spec.source, Kind.CREATE, content)
            return ours, slots, Made(**await call)
        except BaseException as error:
            ours.close()
            if isinstance(error, UNREADABLE):
                raise InternalError(f"an instance of model '{self._source.name}' cannot be made: {error}") from None
            raise
        finally:
            if slots is not None:
                slots.close_descriptor()

    async def _over_requests(
        self, process: ModelProcess, ours: socket.socket, slots: ExecutorSlots | None, spec: InstanceSpec, made: Made
    ) -> RequestInstance | StreamingInstance:
        link = InstanceLink(process, spec.name, slots)
        await link.connect(ours)
        limits = Limits(max_execution_s=self._ceiling_s, finalize_s=_CLOSE_S)
        instance = PythonInstance(link, limits, self._source.name, spec.calls)
        instance.checks_health = made.checks_health
        if not made.stream:
            return IsolatedRequests(link, instance, reports_responses=made.reports_responses)
        if not made.requests:
            return IsolatedStreams(link, instance, reports_responses=made.reports_responses)
        either = IsolatedEither(link, instance, reports_responses=made.reports_responses)
        either.answers_later = made.answers_later
        return either

    async def text_assets(self) -> bytes:
        """What its model says, see `TextModel`; empty for another one. Raises as `signature` does."""
        running = next((process for process in self._processes.values() if process.dead is None), None)
        process = running or await self._any()
        return bytes(await process.load_call(self._source, Kind.TEXT_ASSETS, None))

    def memory(self) -> list[MemoryUse]:
        """What the models of its processes say that they hold. Not called in the event loop.

        Raises what `MeasuredModel.memory` raises there, and `InternalError` when there is no answer in time.
        """
        return asyncio.run_coroutine_threadsafe(self._memory(), self._loop).result()

    async def _memory(self) -> list[MemoryUse]:
        found: list[MemoryUse] = []
        for process in list(self._processes.values()):
            try:
                # no time limit of the call: a model that answers batches is not ended because it cannot say this
                frame = await asyncio.wait_for(process.call(Kind.MEMORY, None), _MEMORY_S)
            except TimeoutError:
                name = self._source.name
                raise InternalError(f"model '{name}' did not say in {_MEMORY_S:g} s how much memory it holds") from None
            if frame.kind is Kind.FAILED:
                raise failure_of(frame)
            found += memory_of(frame.content())
        return found

    async def close(self) -> None:
        """End its processes. A second call does nothing."""
        async with self._starting:
            found = [*self._processes.values(), *(() if self._spare is None else (self._spare,))]
            self._processes.clear()
            self._spare = None
        await asyncio.gather(*(process.close(_CLOSE_S) for process in found))

    async def _any(self) -> ModelProcess:
        """A process that belongs to no device yet."""
        async with self._starting:
            if self._spare is None or self._spare.dead is not None:
                self._spare = await self._started()
            return self._spare

    async def _process_of(self, device: int) -> ModelProcess:
        async with self._starting:
            process = self._processes.get(device)
            if process is None or process.dead is not None:
                spare, self._spare = self._spare, None
                process = spare if spare is not None and spare.dead is None else await self._started()
                self._processes[device] = process
            return process

    async def _started(self) -> ModelProcess:
        board = None if self._metrics is None else self._metrics.open(self._source)
        return await ModelProcess.start(
            self._source, sandboxed=self._source.isolation == SANDBOX, board=board, in_bulk=self._in_bulk
        )


def _slots(spec: InstanceSpec) -> ExecutorSlots | None:
    """Memory to share with an instance; without it, tensors are sent in frames."""
    try:
        return ExecutorSlots()
    except OSError as error:
        _log.warning("tensors of %s travel in frames, there is no memory to share: %s", spec.name, error)
        return None
