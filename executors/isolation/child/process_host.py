"""The process of an isolated model: loads one model, makes its instances, and ends with its executor.

Commands come over one socket of frames; with each instance its own socket and shared memory come over another.
`batch_server` and `request_server` run instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from charonia.backend import (
    BatchInstance,
    InstanceSpec,
    MeasuredModel,
    Model,
    ModelSource,
    RequestInstance,
    SelfCheckingInstance,
    StreamingInstance,
    TextModel,
)
from charonia.errors import CharoniaError, InternalError
from charonia.exchange.exchanging_instance import ExchangingInstance, with_wanted_memory
from executors.backends.given_objects import checked_instance, checked_signature, code_of_models, loaded_model
from executors.backends.python.protocol.frames import Frame, Kind
from executors.backends.python.protocol.shared_slots import ModelSlots
from executors.backends.python.protocol.startup_arguments import TRACEBACK_SIGNAL, StartupArguments
from executors.backends.registry import BackendRegistry, prefers_gpu
from executors.backends.submissions import parts_of
from executors.host.parent_death import die_with
from executors.isolation.forms import Made, memory_content, signature_content, source_of, spec_of

from .batch_server import BatchServer
from .link import Link
from .remote_calls import Answers, RemoteCalls
from .request_server import RequestServer


def run(words: Sequence[str], descriptor: int) -> None:
    """Serve until the executor ends this process."""
    arguments = StartupArguments.of(list(words))
    die_with(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        # the executor decides when its models end
        signal.signal(number, lambda _number, _frame: None)
    faulthandler.enable()
    faulthandler.register(TRACEBACK_SIGNAL)
    sys.dont_write_bytecode = True
    if arguments.board >= 0:
        from executors.backends.python.api.metrics import write_to

        write_to(arguments.board)
    for one in (arguments.descriptor, descriptor):
        os.set_inheritable(one, False)
    asyncio.run(_serve(arguments, socket.socket(fileno=descriptor)))
    # without joins: threads of the library may wait for ever
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _serve(arguments: StartupArguments, passing: socket.socket) -> None:
    host = ProcessHost(passing)
    await host.link.connect(socket.socket(fileno=arguments.descriptor))
    host.link.send(Kind.READY, 0, [os.getpid(), True])
    await host.closed.wait()


class ProcessHost:
    """The model of this process and its instances."""

    def __init__(self, passing: socket.socket) -> None:
        self.closed = asyncio.Event()
        self.link = Link(self._received, lambda: os._exit(1))
        self._passing = passing
        self._backend: Any = None
        self._word = ""
        """The backend's name in the configuration."""
        self._model: Model | None = None
        self._is_parallel = True
        self._one = asyncio.Lock()
        self._checked: dict[int, SelfCheckingInstance] = {}
        """By number: the instances over arrays that can be asked for their health."""
        self._depths: dict[int, _Deep] = {}
        """By number: the instances over arrays that run several batches, until all their sockets are there."""
        self._servers: WeakValueDictionary[int, BatchServer] = WeakValueDictionary()
        """By number: what runs batches of instances over arrays, while its socket is open."""
        self._answers = Answers()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    def _received(self, frame: Frame) -> None:
        if frame.kind in (Kind.ANSWER, Kind.LAST_ANSWER):
            self._answers.received(frame)
            return
        if frame.kind is Kind.CANCEL:
            server = self._servers.get(frame.content())
            if server is not None:
                server.cancel(frame.call)
            return
        # descriptors come in the order of the frames they belong to
        passed = _descriptors(self._passing) if frame.kind is Kind.CREATE else []
        task = asyncio.get_running_loop().create_task(self._answer(frame, passed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, frame: Frame, passed: Sequence[int]) -> None:
        try:
            with code_of_models():
                result = await self._result_of(frame, passed)
            self.link.send(Kind.DONE, frame.call, result)
        except Exception as error:
            known = error if isinstance(error, CharoniaError) else InternalError(f"{type(error).__name__}: {error}")
            self.link.send(Kind.FAILED, frame.call, [int(known.code), known.message])
        if frame.kind is Kind.FINALIZE:
            self.link.close()
            self.closed.set()

    async def _result_of(self, frame: Frame, passed: Sequence[int]) -> Any:
        content = frame.content()
        if frame.kind is Kind.LOAD:
            return await self._load(source_of(content))
        if frame.kind is Kind.FINALIZE:
            return await self._close()
        if frame.kind is Kind.HEALTH:
            return await self._checked[content].check_health()
        assert self._model is not None
        if frame.kind is Kind.MEMORY:
            return await asyncio.to_thread(_memory_of, self._model)
        if frame.kind is Kind.PREFERS_GPU:
            return await asyncio.to_thread(prefers_gpu, self._backend)
        if frame.kind is Kind.TEXT_ASSETS:
            return await self._model.text_assets() if isinstance(self._model, TextModel) else b""
        if frame.kind is Kind.AUTO_COMPLETE:
            return signature_content(checked_signature(await self._model.signature(), self._word))
        return (await self._create(self._model, content, passed)).content()

    async def _load(self, source: ModelSource) -> None:
        self._backend = backend = BackendRegistry().of(source)
        if hasattr(backend, "open"):
            await backend.open(dict(source.backend_config))
        self._is_parallel = getattr(backend, "parallel_loading", True)
        self._word = source.config.backend
        self._model = await loaded_model(backend, source)

    async def _close(self) -> None:
        for one in (self._model, self._backend):
            if one is not None and hasattr(one, "close"):
                await one.close()

    async def _create(self, model: Model, content: Any, passed: Sequence[int]) -> Made:
        connection = socket.socket(fileno=passed[0])
        try:
            slots = ModelSlots(passed[1]) if len(passed) > 1 else None
            if "beside" in content:
                return await self._beside(content["beside"], connection, slots)
            calls = RemoteCalls(self.link, self._answers)
            spec = spec_of(content, calls)
            async with contextlib.nullcontext() if self._is_parallel else self._one:
                made = checked_instance(await model.create_instance(spec), self._word)
                instance: object = await with_wanted_memory(model, made, spec)
        except BaseException:
            connection.close()
            raise
        finally:
            for descriptor in passed[1:]:
                os.close(descriptor)
        if isinstance(instance, BatchInstance):
            part, *others = parts_of(instance)
            pins = False
            if slots is not None and isinstance(instance, ExchangingInstance) and instance.pins:
                slots.pin, pins = instance.pin, True
            server = BatchServer(instance, part, connection, slots, spec)
            await server.start()
            checks = isinstance(instance, SelfCheckingInstance) and instance.checks_health
            number = next(self._numbers)
            self._servers[number] = server
            if others:
                self._depths[number] = _Deep(instance, others, spec)
            if isinstance(instance, SelfCheckingInstance) and checks:
                self._checked[number] = instance
            stateless = bool(getattr(instance, "stateless", False))
            return Made(
                *(True, False, False, number, stateless),
                rows_fail_alone=bool(getattr(instance, "rows_fail_alone", False)),
                batch_sizes=tuple(getattr(instance, "batch_sizes", ())),
                depth=1 + len(others),
                checks_health=checks,
                pins=pins,
            )
        assert isinstance(instance, RequestInstance | StreamingInstance)
        requests = RequestServer(instance, spec.source.name, slots, self._answers)
        await requests.start(connection)
        calls.link = requests.link
        return Made(
            batch=False,
            requests=isinstance(instance, RequestInstance),
            stream=isinstance(instance, StreamingInstance),
            checks_health=isinstance(instance, SelfCheckingInstance) and instance.checks_health,
            answers_later=bool(getattr(instance, "answers_later", False)),
            reports_responses=bool(getattr(instance, "reports_responses", True)),
        )

    async def _beside(self, number: int, connection: socket.socket, slots: ModelSlots | None) -> Made:
        """Another socket of an instance that runs several batches at once."""
        deep = self._depths[number]
        part = deep.parts.pop()
        if not deep.parts:
            del self._depths[number]
        server = BatchServer(deep.instance, part, connection, slots, deep.spec)
        await server.start()
        number = next(self._numbers)
        self._servers[number] = server
        return Made(True, False, False, number)


@dataclass(slots=True)
class _Deep:
    """An instance, and what runs batches of it for which no socket has come yet."""

    instance: BatchInstance
    parts: list[BatchInstance]
    spec: InstanceSpec


def _memory_of(model: Model) -> Any:
    return memory_content(model.memory()) if isinstance(model, MeasuredModel) else []


def _descriptors(passing: socket.socket) -> list[int]:
    _, found, _, _ = socket.recv_fds(passing, 16, 4)
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    return found
