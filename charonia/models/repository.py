"""Reads model repositories on disk: which models there are, their configurations, versions, labels and fingerprints.

It loads nothing and remembers nothing but file digests. Which version to serve, when to load it and what to tell
clients is for the executor and the gateway; what a configuration may say is `charonia.models.config`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from charonia.errors import CharoniaError, StartupError, Unavailable, Unsupported
from protos.model_config_pb2 import ModelConfig

from . import autofill, pbtxt, versions
from .errors import InstanceError, StructureError
from .files import FileEntry, contained, is_hidden, walk
from .names import can_be_namespace, check_model_name, model_key, name_of, namespace_of

CONFIG_FILE = "config.pbtxt"
CONFIG_DIRECTORY = "configs"
DUPLICATE_REASON = "model appears in two or more repositories"
_REMOTE_SCHEMES = ("s3://", "gs://", "as://")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Changes when files do (R10): `config` and `shared` (labels, warm-up data) for the model, one for each version."""

    config: str
    shared: str
    versions: Mapping[int, str] = field(default_factory=dict)

    def changed_versions(self, before: Fingerprint) -> set[int]:
        """Versions to load again, to load or to unload since `before`: all of them when a shared file changed."""
        if (self.config, self.shared) != (before.config, before.shared):
            return set(self.versions) | set(before.versions)
        either = set(self.versions) | set(before.versions)
        return {version for version in either if self.versions.get(version) != before.versions.get(version)}


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """One model as found: either `config` (name, backend and structure settled, not autofilled) or `error` is set.

    `versions` ascend and are those that exist, before the version policy. An override is in `config` like a file.
    `namespace` is the repository's path where models of one name are told apart by it, else "".
    """

    name: str
    path: Path
    versions: tuple[int, ...]
    fingerprint: Fingerprint
    config: ModelConfig | None = None
    error: CharoniaError | None = None
    namespace: str = ""

    @property
    def key(self) -> str:
        """What the model is known by in the log: its name, with its namespace if it has one."""
        return model_key(self.namespace, self.name)

    def required_config(self) -> ModelConfig:
        """The configuration; raises `error` when there is none."""
        if self.config is None:
            raise self.error or StructureError(f"model '{self.name}' has no configuration")
        return self.config

    def selected_versions(self) -> list[int]:
        """Versions to serve under the policy, ascending (C3, R3). Raises `error` or `InstanceError`."""
        return versions.select(self.required_config().version_policy, self.versions, self.name)

    def with_config(self, config: ModelConfig) -> ModelDirectory:
        """The same files under a load override's complete configuration (R24); a bad one ends up in `error`."""
        try:
            prepared = autofill.prepare(config, self.name, _version_files(self.path, self.versions))
            load_labels(self.path, prepared)
        except CharoniaError as error:
            return replace(self, config=None, error=error)
        digest = hashlib.blake2b(config.SerializeToString(deterministic=True), digest_size=16).hexdigest()
        fingerprint = replace(self.fingerprint, config="override:" + digest)
        return replace(self, config=prepared, error=None, fingerprint=fingerprint)


