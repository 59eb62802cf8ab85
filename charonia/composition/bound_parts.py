"""The parts of a server of bound functions that run in their process: an executor, and a supervisor of the rest.

Both run in the event loop of their starter (`bound_server`); only the gateway and a private log are processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from charonia.errors import StartupError
from charonia.options import values as options
from charonia.options.values import EXECUTOR, Values

from .binding import Binding
from .supervisor import Supervisor, reachable

_log = logging.getLogger(__name__)

_HURRY_S = 5.0


class BoundPart:
    """The executor of bound functions in this event loop, with the owner of its models unless there are others."""

    def __init__(self, bindings: Sequence[Binding], failed: asyncio.Event) -> None:
        self.failure = ""
        self._bindings = bindings
        self._failed = failed
        self._stop: Callable[[], Awaitable[bool]] | None = None

    async def start(self, argv: Sequence[str]) -> None:
        """Join the log that `argv` (an executor's flags) names, and serve. Raises `StartupError`."""
        from charonia.eventlog.redis import RedisLog
        from executors.backends.bound import WORD, BoundBackend, BoundFunction
        from executors.backends.registry import BackendRegistry

        from .heartbeat_process import HeartbeatProcess
        from .roles import ExecutorParts, keeper_terms

        values = options.parse(EXECUTOR, argv, {}, {})
        backend = BoundBackend()
        for binding in self._bindings:
            outputs = tuple(tensor.name for tensor in binding.outputs)
            backend.functions[binding.name] = BoundFunction(binding.function, binding.style, outputs)
        try:
            keeper = HeartbeatProcess.spawn(keeper_terms(values))
        except OSError as error:
            raise StartupError(f"no heartbeat process can be started: {error}") from None
        keeper.start()
        log = RedisLog(keeper.url)
        try:
            await log.open()
            registry = BackendRegistry({WORD: backend})
            parts = ExecutorParts(log, values, self._on_failure, backends=registry, keeper=keeper)
            await parts.start()
        except BaseException:
            await keeper.close()
            await log.close()
            raise

        async def stop() -> bool:
            clean = await parts.stop()
            await keeper.close()
            with contextlib.suppress(Exception):
                await log.close()
            return clean

        self._stop = stop

    async def stop(self) -> bool:
        """Drain and leave; True: in time. A second call does nothing."""
        stop, self._stop = self._stop, None
        return True if stop is None else await stop()

    def _on_failure(self) -> None:
        self.failure = "a bound function did not return in time (charonia.max_execution_s)"
        self._failed.set()


class BoundStack(Supervisor):
    """The supervisor of a private log and its gateways, whose executor is in this process. It receives no signals."""

    def __init__(self, values: Values, part: BoundPart, ready: Callable[[Mapping[str, str]], None]) -> None:
        super().__init__(values)
        self._part = part
        self._tell_ready = ready

    @property
    def failure(self) -> str:
        return self._failed

    async def stop_after(self, wanted: asyncio.Event) -> None:
        """The first wish drains."""
        await wanted.wait()
        self._stop_wanted.set()

    def _listen_to_signals(self) -> None:
        pass

    def _start_children(self) -> None:
        values = self._part_values()
        self._add_gateways(values)
        self._start_all(values)

    async def _start_here(self) -> None:
        values = self._part_values()
        socket = str(self._runtime_dir / "executor-bound.metrics") if values["allow_metrics"] else ""
        await self._part.start(options.render(EXECUTOR, {**values, "metrics_socket": socket, "with_batcher": True}))

    async def _stop_here(self) -> bool:
        return await self._part.stop()

    async def _kill_all(self) -> None:
        try:
            async with asyncio.timeout(_HURRY_S):
                await self._part.stop()
        except Exception:
            _log.exception("the executor of bound functions did not end")
        await super()._kill_all()

    def _announce(self) -> None:
        where = {name: reachable(address) for name, address in self._endpoints.items()}
        self._tell_ready({**where, "log": self._log_url})
