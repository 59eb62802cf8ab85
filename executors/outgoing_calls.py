"""Lets the models of this executor call, load and unload models (P13, P14). Implements `charonia.backend.ModelCalls`.

This module decides what a call inherits from its batch; `charonia.calls.caller` sends it. A control plane is started
only at the first call, so an executor whose models call nothing watches no other process, unless a batcher in this
process has one anyhow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from charonia.backend import ModelCalls, ModelResponse, OpenCall
from charonia.calls.cache.cache_keys import is_cachable
from charonia.calls.cache.cached_calls import CachedCalls
from charonia.calls.caller import Caller, Origin
from charonia.calls.model_control import ModelControl
from charonia.calls.waiters import StreamWaiter
from charonia.catalog.catalog import Catalog
from charonia.errors import SERVER_EXITING, CharoniaError, Unavailable
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import EventLog
from charonia.inference import LATEST_VERSION, InferenceRequest
from charonia.models.interface import ModelInterface
from charonia.traces.contexts import Traced
from charonia.wire import Lineage, RequestRecord, ResponseRecord


class ExecutorCalls:
    """The calls of one executor. `executor` is its id; `shared` is a control plane that is followed already."""

    def __init__(
        self,
        log: EventLog,
        executor: str,
        directory: PayloadDirectory,
        check_interval_ms: int,
        shared: ControlPlane | None = None,
        make_cache: Callable[[Catalog], CachedCalls] | None = None,
    ) -> None:
        """`make_cache` makes the response cache for calls, if there is one (K4)."""
        self._log = log
        self._executor = executor
        self._directory = directory
        self._interval_ms = check_interval_ms
        self._shared = shared
        self._control: ControlPlane | None = None
        self._caller: Caller | None = None
        self._make_cache = make_cache
        self.cache: CachedCalls | None = None
        """Set at the first call."""
        self._starting = asyncio.Lock()
        self.leased: Callable[[], bool] = lambda: True
        """Returns whether this executor's heartbeat lease is certainly valid."""
        self._closed = False

    def count_open(self) -> int:
        """The number of open calls."""
        return self._caller.open_calls if self._caller is not None else 0

    async def find(self, model: str, version: int) -> ModelInterface:
        return (await self._started()).find(model, version).interface

    async def open(
        self, request: InferenceRequest, model: str, origins: Sequence[object], *, blocks: bool = False
    ) -> OpenCall:
        records = [record for record in origins if isinstance(record, RequestRecord)]
        deadlines = [record.deadline_ns for record in records]
        inherited = replace(
            request,
            # the latest deadline: until then one of the requests may be answered in time
            deadline_ns=max(deadlines) if deadlines and all(deadlines) else 0,
            priority=records[0].level if records else 0,
        )
        caller, origin = await self._started(), _origin(model, records, blocks=blocks)
        if self.cache is not None:
            served = caller.find(request.model, request.version)
            rules = self.cache.rules(served)
            if rules is not None and is_cachable(request):
                caller.check(inherited, served)

                async def run() -> ResponseRecord:
                    answer = await caller.infer(inherited, origin)
                    if request.trace is not None:
                        request.trace.took(answer.report)
                    return answer

                tenant, alone = origin.lineage.tenant, served.model in callers(model, records)
                return _Cached(self.cache.answer(inherited, served, rules, tenant, run, alone=alone))
        return _Opened(caller, caller.open(inherited, origin), request.trace)

    async def resolve(self, model: str, near: str) -> str:
        """Return the key of the model with this name, in the namespace `near` first. Raises R2's error."""
        await self._started()
        assert self._control is not None
        return self._control.catalog.resolve(model, near)

    async def catalog(self) -> Catalog:
        """Return the catalog, which is followed from the first call on."""
        await self._started()
        assert self._control is not None
        return self._control.catalog

    async def load(self, model: str, config_json: str, files: dict[str, bytes]) -> None:
        await (await self._model_control()).load(model, config_json or None, files)

    async def unload(self, model: str, *, unload_dependents: bool) -> None:
        await (await self._model_control()).unload(model, unload_dependents=unload_dependents)

    async def is_ready(self, model: str, version: str) -> bool:
        await self._started()
        assert self._control is not None
        return self._control.catalog.is_ready(model, int(version) if version else LATEST_VERSION)

    async def _model_control(self) -> ModelControl:
        await self._started()
        assert self._control is not None
        return ModelControl(self._control, self._log)

    async def _started(self) -> Caller:
        if self._caller is None:
            async with self._starting:
                if self._closed:
                    raise Unavailable(SERVER_EXITING)
                if self._caller is None:
                    await self._start()
        assert self._caller is not None
        return self._caller

    async def _start(self) -> None:
        control = self._shared
        if control is None:
            control = ControlPlane(self._log, check_interval_ms=self._interval_ms, incarnation=self._executor)
            await control.start()
        self._control = control
        caller = Caller(self._log, control.catalog, self._executor, directory=self._directory)
        if caller.payloads is not None:
            caller.payloads.leased = self.leased
        await caller.start()
        if self._make_cache is not None:
            self.cache = self._make_cache(control.catalog)
        self._caller = caller

    def begin_anew(self) -> None:
        """Called when the log is a new one, which knows none of the calls."""
        if self._control is not None and self._control is not self._shared:
            self._control.begin_anew()
        if self._caller is not None:
            self._caller.requester.begin_anew()
        if self.cache is not None:
            self.cache.begin_anew()

    async def renew(self) -> None:
        """Called when this executor was presumed dead."""
        if self._caller is not None and self._caller.payloads is not None:
            await self._caller.payloads.renew()

    async def close(self) -> None:
        """Abandon the open calls. Further calls fail."""
        async with self._starting:
            self._closed = True
        if self.cache is not None:
            with contextlib.suppress(CharoniaError):
                await self.cache.close()
        if self._caller is not None:
            await self._caller.close()
        if self._control is not None and self._control is not self._shared:
            await self._control.close()