class ModelRepository:
    """One or several repository directories, read afresh at every `scan`."""

    def __init__(
        self, paths: Sequence[str | Path], *, config_name: str | None = None, namespacing: bool = False
    ) -> None:
        """`config_name` is `--model-config-name`: `configs/<name>.pbtxt` goes before `config.pbtxt` (R4).

        With `namespacing` each path is a namespace: models of different ones may have the same name (R2).

        Raises `StartupError` when a path is no readable directory, is remote (R7), or no path is given.
        """
        if not paths:
            raise StartupError("no model repository was given; use --model-repository=<directory>")
        for path in paths:
            if str(path).startswith(_REMOTE_SCHEMES):
                raise StartupError(f"remote model repositories are not supported yet: '{path}'")
            if not Path(path).is_dir():
                raise StartupError(f"the model repository '{path}' does not exist or is not a directory")
        if config_name is not None and ("/" in config_name or config_name in ("", ".", "..")):
            raise StartupError(f"the model configuration name '{config_name}' must be a plain file name")
        self.paths = tuple(Path(path).absolute() for path in paths)
        for root in self.paths if namespacing else ():
            if not can_be_namespace(str(root)):
                raise StartupError(f"with --model-namespacing the repository '{root}' must have another name")
        self._namespacing = namespacing
        self._config_name = config_name

    def scan(self) -> dict[str, ModelDirectory]:
        """Every model by key. A model found twice has an error (R2); one with a bad configuration has its reason.

        Raises `Unavailable` when a repository directory cannot be listed: that is no reason to unload anything.
        """
        found: dict[str, ModelDirectory] = {}
        for root in self.paths:
            for path in _model_paths(root):
                model = self.read(path, namespace=self._namespace(root))
                if model.key in found:
                    found[model.key] = replace(model, config=None, error=Unavailable(DUPLICATE_REASON))
                else:
                    found[model.key] = model
        return dict(sorted(found.items()))

    def find(self, key: str) -> ModelDirectory | None:
        """One model, without reading the others; `None` when no repository has it (R20). Raises R11's errors."""
        if self._namespacing:
            # a model without a namespace is none of the repositories': it came with a load request (R25)
            known = [root for root in self._places(name_of(key)) if str(root) == namespace_of(key)]
        else:
            known = self._places(key)
        if not known:
            return None
        model = self.read(known[0] / name_of(key), namespace=self._namespace(known[0]))
        if len(known) > 1:
            return replace(model, config=None, error=Unavailable(DUPLICATE_REASON))
        return model

    def keys(self, name: str) -> list[str]:
        """The keys of all models of a name, ascending; the name alone without namespaces. Raises R11's errors."""
        if not self._namespacing:
            return [name]
        return sorted({model_key(str(root), name) for root in self._places(name)})

    def _places(self, name: str) -> list[Path]:
        """The repositories that have a model of this name."""
        check_model_name(name)
        try:
            return [root for root in self.paths if (root / name).is_dir() and not is_hidden(name)]
        except OSError:  # a name longer than the file system takes
            return []

    def _namespace(self, root: Path) -> str:
        return str(root) if self._namespacing else ""

    def read(self, path: Path, *, name: str | None = None, namespace: str = "") -> ModelDirectory:
        """The model in a directory, which need not lie in a repository (R25); `name` if it is not the directory's."""
        name = name or path.name
        existing = _versions(path)
        skip = frozenset({*map(str, existing), CONFIG_FILE, CONFIG_DIRECTORY})
        config_path = self._config_path(path)
        fingerprint = Fingerprint(
            config=_stamp_of_file(config_path),
            shared=_stamp(walk(path, skip_top=skip)),
            versions={version: _stamp(walk(path / str(version))) for version in existing},
        )
        try:
            config = autofill.prepare(_written_config(config_path), name, _version_files(path, existing))
            load_labels(path, config)
        except CharoniaError as error:
            return ModelDirectory(name, path, existing, fingerprint, error=error, namespace=namespace)
        model = ModelDirectory(name, path, existing, fingerprint, config=config, namespace=namespace)
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
        having = {str(root) for root in self._places(name)}
        if preferred in having:
            return preferred
        return having.pop() if len(having) == 1 else ""

    def _config_path(self, path: Path) -> Path:
        if self._config_name is not None:
            chosen = path / CONFIG_DIRECTORY / f"{self._config_name}.pbtxt"
            if chosen.is_file():
                return chosen
        return path / CONFIG_FILE


