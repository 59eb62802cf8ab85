"""A repository in an object store (`executors.repository.roots.Root`).

Listings and configuration files are cached. The other files of a model are fetched only when it is about to be loaded
here. When the store cannot be listed, the last listing holds.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from charonia.errors import CharoniaError, Unavailable
from charonia.models.config_errors import StructureError
from charonia.models.names import can_be_model
from executors.configuration import autofill
from executors.repository.files import is_hidden
from executors.repository.model_directory import (
    CONFIG_DIRECTORY,
    CONFIG_FILE,
    Fingerprint,
    ModelDirectory,
    digest_of,
    parse_config,
    version_of,
)
from protos.model_config_pb2 import ModelConfig

from .copies import Copies, is_safe
from .store import ObjectStore, RemoteError, RemoteObject, Sink

_log = logging.getLogger(__name__)

MAX_OBJECTS = 250_000
"""The limit of objects in one repository: a bucket with more is most likely not a model repository."""

_MAX_CONFIG_BYTES = 16 << 20

Objects = tuple[RemoteObject, ...]
"""The objects of one model, named relative to its directory, sorted by name."""


class RemoteRoot:
    """`place` is the URL; `config_name` as in R4."""

    def __init__(self, location: str, store: ObjectStore, copies: Copies, config_name: str | None) -> None:
        self._place = location
        self._store = store
        self._copies = copies
        self._config_name = config_name
        self._models: dict[str, Objects] = {}
        self._scanned = False
        self._configs: dict[str, tuple[RemoteObject, bytes]] = {}
        self._unreachable = ""
        self._pending_calls = 0
        """The number of calls of the store that have not returned."""
        self._changing = threading.Lock()

    @property
    def location(self) -> str:
        return self._place

    def names(self) -> list[str]:
        try:
            found = self._listed("")
        except Unavailable as error:
            with self._changing:
                if not self._scanned:
                    raise
                if error.message != self._unreachable:  # log it once, not at every poll
                    _log.warning("%s; what is loaded from it stays", error)
                self._unreachable = error.message
                return sorted(self._models)
        with self._changing:
            if self._unreachable:
                _log.info("the model repository '%s' can be read again", self._place)
            if not self._scanned:
                self._remove_stale_copies(found)
            self._models, self._unreachable, self._scanned = found, "", True
            # iterate over a copy: another thread that reads a configuration may add to them
            self._configs = {name: known for name, known in self._configs.copy().items() if name in found}
        return sorted(found)

    def _remove_stale_copies(self, found: dict[str, Objects]) -> None:
        """Remove the copies of unknown models that an earlier process has left. Called before any copy is in use."""
        if not found:
            _log.warning("the model repository '%s' holds no models: is it the right path?", self._place)
        for model in self._copies.models() - found.keys():
            self._copies.release(model, (), latest=False)

    def refresh(self, name: str) -> bool:
        try:
            found = self._listed(f"{name}/").get(name)
        except Unavailable as error:
            if not self._scanned or name in self._models:
                raise
            _log.warning("%s; whether it has a model '%s' is not known", error, name)
            return False
        with self._changing:
            models = {known: objects for known, objects in self._models.items() if known != name}
            if found is not None:
                models[name] = found
            self._models = models
        return found is not None

    def has(self, name: str) -> bool:
        return name in self._models

    def read(self, name: str, *, namespace: str, scanning: bool) -> ModelDirectory:
        objects = self._models.get(name, ())
        existing = tuple(sorted({version for found in objects if (version := _version(found)) is not None}))
        config_file = self._config_file(objects)
        found = ModelDirectory(
            name,
            Path(name),  # not used before the files are fetched
            existing,
            _fingerprint(objects, existing, config_file),
            namespace=namespace,
            entries=_entries(objects, existing),
            fetch=partial(self._fetch, name, objects),
        )
        if scanning and config_file is not None and self._configs.get(name, (None,))[0] != config_file:
            return found
        try:
            config = autofill.prepare(self._config(name, config_file), name, found.entries)
        except RemoteError:
            raise
        except CharoniaError as error:
            return replace(found, error=error)
        return replace(found, config=config)

    def release(self, name: str, keep: Collection[Path], *, latest: bool) -> None:
        self._copies.release(name, keep, latest=latest)

    def abandon(self) -> None:
        self._copies.abandon()

    @property
    def is_waiting(self) -> bool:
        return self._pending_calls > 0

    def close(self) -> None:
        self._copies.close()
        self._store.close()

    # -- calls of the store -------------------------------------------------------------------------------------------

    def _listed(self, below: str) -> dict[str, Objects]:
        """List the models whose objects' names begin with `below`. Raises `RemoteError`."""
        models: dict[str, list[RemoteObject]] = {}
        with self._asking():
            for number, found in enumerate(self._store.objects(below)):
                if number == MAX_OBJECTS:
                    why = f"it holds more than {MAX_OBJECTS} objects"
                    raise RemoteError(f"the model repository '{self._place}' cannot be read: {why}")
                model, _, name = found.name.partition("/")
                if not is_safe(model) or is_hidden(model) or not can_be_model(model):
                    continue
                if name:
                    models.setdefault(model, []).append(replace(found, name=name))
                elif found.is_directory:
                    models.setdefault(model, [])
        return {model: tuple(sorted(objects, key=lambda one: one.name)) for model, objects in models.items()}

    def _config(self, name: str, file: RemoteObject | None) -> ModelConfig:
        """Read the configuration; without a file it is empty (C73). Raises `StructureError` or `RemoteError`."""
        if file is None:
            return ModelConfig()
        known = self._configs.get(name)
        if known is None or known[0] != file:
            if file.size_bytes > _MAX_CONFIG_BYTES:
                raise StructureError(f"'{file.name}' has {file.size_bytes} bytes: that is no configuration")
            content = io.BytesIO()
            self._copies.take(partial(self._copy, name), file, content)
            known = self._configs[name] = (file, content.getvalue())
        return parse_config(file.name.rpartition("/")[2], known[1])

    def _fetch(self, name: str, objects: Objects, wanted: Collection[int]) -> Path:
        """Fetch the shared files and those of the `wanted` versions; return the model's directory."""
        chosen = []
        for found in objects:
            version = _version(found)
            if version is not None and version not in wanted:
                continue
            if is_safe(found.name):
                chosen.append(found)
            else:
                _log.warning("model %s of %s: the object %r can be no file here", name, self._place, found.name)
        return self._copies.fetch(name, chosen, partial(self._copy, name))

    def _copy(self, name: str, found: RemoteObject, sink: Sink) -> None:
        """Copy one object of a model. Its name is relative to the model."""
        with self._asking():
            self._store.copy(replace(found, name=f"{name}/{found.name}"), sink)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """A context for calls of the store. Turns unknown exceptions of its library into `RemoteError`."""
        with self._changing:
            self._pending_calls += 1
        try:
            yield
        except (CharoniaError, OSError):  # OSError comes from the local disk
            raise
        except Exception as error:
            why = f"its server answers nonsense ({type(error).__name__})"
            raise RemoteError(f"the model repository '{self._place}' cannot be read: {why}") from error
        finally:
            with self._changing:
                self._pending_calls -= 1

    def _config_file(self, objects: Objects) -> RemoteObject | None:
        files = {found.name: found for found in objects if not found.is_directory}
        if self._config_name is not None:
            chosen = files.get(f"{CONFIG_DIRECTORY}/{self._config_name}.pbtxt")
            if chosen is not None:
                return chosen
        return files.get(CONFIG_FILE)