class _Cached:
    """An `OpenCall` with one answer, which may come from the cache or be shared with another call."""

    def __init__(self, coming: Coroutine[Any, Any, ResponseRecord]) -> None:
        self._coming: asyncio.Task[ResponseRecord] | None = asyncio.get_running_loop().create_task(coming)

    async def next(self) -> ModelResponse | None:
        coming, self._coming = self._coming, None
        if coming is None:
            return None
        try:
            answer = await coming
        finally:
            coming.cancel()
        return ModelResponse(answer.outputs, answer.parameters, answer.error)

    def cancel(self) -> None:
        if self._coming is not None:
            self._coming.cancel()

    def ask_to_end(self) -> None:
        """Do nothing: the answer may be wanted by other calls, too."""


class _Opened:
    """An `OpenCall` over a call of this process."""

    def __init__(self, caller: Caller, call: StreamWaiter, trace: Traced | None) -> None:
        self._caller = caller
        self._call = call
        self._trace = trace

    async def next(self) -> ModelResponse | None:
        answer = await self._call.next()
        if answer is not None and self._trace is not None:
            self._trace.took(answer.report)
        return None if answer is None else ModelResponse(answer.outputs, answer.parameters, answer.error)

    def cancel(self) -> None:
        self._call.cancel()

    def ask_to_end(self) -> None:
        self._caller.requester.ask_to_end(self._call)


def callers(model: str, records: Sequence[RequestRecord]) -> set[str]:
    """The models whose executions may wait for a call that `model` makes for a batch: all its requests wait for it."""
    return {model, *(name for one in records if one.lineage is not None for name, _ in one.lineage.ancestors)}


def _origin(model: str, records: Sequence[RequestRecord], *, blocks: bool) -> Origin:
    """The origin of a batch's calls. Its first request stands for all, because the batch holds the instance."""
    if not records:
        return Origin()
    first = records[0]
    lineage = (first.lineage or Lineage()).with_child(model, first.id, blocks=blocks)
    return Origin(lineage, journalled=any(record.journalled for record in records))


class ResolvingCalls(ModelCalls, Protocol):
    """`ModelCalls` that can resolve names. Implemented by `ExecutorCalls`."""

    async def resolve(self, model: str, near: str) -> str:
        """`charonia.catalog.catalog.Catalog.resolve`."""


class NearCalls:
    """A `ModelCalls` for the model `key` in `namespace`. All calls go through `calls`."""

    def __init__(self, calls: ResolvingCalls, namespace: str, key: str) -> None:
        self._calls = calls
        self._namespace = namespace
        self._key = key

    async def find(self, model: str, version: int) -> ModelInterface:
        return await self._calls.find(await self._calls.resolve(model, self._namespace), version)

    async def open(
        self, request: InferenceRequest, model: str, origins: Sequence[object], *, blocks: bool = False
    ) -> OpenCall:
        """Open a call. `model` is a name; the log uses its key."""
        called = await self._calls.resolve(request.model, self._namespace)
        return await self._calls.open(replace(request, model=called), self._key, origins, blocks=blocks)

    async def load(self, model: str, config_json: str, files: dict[str, bytes]) -> None:
        await self._calls.load(model, config_json, files)

    async def unload(self, model: str, *, unload_dependents: bool) -> None:
        await self._calls.unload(model, unload_dependents=unload_dependents)

    async def is_ready(self, model: str, version: str) -> bool:
        return await self._calls.is_ready(await self._calls.resolve(model, self._namespace), version)