def load_labels(directory: Path, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Output name to its labels, one for each line of the label file (C6).

    Raises `Unsupported` for a file outside the model directory, `InstanceError` for one that cannot be read.
    """
    labels: dict[str, tuple[str, ...]] = {}
    for output in config.output:
        if not output.label_filename:
            continue
        path = contained(directory, output.label_filename)
        if path is None:
            raise Unsupported(
                f"label file path '{output.label_filename}' for output '{output.name}' in model '{config.name}' is "
                "outside model directory"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InstanceError(
                f"unable to read label file '{output.label_filename}' for output '{output.name}' in model "
                f"'{config.name}': {error}"
            ) from error
        labels[output.name] = tuple(line.rstrip("\r") for line in text.removesuffix("\n").split("\n"))
    return labels


def content_hash(directory: Path, version: int, config: ModelConfig) -> str:
    """What a version is made of, equal on every machine that has the same files and configuration (32 hex digits).

    Covers the normalised configuration, the version's files and the model's shared ones. Instance groups are left out:
    they say where a model runs, and differ rightly between machines with and without accelerators.
    """
    bare = ModelConfig()
    bare.CopyFrom(config)
    bare.ClearField("instance_group")
    digest = hashlib.blake2b(bare.SerializeToString(deterministic=True), digest_size=16)
    skip = frozenset({*map(str, _versions(directory)), CONFIG_FILE, CONFIG_DIRECTORY})
    for scope, entries in (
        ("shared", walk(directory, skip_top=skip)),
        ("version", walk(directory / str(version))),
    ):
        for entry in entries:
            # Lengths and separators keep two different trees from spelling the same bytes.
            digest.update(f"\0{scope}\0{entry.relative}\0{entry.size_bytes}\0".encode())
            digest.update(_file_digest(entry))
    return digest.hexdigest()


# Path -> (size, mtime, inode) and digest: large model files are read once, not at every poll.
_DIGESTS: dict[Path, tuple[tuple[int, int, int], bytes]] = {}


def _file_digest(entry: FileEntry) -> bytes:
    stamp = (entry.size_bytes, entry.modified_ns, entry.inode)
    cached = _DIGESTS.get(entry.path)
    if cached is not None and cached[0] == stamp:
        return cached[1]
    digest = _read_digest(entry.path)
    _DIGESTS[entry.path] = (stamp, digest)
    return digest


def _read_digest(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def _model_paths(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and not is_hidden(path.name))
    except OSError as error:
        raise Unavailable(f"failed to poll model repository '{root}': {error.strerror or error}") from error


def _versions(path: Path) -> tuple[int, ...]:
    """R1: version directories, ascending."""
    try:
        found = [(versions.version_of(entry.name), entry) for entry in path.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(sorted(version for version, entry in found if version is not None and entry.is_dir()))


def _version_files(path: Path, existing: tuple[int, ...]) -> list[str]:
    """Entries of the highest version that is not empty: they give the backend away (R5)."""
    for version in reversed(existing):
        try:
            names = sorted(entry.name for entry in (path / str(version)).iterdir() if not is_hidden(entry.name))
        except (FileNotFoundError, NotADirectoryError):
            continue
        if names:
            return names
    return []


def _written_config(path: Path) -> ModelConfig:
    """The parsed file; a missing one is an empty configuration (C73). Raises `StructureError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ModelConfig()
    except (OSError, UnicodeDecodeError) as error:
        raise StructureError(f"unable to read '{path.name}': {error}") from error
    try:
        return pbtxt.parse(text)
    except StructureError as error:
        raise StructureError(f"{path.name}:{error.message}") from error


def _stamp_of_file(path: Path) -> str:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    return _stamp([FileEntry(path.name, path, status.st_size, status.st_mtime_ns, status.st_ino)])


def _stamp(entries: list[FileEntry]) -> str:
    """Names, sizes and modification times of files, condensed. Never reads them (R10)."""
    digest = hashlib.blake2b(digest_size=16)
    for entry in entries:
        digest.update(f"{entry.relative}\0{entry.size_bytes}\0{entry.modified_ns}\0{entry.inode}\n".encode())
    return digest.hexdigest()
