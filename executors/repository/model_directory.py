"""A model's directory: its configuration, versions and labels, and a fingerprint that changes when its files do.

Nothing is loaded, and only file digests are cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from charonia.errors import CharoniaError, InternalError, Unsupported
from charonia.models.config_errors import InstanceError, StructureError
from charonia.models.config_forms import parse
from charonia.models.names import model_key
from executors.configuration import autofill
from protos.model_config_pb2 import ModelConfig, ModelVersionPolicy

from .files import FileEntry, contained, entry_of, is_hidden, read_file, walk

CONFIG_FILE = "config.pbtxt"
CONFIG_DIRECTORY = "configs"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Changes when files do (R10): `config`, `shared` (labels, warm-up data), and one stamp per version."""

    config: str
    shared: str
    versions: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """One model of a repository. Either `config` (checked structure, with a backend, not autofilled) or `error` is set.

    `versions` are those that exist, ascending, before the version policy. An override is in `config` like a file.
    `namespace` is the repository's path with namespacing, else "". `entries` are the files of the highest version that
    is not empty: they identify the backend (R5). For a remote model, `fetch` copies the files of the given versions to
    this machine and returns the directory: use `with_files`.
    """

    name: str
    path: Path
    versions: tuple[int, ...]
    fingerprint: Fingerprint
    config: ModelConfig | None = None
    error: CharoniaError | None = None
    namespace: str = ""
    entries: tuple[str, ...] = ()
    repository: str = ""
    """The path or URL of its repository as it was given; "" for one that came with a load request."""
    fetch: Callable[[Collection[int]], Path] | None = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> str:
        """The model's key in the log: its name, with its namespace if it has one."""
        return model_key(self.namespace, self.name)

    def required_config(self) -> ModelConfig:
        """Return the configuration. Raises `error` when there is none."""
        if self.config is None:
            raise self.error or StructureError(f"model '{self.name}' has no configuration")
        return self.config

    def selected_versions(self) -> list[int]:
        """The versions that the version policy selects, ascending (C3, R3). Raises `error` or `InstanceError`."""
        return select(self.required_config().version_policy, self.versions, self.name)

    def with_config(self, config: ModelConfig) -> ModelDirectory:
        """Return the same files with a load override's complete configuration (R24); a bad one sets `error`."""
        try:
            prepared = autofill.prepare(config, self.name, self.entries)
            if self.fetch is None:
                load_labels(self.path, prepared)
        except CharoniaError as error:
            return replace(self, config=None, error=error)
        digest = hashlib.blake2b(config.SerializeToString(deterministic=True), digest_size=16).hexdigest()
        fingerprint = replace(self.fingerprint, config="override:" + digest)
        return replace(self, config=prepared, error=None, fingerprint=fingerprint)

    def with_files(self, wanted: Collection[int]) -> ModelDirectory:
        """Fetch the files of these versions, and shared ones, into `path` (R7). Blocks.

        Raises `Unavailable` when they cannot be fetched.
        """
        if self.fetch is None:
            return self
        here = replace(self, path=self.fetch(wanted), fetch=None)
        try:
            load_labels(here.path, self.required_config())
        except CharoniaError as error:
            return replace(here, config=None, error=error)
        return here


def read(path: Path, *, name: str | None = None, namespace: str = "", config_name: str | None = None) -> ModelDirectory:
    """Read a local model directory. `name` defaults to the directory's name; `config_name` as in R4.

    A model of another name has it in the place of that in its configuration.
    """
    name = name or path.name
    existing = _versions(path)
    config_path = path / CONFIG_FILE
    if config_name is not None and (chosen := path / CONFIG_DIRECTORY / f"{config_name}.pbtxt").is_file():
        config_path = chosen
    found = ModelDirectory(
        name,
        path,
        existing,
        Fingerprint(
            config=_stamp_of_file(config_path),
            shared=_stamp(walk(path, skip_top=_not_shared(existing))),
            versions={version: _stamp(walk(path / str(version))) for version in existing},
        ),
        namespace=namespace,
        entries=tuple(_version_files(path, existing)),
    )
    try:
        written = written_config(config_path)
        if name != path.name:
            written.ClearField("name")
        config = autofill.prepare(written, name, found.entries)
        load_labels(path, config)
    except CharoniaError as error:
        return replace(found, error=error)
    return replace(found, config=config)


