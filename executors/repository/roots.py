"""The interface of one model repository, and its implementation for a local directory.

`executors.repository.remote` implements it for object stores.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from charonia.errors import StartupError, Unavailable, path_without_credentials
from charonia.models.names import can_be_model

from . import model_directory
from .files import is_hidden
from .model_directory import ModelDirectory


class Root(Protocol):
    """A repository. All methods except `location` and `has` may block on files or a server: call them in a thread."""

    @property
    def location(self) -> str:
        """Its absolute path or URL, which is its name in texts and as a namespace."""

    def names(self) -> list[str]:
        """The names of its models now. Raises `Unavailable` when it cannot be listed."""

    def refresh(self, name: str) -> bool:
        """Check whether it has a model now. Raises `Unavailable`."""

    def has(self, name: str) -> bool:
        """Whether it had a model at the last check."""

    def read(self, name: str, *, namespace: str, scanning: bool) -> ModelDirectory:
        """Return a model as of the last check. With `scanning`, only the fingerprint must be set."""

    def release(self, name: str, keep: Collection[Path], *, latest: bool) -> None:
        """Remove local copies of a model, except those in `keep` and, with `latest`, the last one fetched."""

    def abandon(self) -> None:
        """Cancel fetches in progress, and fetch nothing more."""

    @property
    def is_waiting(self) -> bool:
        """Whether a thread waits for a server's answer."""

    def close(self) -> None:
        """Release all resources."""


class LocalRoot:
    """A repository in a local directory. `directories` are those of models that are not named after theirs (H55)."""

    def __init__(
        self, path: str | Path, config_name: str | None, directories: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Raise `StartupError` when the path is no directory."""
        if not Path(path).is_dir():
            shown = path_without_credentials(str(path))
            raise StartupError(f"the model repository '{shown}' does not exist or is not a directory")
        self.path = Path(path).absolute()
        self._config_name = config_name
        self.directories = directories

    @property
    def location(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        try:
            found = [path.name for path in self.path.iterdir() if path.is_dir()]
            own = [name for name in found if not is_hidden(name) and can_be_model(name)]
            return sorted([*(name for name in own if name not in self.directories.values()), *self.directories])
        except OSError as error:
            raise Unavailable(f"failed to poll model repository '{self.path}': {error.strerror or error}") from error

    def stamp(self) -> int:
        """When an entry of the directory last appeared, left or was renamed; 0 while there is no directory."""
        try:
            return self.path.stat().st_mtime_ns
        except OSError:
            return 0

    def refresh(self, name: str) -> bool:
        return self.has(name)

    def has(self, name: str) -> bool:
        try:
            if name in self.directories:
                return self._directory(name).is_dir()
            return self._directory(name).is_dir() and not is_hidden(name) and name not in self.directories.values()
        except OSError:  # a name longer than the file system takes
            return False

    def read(self, name: str, *, namespace: str, scanning: bool) -> ModelDirectory:
        return model_directory.read(
            self._directory(name), name=name, namespace=namespace, config_name=self._config_name
        )

    def _directory(self, name: str) -> Path:
        return self.path / self.directories.get(name, name)

    def release(self, name: str, keep: Collection[Path], *, latest: bool) -> None:
        """Do nothing: there are no copies."""

    def abandon(self) -> None:
        """Do nothing: there are no fetches."""

    @property
    def is_waiting(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: there are no resources."""
