"""One model repository of several: a directory of this machine here, an object store's in
`executors.repository.remote`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from charonia.errors import StartupError, Unavailable
from charonia.models.names import can_be_model

from . import model_directory
from .files import is_hidden
from .model_directory import ModelDirectory


class Root(Protocol):
    """A repository. All but `place` and `has` may read files or ask a server: not for the event loop."""

    @property
    def place(self) -> str:
        """What it is called in texts and as a namespace: its absolute path or its URL."""

    def names(self) -> list[str]:
        """The models it has now. Raises `Unavailable` when it cannot be listed."""

    def look(self, name: str) -> bool:
        """Whether it has a model now. Raises `Unavailable`."""

    def has(self, name: str) -> bool:
        """Whether it had a model when it was last looked at."""

    def read(self, name: str, *, namespace: str, scanning: bool) -> ModelDirectory:
        """A model as it was last looked at. `scanning`: its fingerprint is enough, there may be no configuration."""

    def release(self, name: str, keep: Collection[Path], *, latest: bool) -> None:
        """Remove the copies of a model that are made for this process, but those to `keep` and, if so, the `latest`."""

    def abandon(self) -> None:
        """Break off what is being fetched, and fetch nothing more."""

    @property
    def is_waiting(self) -> bool:
        """Whether some thread waits for a server's answer."""

    def close(self) -> None:
        """Give back what it holds."""


class LocalRoot:
    """A directory, read where it lies."""

    def __init__(self, path: str | Path, config_name: str | None) -> None:
        """Raises `StartupError` when it is no directory."""
        if not Path(path).is_dir():
            raise StartupError(f"the model repository '{path}' does not exist or is not a directory")
        self.path = Path(path).absolute()
        self._config_name = config_name

    @property
    def place(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        try:
            found = [path.name for path in self.path.iterdir() if path.is_dir()]
            return sorted(name for name in found if not is_hidden(name) and can_be_model(name))
        except OSError as error:
            raise Unavailable(f"failed to poll model repository '{self.path}': {error.strerror or error}") from error

    def look(self, name: str) -> bool:
        return self.has(name)

    def has(self, name: str) -> bool:
        try:
            return (self.path / name).is_dir() and not is_hidden(name)
        except OSError:  # a name longer than the file system takes
            return False

    def read(self, name: str, *, namespace: str, scanning: bool) -> ModelDirectory:
        return model_directory.read(self.path / name, namespace=namespace, config_name=self._config_name)

    def release(self, name: str, keep: Collection[Path], *, latest: bool) -> None:
        """There are none."""

    def abandon(self) -> None:
        """Nothing is fetched."""

    @property
    def is_waiting(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is held."""
