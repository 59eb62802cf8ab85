"""Reads model repositories: which models there are, and what is to be known of each (`model_directory`).

It loads nothing. Which version to serve, when to load it and what to tell clients is for the executor and the gateway;
what kinds of repositories there are is `executors.repository.roots`'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from charonia.errors import StartupError, Unavailable
from charonia.models.names import can_be_namespace, check_model_name, model_key, name_of, namespace_of
from protos.model_config_pb2 import ModelConfig

from . import model_directory
from .model_directory import ModelDirectory
from .remote.store_addresses import is_remote
from .roots import LocalRoot, Root

DUPLICATE_REASON = "model appears in two or more repositories"

OpenRemote = Callable[[str, str | None], Root]
"""Makes a repository of an object store from its URL and the configuration name of R4."""


class ModelRepository:
    """One or several repositories, read afresh at every `scan`."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        config_name: str | None = None,
        namespacing: bool = False,
        open_remote: OpenRemote | None = None,
    ) -> None:
        """`config_name` is `--model-config-name`: `configs/<name>.pbtxt` goes before `config.pbtxt` (R4).

        With `namespacing` each path is a namespace: models of different ones may have the same name (R2).

        Raises `StartupError` when a path is no readable directory, is a URL that cannot be used (R7), or none is given.
        """
        if not paths:
            raise StartupError("no model repository was given; use --model-repository=<directory>")
        if config_name is not None and ("/" in config_name or config_name in ("", ".", "..")):
            raise StartupError(f"the model configuration name '{config_name}' must be a plain file name")
        self._roots: list[Root] = []
        self._namespacing = namespacing
        self._config_name = config_name
        try:
            for path in paths:
                self._roots.append(self._open(path, open_remote))
            for root in self._roots if namespacing else ():
                if not can_be_namespace(root.place):
                    raise StartupError(f"with --model-namespacing the repository '{root.place}' must have another name")
        except BaseException:
            self.close()
            raise

    def _open(self, path: str | Path, open_remote: OpenRemote | None) -> Root:
        if not is_remote(str(path)):
            return LocalRoot(path, self._config_name)
        if open_remote is None:
            raise StartupError(f"remote model repositories cannot be used here: '{path}'")
        return open_remote(str(path), self._config_name)

    def scan(self) -> dict[str, ModelDirectory]:
        """Every model by key. A model found twice has an error (R2); one with a bad configuration has its reason.

        Of a remote one only the fingerprint is sure to be there. Raises `Unavailable` when a repository cannot be
        listed: that is no reason to unload anything.
        """
        found: dict[str, ModelDirectory] = {}
        # all are listed first: what composing models mean depends on where they are
        for root, names in [(root, root.names()) for root in self._roots]:
            for name in names:
                model = self._read(root, name, scanning=True)
                if model.key in found:
                    found[model.key] = replace(model, config=None, error=Unavailable(DUPLICATE_REASON))
                else:
                    found[model.key] = model
        return dict(sorted(found.items()))

    def find(self, key: str) -> ModelDirectory | None:
        """One model, without reading the others; `None` when no repository has it (R20).

        Raises R11's errors, `Unavailable` when a repository that should have it cannot be asked.
        """
        if self._namespacing:
            # a model without a namespace is none of the repositories': it came with a load request (R25)
            known = [root for root in self._places(name_of(key)) if root.place == namespace_of(key)]
        else:
            known = self._places(key)
        if not known:
            return None
        model = self._read(known[0], name_of(key), scanning=False)
        if len(known) > 1:
            return replace(model, config=None, error=Unavailable(DUPLICATE_REASON))
        return model

    def keys(self, name: str) -> list[str]:
        """The keys of all models of a name, ascending; the name alone without namespaces. Raises what `find` does."""
        if not self._namespacing:
            return [name]
        return sorted({model_key(root.place, name) for root in self._places(name)})

    @property
    def has_copies(self) -> bool:
        """Whether models are fetched from somewhere else, so that there are copies to release."""
        return any(not isinstance(root, LocalRoot) for root in self._roots)

    def release(self, key: str, keep: Collection[Path], *, latest: bool) -> None:
        """Remove copies of a remote model that were fetched, but those to `keep` and, if so, the `latest`."""
        for root in self._roots:
            if not self._namespacing or root.place == namespace_of(key):
                root.release(name_of(key), keep, latest=latest)

    def abandon(self) -> None:
        """Break off what is being fetched, and fetch nothing more."""
        for root in self._roots:
            root.abandon()

    @property
    def is_waiting(self) -> bool:
        """Whether some thread waits for a server's answer, as the end of a process would: it cannot be interrupted."""
        return any(root.is_waiting for root in self._roots)

    def close(self) -> None:
        """Give back what is held. Nothing is read afterwards."""
        for root in self._roots:
            root.close()

    def _places(self, name: str) -> list[Root]:
        """The repositories that have a model of this name now."""
        check_model_name(name)
        return [root for root in self._roots if root.look(name)]

    def _read(self, root: Root, name: str, *, scanning: bool) -> ModelDirectory:
        namespace = root.place if self._namespacing else ""
        return self.with_composing_models(root.read(name, namespace=namespace, scanning=scanning))

    def read(self, path: Path, *, name: str) -> ModelDirectory:
        """The model in a directory that does not lie in a repository (R25)."""
        model = model_directory.read(path, name=name, config_name=self._config_name)
        return self.with_composing_models(model)

    def with_composing_models(self, model: ModelDirectory) -> ModelDirectory:
        """An ensemble whose steps say whose namespace their models are of: its own, else the only one that has them.

        What a step says by itself counts for nothing, as in Triton. It is part of the fingerprint: an ensemble is
        another when one of its models appears in its namespace, or leaves it.
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
        """Of which repository a composing model is, "" when that is open or none has it."""
        if not self._namespacing or not name.strip() or "/" in name or "\0" in name:
            return ""
        having = {root.place for root in self._roots if root.has(name)}
        if preferred in having:
            return preferred
        return having.pop() if len(having) == 1 else ""
