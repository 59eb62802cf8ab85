"""The server behind the in-process API: supervisor, gateway and requests in one event loop, in a thread of its own.

The log, the executors and the models' instances are processes, as with `charonia serve`; only the gateway is here, and
listens nowhere. Threads of the program hand it work and wait for what comes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from charonia.composition.hosting import HostedRun, HostedStack, Joined
from charonia.composition.metrics_page import MetricsUnion
from charonia.composition.roles import Stop, start_gateway
from charonia.errors import CANCELLED, SERVER_EXITING, Cancelled, CharoniaError, InternalError, Unavailable, shed
from charonia.inference import InferenceRequest, InferenceResponse
from charonia.metrics.host_metrics import HostMetrics
from charonia.options.metrics_options import metrics_settings
from charonia.options.values import GATEWAY, Values, parse, render

from .kinds import triton_error

if TYPE_CHECKING:
    from gateway.app import GatewayApp
    from gateway.service import GatewayService

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_AHEAD = 64
"""Responses that wait for their reader; what comes after them waits in the gateway, within its bound."""


class GatewayStack(HostedStack):
    """The supervisor of a private log and executors whose gateway is in this process."""

    def __init__(self, values: Values, ready: Callable[[], None]) -> None:
        super().__init__(values, ready)
        self.gateway: GatewayApp | None = None
        self._end: Stop | None = None

    @property
    def failure(self) -> str:
        return self._reason or self._failed

    async def page(self) -> bytes:
        """The metrics of all parts; nothing where metrics are off."""
        return await self._metrics_union.render() if self._metrics_union is not None else b""

    def _add_gateways(self, values: Values) -> None:
        """None is a process."""

    async def _start_metrics(self) -> None:
        if self._values["allow_metrics"]:
            self._metrics_union = MetricsUnion(self._runtime_dir, HostMetrics(metrics_settings(self._values)))

    async def _start_here(self) -> None:
        socket = str(self._runtime_dir / "gateway.metrics") if self._values["allow_metrics"] else ""
        given = {**self._part_values(), "await_executors": 0, "metrics_socket": socket}
        values = parse(GATEWAY, render(GATEWAY, given), {}, {})
        joined = await Joined.open(values)
        try:
            self.gateway, stop = await start_gateway(joined.log, values, joined.keeper)
        except BaseException:
            await joined.close()
            raise

        async def end() -> bool:
            clean = await stop()
            await joined.close()
            return clean

        self._end = end

    async def _stop_here(self, roles: Sequence[str]) -> bool:
        return await self._end_here() if GATEWAY in roles else True

    async def _end_here(self) -> bool:
        end, self._end = self._end, None
        return True if end is None else await end()

    def _announce(self) -> None:
        self._write_endpoints()
        self._tasks.spawn(self._loaded(), "first loads")

    async def _loaded(self) -> None:
        """Executors have said that they are up; what they serve comes through the log."""
        assert self.gateway is not None
        await self.gateway.loaded(self._values["executors"])
        self._tell_ready()


class Host(HostedRun):
    """One run of a server. Its methods are for any thread but its own; they raise `TritonError`."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values
        self._stack: GatewayStack | None = None
        self._waiting: set[Future[Any]] = set()
        self._exchanges: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._process = os.getpid()

    @property
    def is_live(self) -> bool:
        return self._ready.is_set() and not self._is_over

    def ask(self, work: Callable[[GatewayService], _T]) -> _T:
        """What the gateway's service says to this, which does not wait."""
        return self._waited(lambda future: self._do(future, work))

    def wait_for(self, work: Callable[[GatewayService], Coroutine[Any, Any, _T]]) -> _T:
        """What comes of work that waits."""
        return self._waited(lambda future: self._begin_work(future, work(self._service)))

    def metrics_page(self) -> bytes:
        """The metrics of all parts."""

        async def page(_service: GatewayService) -> bytes:
            assert self._stack is not None
            return await self._stack.page()

        return self.wait_for(page)

    def send(self, request: InferenceRequest, exchange: Exchange[Any]) -> None:
        """Send a request. Raises what refuses it before it enters the log; all else comes through the exchange."""

        def begin(future: Future[None]) -> None:
            loop = asyncio.get_running_loop()
            task = loop.create_task(exchange.run(self._service, request, lambda: self._is_over), name="inference")
            exchange.task = task
            self._exchanges.add(task)
            task.add_done_callback(self._exchanges.discard)
            # the first step of the task admits the request, and it comes before this
            loop.call_soon(lambda: _settle(future, exchange.sent(), None))

        self._waited(begin)

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _service(self) -> GatewayService:
        assert self._stack is not None
        assert self._stack.gateway is not None
        return self._stack.gateway.service

    async def _main(self, directory: Path, wanted: asyncio.Event) -> bool:
        values = {**self._values, "state_dir": self._values["state_dir"] or str(directory / "state")}
        self._stack = GatewayStack(values, self._became_ready)
        try:
            return await self._supervise(self._stack, wanted)
        finally:
            self._is_over = True
            for task in self._exchanges:
                task.cancel()
            await asyncio.gather(*self._exchanges, return_exceptions=True)

    def _run(self) -> None:
        super()._run()
        self._is_over = True
        for future in list(self._waiting):
            _settle(future, self._ending(), None)

    def _ending(self) -> CharoniaError:
        return Unavailable(self.failure or SERVER_EXITING)

    def _waited(self, begin: Callable[[Future[_T]], None]) -> _T:
        """Call `begin` in the loop and wait for the future that it is given; the end of the loop settles that too."""
        future: Future[_T] = Future()
        self._waiting.add(future)
        try:
            if self._is_over or self._loop is None or os.getpid() != self._process:
                raise self._ending()
            with contextlib.suppress(RuntimeError):  # it has just ended, and settles the future
                self._loop.call_soon_threadsafe(begin, future)
            return future.result()
        except CharoniaError as error:
            raise triton_error(error) from None
        finally:
            self._waiting.discard(future)

    def _do(self, future: Future[_T], work: Callable[[GatewayService], _T]) -> None:
        try:
            result = work(self._service)
        except Exception as error:
            _settle(future, _known(error), None)
        else:
            _settle(future, None, result)

    def _begin_work(self, future: Future[_T], work: Coroutine[Any, Any, _T]) -> None:
        async def do() -> None:
            try:
                result = await work
            except asyncio.CancelledError:
                _settle(future, self._ending(), None)
                raise
            except Exception as error:
                _settle(future, _known(error), None)
            else:
                _settle(future, None, result)

        task = asyncio.get_running_loop().create_task(do())
        self._exchanges.add(task)
        task.add_done_callback(self._exchanges.discard)


