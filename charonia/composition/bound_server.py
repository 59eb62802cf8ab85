"""Serves bound callables from the process they live in: `charonia.Server` (P21, R42).

The callables run in threads of this process, because their closures live here. One more thread runs an event loop with
an executor of theirs and, without a log given by URL, the owner of its models and the supervisor of what else a
server needs: a private log and a gateway, which are processes. With `log_url` the executor joins a running cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from charonia.errors import InvalidArgument, StartupError
from charonia.options import values as options
from charonia.options.values import EXECUTOR, SERVE, Values

from .binding import Binding, TensorSpec, bind
from .bound_parts import BoundPart, BoundStack
from .hosting import HostedRun


class Server:
    """Bound models over HTTP and gRPC. Use it as a context manager, or `start` and `stop`, or `serve` until Ctrl-C.

    `address` and the ports are those of the fronts, 0 for a free one; `http`, `grpc` and `metrics` say where they
    listen once started, `log_url` which log they share. `state_dir` keeps jobs and results from one start to the next;
    without it nothing is kept.
    `model_repository` names directories of further models. With `log_url` this process only executes, for the servers
    that share that log. Other options of `charonia serve` go by their names with `_` for `-`.

    Bindings cannot be added once it has started. A server can be started again after `stop`.
    """

    def __init__(
        self,
        *bindings: Binding,
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        address: str = "127.0.0.1",
        log_url: str = "",
        state_dir: str | os.PathLike[str] = "",
        model_repository: Sequence[str | os.PathLike[str]] = (),
        **more: Any,
    ) -> None:
        given = {
            "http_port": http_port,
            "grpc_port": grpc_port,
            "metrics_port": metrics_port,
            "http_address": address,
            "grpc_address": address,
            "log_url": log_url,
            "state_dir": os.fspath(state_dir),
            "log_info": False,
            "allow_webhooks": False,
            **more,
        }
        self._values = options.parse(SERVE, _flags(given), os.environ, {})
        self._repositories = tuple(os.fspath(path) for path in model_repository)
        self._bindings: dict[str, Binding] = {}
        self._running: _Running | None = None
        self.http = self.grpc = self.metrics = self.log_url = ""
        for binding in bindings:
            self.add(binding)

    def add(self, binding: Binding) -> Binding:
        """Serve one more binding. Raises `InvalidArgument` for a second one of its name, or once started."""
        if self._running is not None:
            raise InvalidArgument(f"'{binding.name}' cannot be bound: the server has started")
        if not isinstance(binding, Binding):
            raise InvalidArgument(f"only what charonia.bind made can be served, found type '{type(binding)}'")
        if binding.name in self._bindings:
            raise InvalidArgument(f"'{binding.name}' is bound already")
        self._bindings[binding.name] = binding
        return binding

    def bind(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        **settings: Any,
    ) -> Binding:
        """Bind a callable and serve it; `settings` are those of `charonia.bind`."""
        binding: Binding = bind(function, name=name, inputs=inputs, outputs=outputs, **settings)
        return self.add(binding)

    def model(self, name: str = "", **settings: Any) -> Callable[[Callable[..., Any]], Binding]:
        """A decorator that binds a function and serves it; `settings` are those of `charonia.bind`."""

        def decorate(function: Callable[..., Any]) -> Binding:
            return self.add(bind(function, name=name, **settings))

        return decorate

    def start(self) -> Server:
        """Serve from now on; returns when every model is ready. Raises `StartupError`, then nothing is left running."""
        if self._running is not None:
            raise StartupError("the server has started already")
        if not self._bindings:
            raise StartupError("nothing is bound")
        running = _Running(self._values, tuple(self._bindings.values()), self._repositories)
        running.start()
        self._running = running
        where = running.endpoints
        self.http, self.grpc, self.metrics = (where.get(name, "") for name in ("http", "grpc", "metrics"))
        self.log_url = where["log"]
        return self

    def stop(self) -> bool:
        """Finish what is open and stop; False when something was still running after `exit_timeout_secs`."""
        running, self._running = self._running, None
        if running is None:
            return True
        self.http = self.grpc = self.metrics = self.log_url = ""
        return running.stop()

    def serve(self) -> None:
        """`start`, `wait` and `stop`. Raises `StartupError`."""
        try:
            self.start()
            self.wait()
        finally:
            self.stop()

    def wait(self) -> None:
        """Until Ctrl-C or SIGTERM, where this is the main thread, or until `stop` from another one.

        Raises `StartupError` when the server ended by itself.
        """
        running = self._running
        if running is None:
            return
        with contextlib.suppress(KeyboardInterrupt), _sigterm_as_interrupt():
            running.wait()
        if running.failure:
            raise StartupError(running.failure)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve(*bindings: Binding, **settings: Any) -> None:
    """Serve bindings until Ctrl-C; `settings` are those of `Server`. Raises `StartupError`."""
    Server(*bindings, **settings).serve()


# -- the thread --------------------------------------------------------------------------------------------------------


class _Running(HostedRun):
    """One run of a server."""

    def __init__(self, values: Values, bindings: tuple[Binding, ...], repositories: tuple[str, ...]) -> None:
        super().__init__()
        self.endpoints: dict[str, str] = {}
        self._values = dict(values)
        self._bindings = bindings
        self._repositories = repositories

    async def _main(self, directory: Path, wanted: asyncio.Event) -> bool:
        bound = directory / "models"
        await asyncio.to_thread(_write_repository, bound, self._bindings)
        values = self._values
        values["model_repository"] = (str(bound), *values["model_repository"], *self._repositories)
        part = BoundPart(self._bindings, wanted)
        if values["log_url"]:
            await part.start(options.render(EXECUTOR, {**values, "allow_metrics": False}))
            self._is_served({"log": values["log_url"]})
            await wanted.wait()
            clean = await part.stop()
        else:
            values["state_dir"] = values["state_dir"] or str(directory / "state")
            clean = await self._supervise(BoundStack(values, part, self._is_served), wanted)
        self.failure = self.failure or part.failure
        return clean

    def _is_served(self, endpoints: Mapping[str, str]) -> None:
        self.endpoints = dict(endpoints)
        self._became_ready()


# -- inside ------------------------------------------------------------------------------------------------------------


def _write_repository(root: Path, bindings: Sequence[Binding]) -> None:
    """The bound models as an executor finds models: a configuration each and a version without files."""
    from google.protobuf import text_format

    for binding in bindings:
        version = root / binding.name / str(binding.version)
        version.mkdir(parents=True)
        (root / binding.name / "config.pbtxt").write_text(text_format.MessageToString(binding.config))
        code = f"{getattr(binding.function, '__module__', '')}:{getattr(binding.function, '__qualname__', '')}\n"
        (version / "function").write_text(code)


def _flags(given: Mapping[str, Any]) -> list[str]:
    known = {option.key: option.name for option in options.options_of(SERVE)}
    flags: list[str] = []
    for key, value in given.items():
        if key not in known:
            raise StartupError(f"charonia.Server has no option '{key}'")
        values = value if isinstance(value, (list, tuple)) else [value]
        flags += [f"--{known[key]}={str(each).lower() if isinstance(each, bool) else each}" for each in values]
    return [flag for flag in flags if not flag.endswith("=")]


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Within it SIGTERM ends the main thread's wait as Ctrl-C does; elsewhere signals are not ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
