"""Finds and unpacks a model's python environment (EXECUTION_ENV_PATH), and makes the command to start a process in it
(P18).

A directory is used as it is. An archive is unpacked once per content into the cache directory, by the first process
that needs it, and stays there: with limits, never outside its directory, and links last, so that nothing is written
through one. Targets of links are not restricted: the `python` of a virtual environment is a link to the machine's
interpreter.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from charonia.backend import ModelSource
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from executors.repository.files import entry_of
from executors.repository.model_directory import file_digest

ENVIRONMENT = "EXECUTION_ENV_PATH"
MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
CACHE_DIRECTORY = "environment-cache-dir"
"""The backend setting for where archives are unpacked. `serve` sets it to a directory in its state directory."""

_ENTRY = Path(__file__).with_name("environment_entry.py")
_OURS = ("executors", "charonia")
_BORROWED = ("msgpack", "numpy")
_RELOCATE_S = 300.0
_CHUNK_BYTES = 1 << 20
_MODE = 0o755


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The command that starts model processes, without their own arguments, and their environment (None: ours)."""

    command: tuple[str, ...]
    environment: Mapping[str, str] | None = None


def own_interpreter() -> Interpreter:
    """The server's interpreter; -P keeps the working directory out of the import path."""
    return Interpreter((sys.executable, "-P", "-m", "executors.backends.python.stub.model_process"))


def environment_path(source: ModelSource) -> Path | None:
    """The path of the model's environment; None when it uses the server's. Raises `InvalidArgument`."""
    parameters = source.config.parameters
    text = parameters[ENVIRONMENT].string_value if ENVIRONMENT in parameters else ""
    if not text:
        return None
    path = Path(text.replace(MODEL_DIRECTORY, str(source.directory.absolute())))
    if not path.is_absolute():
        raise InvalidArgument(
            f"{ENVIRONMENT} of model '{source.name}' must be an absolute path or begin with {MODEL_DIRECTORY}, got "
            f"'{text}'"
        )
    if not path.exists():
        raise InvalidArgument(f"Failed to get the canonical path for {path}.")
    return path


def interpreter(source: ModelSource) -> Interpreter:
    """Return the interpreter for a model's processes. Blocks while an archive is unpacked.

    Raises `InvalidArgument` for an unusable environment, `InternalError` for one that cannot be unpacked.
    """
    found = environment_python(source)
    return own_interpreter() if found is None else _of(*found)


def environment_python(source: ModelSource) -> tuple[Path, Path] | None:
    """The root of a model's environment and the python in it; None without one. Blocks and raises as `interpreter`."""
    path = environment_path(source)
    if path is None:
        return None
    root = path if path.is_dir() else _unpacked(path, _cache_directory(source))
    for directory in (root, *_only_child(root)):
        python = directory / "bin" / "python"
        if python.exists():
            return directory, python
    raise InvalidArgument(
        f"{ENVIRONMENT} of model '{source.name}': '{path}' holds no python environment: there is no bin/python"
    )


def _of(root: Path, python: Path) -> Interpreter:
    """An environment's interpreter. -I ignores PYTHON... variables, the user's packages and the working directory."""
    environment = environment_variables(root, os.environ)
    return Interpreter((str(python), "-I", "-B", str(_ENTRY), _packages()), environment)


