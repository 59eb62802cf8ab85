"""Reads model repositories: lists the models, and reads the directory of each (`model_directory`). Loads nothing.

`executors.repository.roots` has the kinds of repositories.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from charonia.errors import AlreadyExists, InvalidArgument, StartupError, Unavailable
from charonia.models.names import can_be_namespace, check_model_name, model_key, name_of, namespace_of
from executors.repository import model_directory
from protos.model_config_pb2 import ModelConfig

from .model_directory import ModelDirectory
from .remote.store import is_remote
from .roots import LocalRoot, Root

DUPLICATE_REASON = "model appears in two or more repositories"

OpenRemote = Callable[[str, str | None], Root]
"""Opens the repository in an object store: (URL, configuration name of R4)."""


class ModelRepository:
    """One or several repositories. Every `scan` reads them again."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        config_name: str | None = None,
        namespacing: bool = False,
        open_remote: OpenRemote | None = None,
    ) -> None:
        """`config_name` is `--model-config-name`: `configs/<name>.pbtxt` takes precedence over `config.pbtxt` (R4).

        With `namespacing` each path is a namespace: models of different ones may have the same name (R2).

        Raises `StartupError` when a path is no readable directory, is a URL that cannot be used (R7), or none is given.
        """
        if not paths:
            raise StartupError("no model repository was given; use --model-repository=<directory>")
        if config_name is not None and ("/" in config_name or config_name in ("", ".", "..")):
            raise StartupError(f"the model configuration name '{config_name}' must be a plain file name")
        self._roots: list[Root] = []
        self._given = [str(path) for path in paths]
        self._namespacing = namespacing
        self._config_name = config_name
        try:
            for path in paths:
                self._roots.append(self._open(path, open_remote))
            for root in self._roots if namespacing else ():
                if not can_be_namespace(root.location):
                    raise StartupError(
                        f"with --model-namespacing the repository '{root.location}' must have another name"
                    )
        except BaseException:
            self.close()
            raise

    def _open(self, path: str | Path, open_remote: OpenRemote | None) -> Root:
        if not is_remote(str(path)):
            return LocalRoot(path, self._config_name)
        if open_remote is None:
            raise StartupError(f"remote model repositories cannot be used here: '{path}'")
        return open_remote(str(path), self._config_name)

    def register(self, path: Path, model: str, directory: str) -> None:
        """Add a local repository, in which `directory` is that of `model` (H55).

        Raises `AlreadyExists` for one that is there already, and for a model that another directory is registered for,
        `InvalidArgument` for a path that is no directory or cannot be a namespace.
        """
        if not path.is_dir():
            raise InvalidArgument(f"failed to register '{path}', repository not found")
        if self._namespacing and not can_be_namespace(str(path)):
            raise InvalidArgument(f"failed to register '{path}', it must have another name with --model-namespacing")
        if any(root.location == str(path) for root in self._roots):
            raise AlreadyExists(f"model repository '{path}' has already been registered")
        if any(model in root.directories for root in self._roots if isinstance(root, LocalRoot)):
            raise AlreadyExists(f"failed to register '{model}', there is a conflicting mapping for '{model}'")
        # a new list: other threads may go through this one
        self._roots = [*self._roots, LocalRoot(path, self._config_name, {model: directory})]

    def unregister(self, path: Path) -> None:
        """Remove a repository that was registered."""
        self._roots = [root for root in self._roots if root.location != str(path)]

    def scan(self) -> dict[str, ModelDirectory]:
        """Return all models by key. Models found twice (R2), or with a bad configuration, have an error.

        Of a remote model, only the fingerprint is sure to be set. Raises `Unavailable` when a repository cannot be
        listed, which is no reason to unload anything.
        """
        found: dict[str, ModelDirectory] = {}
        # list all first: the meaning of an ensemble's model names depends on where these models are
        for root, names in [(root, root.names()) for root in self._roots]:
            for name in names:
                model = self._read(root, name, scanning=True)
                if model.key in found:
                    found[model.key] = replace(model, config=None, error=Unavailable(DUPLICATE_REASON))
                else:
                    found[model.key] = model
        return dict(sorted(found.items()))

    def stamp(self) -> tuple[int, ...]:
        """A value that changes when a model appears in a local repository or leaves it; one `stat` for each."""
        return tuple(root.stamp() for root in self._roots if isinstance(root, LocalRoot))

    def names(self) -> tuple[str, ...]:
        """The keys of all models, ascending, without reading any. Raises `Unavailable` as `scan` does."""
        found = {
            model_key(root.location if self._namespacing else "", name) for root in self._roots for name in root.names()
        }
        return tuple(sorted(found))

    def find(self, key: str) -> ModelDirectory | None:
        """Return one model without reading the others; None when no repository has it (R20).

        Raises R11's errors, and `Unavailable` when a repository that should have it cannot be reached.
        """
        if self._namespacing:
            # a model without a namespace is in no repository: it came with a load request (R25)
            known = [root for root in self._roots_with(name_of(key)) if root.location == namespace_of(key)]
        else:
            known = self._roots_with(key)
        if not known:
            return None
        model = self._read(known[0], name_of(key), scanning=False)
        if len(known) > 1:
            return replace(model, config=None, error=Unavailable(DUPLICATE_REASON))
        return model

    def keys(self, name: str) -> list[str]:
        """The keys of all models with a name, ascending; the name alone without namespaces. Raises what `find` does."""
        if not self._namespacing:
            return [name]
        return sorted({model_key(root.location, name) for root in self._roots_with(name)})

    @property
    def has_copies(self) -> bool:
        """Whether a repository is remote, so that there are local copies to release."""
        return any(not isinstance(root, LocalRoot) for root in self._roots)

    def release(self, key: str, keep: Collection[Path], *, latest: bool) -> None:
        """Remove local copies of a remote model, except those in `keep` and, with `latest`, the last one fetched."""
        for root in self._roots:
            if not self._namespacing or root.location == namespace_of(key):
                root.release(name_of(key), keep, latest=latest)

    def abandon(self) -> None:
        """Cancel fetches in progress, and fetch nothing more."""
        for root in self._roots:
            root.abandon()

    @property
    def is_waiting(self) -> bool:
        """Whether a thread waits for a server's answer. It cannot be interrupted, and delays the end of the process."""
        return any(root.is_waiting for root in self._roots)

    def close(self) -> None:
        """Release all resources. Nothing may be read afterwards."""
        for root in self._roots:
            root.close()

    def _roots_with(self, name: str) -> list[Root]:
        """The repositories that have a model with this name now."""
        check_model_name(name)
        registered = [r for r in self._roots if isinstance(r, LocalRoot) and name in r.directories]
        return [root for root in registered or self._roots if root.refresh(name)]

    def _read(self, root: Root, name: str, *, scanning: bool) -> ModelDirectory:
        namespace = root.location if self._namespacing else ""
        model = root.read(name, namespace=namespace, scanning=scanning)
        at = self._roots.index(root)  # those that are registered follow those that were given
        given = self._given[at] if at < len(self._given) else ""
        return self.with_composing_models(replace(model, repository=given))

    def read(self, path: Path, *, name: str) -> ModelDirectory:
        """Read the model in a directory outside the repositories (R25)."""
        model = model_directory.read(path, name=name, config_name=self._config_name)
        return self.with_composing_models(model)

    def with_composing_models(self, model: ModelDirectory) -> ModelDirectory:
        """Set the namespaces in an ensemble's steps: its own, else the only one that has the model.

        A namespace written in a step is ignored, as in Triton. The result is part of the fingerprint: an ensemble has
        changed when one of its models appears in its namespace, or leaves it.
        """
        if model.config is None or not model.config.HasField("ensemble_scheduling"):
            return model
        if not self._namespacing and not any(step.model_namespace for step in model.config.ensemble_scheduling.step):
            return model
        config = ModelConfig()
        config.CopyFrom(model.config)
        for step in config.ensemble_scheduling.step:
            step.model_namespace = self._namespace_for(step.model_name, model.namespace)
        if not self._namespacing:
            return replace(model, config=config)
        chosen = "\0".join(step.model_namespace for step in config.ensemble_scheduling.step)
        digest = hashlib.blake2b(chosen.encode(), digest_size=16).hexdigest()
        fingerprint = replace(model.fingerprint, config=f"{model.fingerprint.config}:{digest}")
        return replace(model, config=config, fingerprint=fingerprint)

    def _namespace_for(self, name: str, preferred: str) -> str:
        """The repository of a composing model, "" when several or none have it."""
        if not self._namespacing or not name.strip() or "/" in name or "\0" in name:
            return ""
        having = {root.location for root in self._roots if root.has(name)}
        if preferred in having:
            return preferred
        return having.pop() if len(having) == 1 else ""