def load_labels(directory: Path, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the labels by output name, one per line of the label file (C6).

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
            text = read_file(path).decode().replace("\r\n", "\n").replace("\r", "\n")
        except OSError as error:
            raise InternalError(f"failed to open text file for read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InstanceError(
                f"unable to read label file '{output.label_filename}' for output '{output.name}' in model "
                f"'{config.name}': {error}"
            ) from error
        labels[output.name] = tuple(text.removesuffix("\n").split("\n"))
    return labels


def content_hash(directory: Path, version: int, config: ModelConfig) -> str:
    """Return a hash of a version's content, 32 hex digits, equal on all machines with the same files and configuration.

    It covers the normalised configuration, the version's files and the model's shared ones. Instance groups are left
    out, as they may differ between machines with and without accelerators.
    """
    bare = ModelConfig()
    bare.CopyFrom(config)
    bare.ClearField("instance_group")
    digest = hashlib.blake2b(bare.SerializeToString(deterministic=True), digest_size=16)
    skip = _not_shared(_versions(directory))
    for scope, entries in (("shared", walk(directory, skip_top=skip)), ("version", walk(directory / str(version)))):
        for entry in entries:
            # lengths and separators make the encoding unambiguous
            digest.update(f"\0{scope}\0{entry.relative}\0{entry.size_bytes}\0".encode())
            digest.update(file_digest(entry))
    return digest.hexdigest()


# path -> (size, mtime, inode) and digest: large model files are read once, not at every poll
_DIGESTS: dict[Path, tuple[tuple[int, int, int], bytes]] = {}
_MAX_DIGESTS = 100_000


def file_digest(entry: FileEntry) -> bytes:
    """Return the digest of a file's content, cached while its size, time and inode stay the same."""
    stamp = (entry.size_bytes, entry.modified_ns, entry.inode)
    cached = _DIGESTS.get(entry.path)
    if cached is not None and cached[0] == stamp:
        return cached[1]
    digest = _read_digest(entry.path)
    if len(_DIGESTS) >= _MAX_DIGESTS:
        _DIGESTS.clear()
    _DIGESTS[entry.path] = (stamp, digest)
    return digest


def _read_digest(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def _versions(path: Path) -> tuple[int, ...]:
    """The versions that have a directory (R1), ascending."""
    try:
        found = [(version_of(entry.name), entry) for entry in path.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(sorted(version for version, entry in found if version is not None and entry.is_dir()))


def _version_files(path: Path, existing: tuple[int, ...]) -> list[str]:
    """Entries of the highest version that is not empty: they identify the backend (R5)."""
    for version in reversed(existing):
        try:
            names = sorted(entry.name for entry in (path / str(version)).iterdir() if not is_hidden(entry.name))
        except (FileNotFoundError, NotADirectoryError):
            continue
        if names:
            return names
    return []


MAX_CONFIG_BYTES = 64 << 20
"""Protobuf's text format takes a hundred times as much memory; labels and weights have files of their own."""


def written_config(path: Path) -> ModelConfig:
    """Parse the configuration file; a missing one is an empty configuration (C73). Raises `StructureError`."""
    try:
        content = read_file(path, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        return ModelConfig()
    except OSError as error:
        raise StructureError(f"unable to read '{path.name}': {error}") from error
    return parse_config(path.name, content)


def parse_config(file_name: str, content: bytes) -> ModelConfig:
    """Parse a configuration file's content. Raises `StructureError`."""
    try:
        return parse(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise StructureError(f"unable to read '{file_name}': {error}") from error
    except StructureError as error:
        raise StructureError(f"{file_name}:{error.message}") from error


def _stamp_of_file(path: Path) -> str:
    try:
        return _stamp([entry_of(path)])
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:  # a link to itself; reading the file says so
        return f"unreadable: {error.errno}"


def _stamp(entries: list[FileEntry]) -> str:
    """A digest of files' names, sizes and modification times. Never reads the files (R10)."""
    return digest_of(f"{e.relative}\0{e.size_bytes}\0{e.modified_ns}\0{e.inode}" for e in entries)


def digest_of(lines: Iterable[str]) -> str:
    """A digest of lines, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for line in lines:
        digest.update(f"{line}\n".encode("utf-8", "surrogatepass"))  # names need not be text
    return digest.hexdigest()


def _not_shared(existing: Iterable[int]) -> frozenset[str]:
    """Entries of a model directory that are not shared by all versions."""
    return frozenset({*map(str, existing), CONFIG_FILE, CONFIG_DIRECTORY})


# versions are signed 64-bit integers in the protocol: clients cannot name larger ones
_MAX_VERSION = 2**63 - 1


def version_of(directory_name: str) -> int | None:
    """The version of a directory name: ASCII digits, above 0, no leading zero; None for any other name."""
    if not (directory_name.isascii() and directory_name.isdigit()) or directory_name.startswith("0"):
        return None
    if len(directory_name) > len(str(_MAX_VERSION)):
        return None
    version = int(directory_name)
    return version if version <= _MAX_VERSION else None


def select(policy: ModelVersionPolicy, available: Iterable[int], model_name: str) -> list[int]:
    """Return the existing versions that the policy selects, ascending. An unset policy selects the latest (C3).

    Raises `InstanceError` when it selects none.
    """
    existing = sorted(set(available))
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        chosen = existing
    elif choice == "specific":
        wanted = set(policy.specific.versions)
        chosen = [version for version in existing if version in wanted]
    else:
        count = 1 if choice is None else policy.latest.num_versions
        chosen = existing[-count:] if count > 0 else []
    if not chosen:
        raise InstanceError(f"at least one version must be available under the version policy of model '{model_name}'")
    return chosen