def environment_variables(root: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for processes in the environment at `root`."""
    kept = {key: value for key, value in variables.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    kept["PATH"] = f"{root / 'bin'}{os.pathsep}{kept.get('PATH', os.defpath)}"
    kept["CONDA_PREFIX" if (root / "conda-meta").is_dir() else "VIRTUAL_ENV"] = str(root)
    return kept


def _packages() -> str:
    """The argument PACKAGES of `environment_entry`: the paths of our packages, and of those that may be borrowed."""
    ours = {name: _parent(name) for name in _OURS}
    borrowed = {name: _parent(name) for name in _BORROWED}
    return json.dumps({"ours": ours, "borrowed": borrowed, "version": list(sys.version_info[:2])})


def _parent(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InternalError(f"package '{package}' cannot be found")
    return str(Path(next(iter(spec.submodule_search_locations))).absolute().parent)


def _only_child(root: Path) -> list[Path]:
    children = [child for child in root.iterdir() if child.is_dir()]
    return children if len(children) == 1 else []


# -- archives ----------------------------------------------------------------------------------------------------------


def _cache_directory(source: ModelSource) -> Path:
    """The cache directory, accessible only to this user: its content is executed."""
    configured = source.backend_config.get(CACHE_DIRECTORY, "")
    path = Path(configured or Path(tempfile.gettempdir()) / f"charonia-environments-{os.getuid()}").absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise InternalError(f"the directory for unpacked environments cannot be made: {error}") from None
    if status.st_uid != os.getuid() or path.is_symlink() or status.st_mode & 0o022:
        raise InternalError(f"the directory for unpacked environments '{path}' can be written by others")
    return path


def _unpacked(archive: Path, cache: Path) -> Path:
    """Return the archive's directory, unpacked now or earlier."""
    try:
        # named by content: the path of a remote model's archive changes with each version of the copy
        root = cache / file_digest(entry_of(archive.resolve())).hex()
        with root.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            ready = root.with_suffix(".ready")
            if not ready.exists() or not root.is_dir():
                shutil.rmtree(root, ignore_errors=True)  # the process that began it was killed
                unpack(archive, root)
                _relocate(root)
                ready.touch()
        return root
    except OSError as error:
        raise InternalError(f"the environment '{archive}' cannot be unpacked: {error}") from None


def _relocate(root: Path) -> None:
    """Run conda-unpack, which adjusts paths in the files of an environment that conda-pack has made."""
    for directory in (root, *_only_child(root)):
        script = directory / "bin" / "conda-unpack"
        python = directory / "bin" / "python"
        if script.is_file() and python.exists():
            try:
                done = subprocess.run(
                    [python, "-I", script], capture_output=True, text=True, timeout=_RELOCATE_S, check=False
                )
                failure = done.stderr.strip() if done.returncode else ""
            except subprocess.TimeoutExpired:
                failure = f"it took longer than {_RELOCATE_S:g} s"
            if failure:
                shutil.rmtree(root, ignore_errors=True)
                raise InvalidArgument(f"conda-unpack of the environment failed: {failure}")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of an unpacked archive."""

    files: int = 1_000_000
    size_bytes: int = 64 << 30


def unpack(archive: Path, into: Path, bounds: Bounds | None = None) -> None:
    """Unpack a tar archive, compressed or not, into a new directory. Blocks.

    Raises `InvalidArgument`, and leaves nothing, for an archive that cannot be read, is too large, or has members
    outside. Raises `OSError` when the disk is full.
    """
    bounds = bounds or Bounds()
    into.mkdir(parents=True)
    try:
        with tarfile.open(archive, "r|*") as tar:
            links = _write_files(archive, tar, into, bounds)
        for name, target in links:
            path = _place(archive, into, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_symlink() and not path.exists():
                path.symlink_to(target)
    except (tarfile.TarError, EOFError, ValueError) as error:
        shutil.rmtree(into, ignore_errors=True)
        raise InvalidArgument(f"'{archive}' is not a readable archive: {error}") from None
    except (CharoniaError, OSError):
        shutil.rmtree(into, ignore_errors=True)
        raise


def _write_files(archive: Path, tar: tarfile.TarFile, into: Path, bounds: Bounds) -> list[tuple[str, str]]:
    """Write directories, files and hard links; return the symbolic links to make."""
    links: list[tuple[str, str]] = []
    size_bytes = 0
    for count, member in enumerate(_members(archive, tar), start=1):
        size_bytes += member.size
        if count > bounds.files or size_bytes > bounds.size_bytes:
            raise InvalidArgument(
                f"'{archive}' is too large to be unpacked: at most {bounds.files} files of {bounds.size_bytes} bytes "
                "in all"
            )
        if member.issym():
            links.append((member.name, member.linkname))
            continue
        path = _place(archive, into, member.name)
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if member.islnk():
            os.link(_place(archive, into, member.linkname), path)
            continue
        source = tar.extractfile(member)
        if source is None:
            raise InvalidArgument(f"'{archive}' holds '{member.name}' without content")
        with source, path.open("xb") as file:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)
        path.chmod(member.mode & _MODE | 0o600)
    return links


def _members(archive: Path, tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()) or member.issparse():
            raise InvalidArgument(f"'{archive}' holds '{member.name}', which is no file, directory or link")
        yield member


def _place(archive: Path, into: Path, name: str) -> Path:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\0" in name:
        raise InvalidArgument(f"'{archive}' holds '{name}', which is outside of it")
    return into / parts
