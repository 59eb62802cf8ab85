"""`Server` of the in-process API: starts and stops, loads and unloads, and gives its models."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from charonia.errors import CharoniaError, StartupError
from gateway.http.codec import control_json

from .host import Host
from .kinds import (
    InternalError,
    InvalidArgumentError,
    MetricFormat,
    ModelControlMode,
    UnavailableError,
    UnsupportedError,
)
from .models import Model
from .options import Options, serve_values
from .program_metrics import custom_page

_UNLOADED = (None, "UNAVAILABLE")
_FILE = "file:"


class ModelDictionary(dict[Any, Model]):
    """Models by (name, version); a name alone gives the model with version -1."""

    def __init__(self, server: Server, models: list[Model]) -> None:
        super().__init__({(model.name, model.version): model for model in models})
        self._server = server

    def __getitem__(self, key: str | tuple[str, int]) -> Model:
        if isinstance(key, tuple):
            if key in self:
                return super().__getitem__(key)
        elif any(name == key for name, _ in self):
            return Model(self._server, key)
        raise KeyError(f"Unknown Model: {key}")


class Server:
    """A server of this process, of `Options` or their fields. `with` starts it, waits until it is ready, and stops it.

    It can be started again after `stop`. All methods but `start` raise `InvalidArgumentError` unless it is started.
    """

    def __init__(self, options: Options | None = None, **kwargs: Any) -> None:
        self.options = Options(**kwargs) if options is None else options
        self._host: Host | None = None
        self._starting = threading.Lock()

    def start(
        self, wait_until_ready: bool = False, polling_interval: float = 0.1, timeout: float | None = None
    ) -> Server:
        """Start, load what is to be loaded at start, and, if wanted, wait so many seconds until it is ready.

        Raises `InvalidArgumentError` for options that cannot be, `InternalError` when it cannot start (then nothing is
        left running), `UnavailableError` when it was not ready in time (then it runs).
        """
        with self._starting:
            if self._host is not None:
                raise InvalidArgumentError("Server already started")
            host = Host(serve_values(self.options))
            try:
                host.start()
            except (StartupError, CharoniaError) as error:
                raise InternalError(str(error)) from None
            self._host = host
        begun = time.monotonic()
        while wait_until_ready and not self.ready():
            if timeout is not None and time.monotonic() - begun >= timeout:
                raise UnavailableError("Timeout before ready")
            time.sleep(polling_interval)
        return self

    def stop(self) -> None:
        """Finish what is open, unload and end. Raises `InternalError` when some of it did not end in time."""
        host = self._running()
        clean = host.stop()
        self._host = None
        if not clean:
            raise InternalError(host.failure or "Exit timeout expired. Exiting immediately.")

    def live(self) -> bool:
        """Whether it runs."""
        return self._running().is_live

    def ready(self) -> bool:
        """Whether it and its models take requests."""
        host = self._running()
        with suppress(UnavailableError):
            return host.ask(lambda service: service.ready())
        return False

    def metadata(self) -> dict[str, Any]:
        """Name, version and extensions."""
        return control_json.server_metadata(self._running().ask(lambda service: service.server_metadata()))

    def model(self, model_name: str, model_version: int = -1) -> Model:
        """A model by its name, whether or not there is one."""
        return Model(self, model_name, model_version)

    def models(self, exclude_not_ready: bool = False) -> ModelDictionary:
        """The models of the repositories, loaded or not."""
        index = self._running().ask(lambda service: service.repository_index(ready=exclude_not_ready))
        return ModelDictionary(
            self,
            [
                Model(self, entry.name, int(entry.version or -1), entry.state or None, entry.reason or None)
                for entry in index
            ],
        )

    def load(self, model_name: str, parameters: Mapping[str, str | int | bool | bytes] | None = None) -> Model:
        """Load a model and wait for it; only in mode EXPLICIT.

        `parameters` may override its configuration (`config`, as JSON) and, then, its files (`file:<version>/<path>`).
        """
        config: str | None = None
        files: dict[str, bytes] = {}
        for name, value in (parameters or {}).items():
            if name == "config":
                if not isinstance(value, str):
                    raise InvalidArgumentError("Config parameter 'config' must have string type for its value")
                config = value
            elif not name.startswith(_FILE):
                raise InvalidArgumentError(f"Unrecognized load parameter '{name}' with type '{_type_name(value)}'")
            elif not isinstance(value, bytes):
                raise InvalidArgumentError(f"File parameter '{name}' must have bytes type for its value")
            else:
                files[name.removeprefix(_FILE)] = value
        self._running().wait_for(lambda service: service.load_model(model_name, config, files))
        return self.model(model_name)

    def unload(
        self,
        model: str | Model,
        unload_dependents: bool = False,
        wait_until_unloaded: bool = False,
        polling_interval: float = 0.1,
        timeout: float | None = None,
    ) -> None:
        """Take a model out of service, and the ensembles that use it as well if wanted; only in mode EXPLICIT.

        What it has accepted is finished; `wait_until_unloaded` waits for that, so many seconds.
        """
        name = model if isinstance(model, str) else model.name
        host = self._running()
        host.wait_for(lambda service: service.unload_model(name, unload_dependents=unload_dependents))
        begun = time.monotonic()
        while wait_until_unloaded and not self._is_unloaded(name):
            if timeout is not None and time.monotonic() - begun >= timeout:
                return
            time.sleep(polling_interval)

    def metrics(self, metric_format: MetricFormat = MetricFormat.PROMETHEUS) -> str:
        """The metrics of the server and its models, and those of this process (`MetricFamily`), as text."""
        if metric_format != MetricFormat.PROMETHEUS:
            raise InvalidArgumentError(f"metrics cannot be formatted as {metric_format!r}")
        return self._running().metrics_page().decode() + custom_page()

    def register_model_repository(self, repository_path: str, name_mapping: Mapping[str, str] | None = None) -> None:
        """Not offered: raises `UnsupportedError`, and changes nothing."""
        self._refuse_registration("registration")

    def unregister_model_repository(self, repository_path: str) -> None:
        """Not offered: raises `UnsupportedError`, and changes nothing."""
        self._refuse_registration("unregistration")

    def poll_model_repository(self) -> None:
        """Not offered: in mode POLL repositories are looked through again and again. Raises `UnsupportedError`."""
        self._running()
        if self.options.model_control_mode is not ModelControlMode.POLL:
            raise UnavailableError("polling is disabled")
        raise UnsupportedError("the server polls its repositories by itself, see serve_options 'repository_poll_secs'")

    def __enter__(self) -> Server:
        return self if self._host is not None else self.start(wait_until_ready=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._host is not None:
            self.stop()

    def _running(self) -> Host:
        if self._host is None:
            raise InvalidArgumentError("Server not started")
        return self._host

    def _is_unloaded(self, name: str) -> bool:
        return all(model.state in _UNLOADED for model in self.models().values() if model.name == name)

    def _refuse_registration(self, what: str) -> None:
        self._running()
        if self.options.model_control_mode is not ModelControlMode.EXPLICIT:
            raise UnsupportedError(f"repository {what} is not allowed if model control mode is not EXPLICIT")
        raise UnsupportedError(f"repository {what} is not supported: a server's repositories are those of its start")


def _type_name(value: object) -> str:
    return {str: "STRING", bool: "BOOL", int: "INT", float: "DOUBLE", bytes: "BYTES"}.get(type(value), "<invalid>")