def _version(found: RemoteObject) -> int | None:
    """The version in whose directory an object is, or whose directory it marks."""
    top, slash, _ = found.name.partition("/")
    return version_of(top) if slash or found.is_directory else None


def _visible(objects: Iterable[RemoteObject]) -> list[RemoteObject]:
    """The files that are part of the model (R1)."""
    return [o for o in objects if not o.is_directory and not any(map(is_hidden, o.name.split("/")))]


def _fingerprint(objects: Objects, existing: tuple[int, ...], config: RemoteObject | None) -> Fingerprint:
    def stamp(chosen: Iterable[RemoteObject]) -> str:
        return digest_of(f"{o.name}\0{o.size_bytes}\0{o.stamp}" for o in chosen)

    files = _visible(objects)
    of_version: dict[int, list[RemoteObject]] = {version: [] for version in existing}
    shared = []
    for found in files:
        version = _version(found)
        if version is not None:
            of_version[version].append(found)
        elif found.name.partition("/")[0] not in (CONFIG_FILE, CONFIG_DIRECTORY):
            shared.append(found)
    return Fingerprint(
        config=stamp([config]) if config is not None else "missing",
        shared=stamp(shared),
        versions={version: stamp(chosen) for version, chosen in of_version.items()},
    )


def _entries(objects: Objects, existing: tuple[int, ...]) -> tuple[str, ...]:
    """Entries of the highest version that is not empty: they identify the backend (R5)."""
    for version in reversed(existing):
        inside = {o.name.split("/")[1] for o in _visible(objects) if o.name.startswith(f"{version}/")}
        if inside:
            return tuple(sorted(inside))
    return ()