def _settle(future: Future[Any], error: BaseException | None, result: Any) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _known(error: Exception) -> CharoniaError:
    if isinstance(error, CharoniaError):
        return error
    _log.error("a call of the in-process API failed", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")


class Exchange(Generic[_T]):
    """One request on its way: its responses, as `make` turns them into the API's, wait for their reader in any thread.

    `also` gets every response as it comes, whether or not it is read here.
    """

    def __init__(
        self, make: Callable[[InferenceResponse], _T], also: Callable[[_T], None] | None, failed: InferenceResponse
    ) -> None:
        """`failed` is what a response to it looks like that ends it."""
        self.task: asyncio.Task[None] | None = None
        self._refusal: CharoniaError | None = None
        self._is_sent = False
        self._make = make
        self._also = also
        self._failed = failed
        self._lock = threading.Lock()
        self._responses: deque[_T] = deque()
        self._readers: deque[Future[_T]] = deque()
        self._is_abandoned = False
        self._room: asyncio.Event | None = None

    async def run(self, service: GatewayService, request: InferenceRequest, is_over: Callable[[], bool]) -> None:
        """Send it and hand over its responses; the last is final, whatever happens."""
        responses = service.stream(request)
        try:
            async with contextlib.aclosing(responses):
                async for response in responses:
                    self._put(self._make(response))
                    if response.final:
                        return
                    await self._wait_for_room()
            error: CharoniaError = InternalError("the request ended without an answer")
        except CharoniaError as refusal:
            if not self._is_sent:
                self._refusal = refusal
                return
            error = refusal
        except asyncio.CancelledError:
            error = Unavailable(SERVER_EXITING) if is_over() else Cancelled(CANCELLED)
        except Exception as unforeseen:
            error = _known(unforeseen)
        self._failed.error = shed(error)
        self._put(self._make(self._failed))

    def sent(self) -> CharoniaError | None:
        """What has refused it so far; what fails from now on is a response."""
        self._is_sent = True
        return self._refusal

    # -- its reader ---------------------------------------------------------------------------------------------------

    def next(self) -> Future[_T]:
        """The next response. Each call gets another one."""
        future: Future[_T] = Future()
        with self._lock:
            if not self._responses:
                self._readers.append(future)
                return future
            future.set_result(self._responses.popleft())
        self._make_room()
        return future

    def give_back(self, future: Future[_T]) -> None:
        """Of a reader that no longer waits: what it would have got is the next one's."""
        if not future.cancel() and not future.cancelled():
            with self._lock:
                self._responses.appendleft(future.result())

    def cancel(self) -> None:
        """Cancel the request, unless it has ended."""
        if self.task is not None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                self.task.get_loop().call_soon_threadsafe(self.task.cancel)

    def abandon(self) -> None:
        """There is no reader any more: the request goes on, and what it answers is dropped."""
        with self._lock:
            self._is_abandoned = True
            self._responses.clear()
        self._make_room()

    def _put(self, response: _T) -> None:
        if self._also is not None:
            try:
                self._also(response)
            except Exception:
                _log.exception("a response could not be put into the queue of its request")
        with self._lock:
            while self._readers:
                reader = self._readers.popleft()
                if reader.set_running_or_notify_cancel():
                    reader.set_result(response)
                    return
            if not self._is_abandoned:
                self._responses.append(response)

    async def _wait_for_room(self) -> None:
        """A queue that the caller gave has no bound, else a reader that falls behind stops the stream."""
        if self._also is not None:
            return
        while len(self._responses) >= _AHEAD:
            self._room = asyncio.Event()
            if len(self._responses) >= _AHEAD:  # it may have read meanwhile
                await self._room.wait()
            self._room = None

    def _make_room(self) -> None:
        room, task = self._room, self.task
        if room is not None and task is not None:
            with contextlib.suppress(RuntimeError):
                task.get_loop().call_soon_threadsafe(room.set)
