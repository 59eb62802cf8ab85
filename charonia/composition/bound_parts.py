"""The parts of a server of bound functions that run in their process: an executor, and a supervisor of the rest.

Both run in the event loop of their starter (`bound_server`); only the gateway and a private log are processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from charonia.options import values as options
from charonia.options.values import EXECUTOR, Values

from .binding import Binding
from .hosting import HostedStack, Joined
from .supervisor import reachable


class BoundPart:
    """The executor of bound functions in this event loop, with the owner of its models unless there are others."""

    def __init__(self, bindings: Sequence[Binding], failed: asyncio.Event) -> None:
        self.failure = ""
        self._bindings = bindings
        self._failed = failed
        self._stop: Callable[[], Awaitable[bool]] | None = None

    async def start(self, argv: Sequence[str]) -> None:
        """Join the log that `argv` (an executor's flags) names, and serve. Raises `StartupError`."""
        from executors.backends.bound import WORD, BoundBackend, BoundFunction
        from executors.backends.registry import BackendRegistry

        from .roles import ExecutorParts

        values = options.parse(EXECUTOR, argv, {}, {})
        backend = BoundBackend()
        for binding in self._bindings:
            outputs = tuple(tensor.name for tensor in binding.outputs)
            backend.functions[binding.name] = BoundFunction(binding.function, binding.style, outputs)
        joined = await Joined.open(values)
        try:
            registry = BackendRegistry({WORD: backend})
            parts = ExecutorParts(joined.log, values, self._on_failure, backends=registry, keeper=joined.keeper)
            await parts.start()
        except BaseException:
            await joined.close()
            raise

        async def stop() -> bool:
            clean = await parts.stop()
            await joined.close()
            return clean

        self._stop = stop

    async def stop(self) -> bool:
        """Drain and leave; True: in time. A second call does nothing."""
        stop, self._stop = self._stop, None
        return True if stop is None else await stop()

    def _on_failure(self) -> None:
        self.failure = "a bound function did not return in time (charonia.max_execution_s)"
        self._failed.set()


class BoundStack(HostedStack):
    """The supervisor of a private log and its gateways, whose executor is in this process."""

    def __init__(self, values: Values, part: BoundPart, ready: Callable[[Mapping[str, str]], None]) -> None:
        super().__init__(values, lambda: ready(self._where()))
        self._part = part

    def _start_children(self) -> None:
        values = self._part_values()
        self._add_gateways(values)
        self._start_all(values)

    async def _start_here(self) -> None:
        values = self._part_values()
        socket = str(self._runtime_dir / "executor-bound.metrics") if values["allow_metrics"] else ""
        await self._part.start(options.render(EXECUTOR, {**values, "metrics_socket": socket, "with_batcher": True}))

    async def _stop_here(self, roles: Sequence[str]) -> bool:
        return await self._part.stop() if EXECUTOR in roles else True

    async def _end_here(self) -> bool:
        return await self._part.stop()

    def _where(self) -> dict[str, str]:
        where = {name: reachable(address) for name, address in self._endpoints.items()}
        return {**where, "log": self._log_url}
