"""One process's local copies of a remote repository's models.

    <directory>/<repository>-<n>/lock                      held by the process while it lives
    <directory>/<repository>-<n>/<copy>/<model>/...        complete, and never changed again
    <directory>/<repository>-<n>/partial-<copy>/<model>/   being fetched

`<repository>` is a digest of the URL, `<copy>` one of the files' names, sizes and stamps. A changed model gets a new
copy, with hard links to unchanged files of the last one, so that served versions keep the files they were loaded from.
A new process takes over the directory, with its copies, of a process that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from charonia.errors import StartupError

from .store import ObjectChanged, RemoteError, RemoteObject, Sink

_log = logging.getLogger(__name__)

_MAX_CONCURRENT = 4
_TRIES = 3
_MAX_PROCESSES = 1024
_PARTIAL, _GONE = "partial-", "gone-"
_MAX_NAME_BYTES = 255

Copy = Callable[[RemoteObject, Sink], None]
"""Writes the content of an object to a sink. Raises `RemoteError`, and what the sink raises."""


class Copies:
    """Makes and removes local copies. `directory` is created if missing; None: the user's own one below the system's
    temporary directory. `stay`: copies stay for the next process.
    """

    def __init__(self, directory: Path | None, url: str, *, stay: bool) -> None:
        """Raise `StartupError` when the directory cannot be used."""
        self._url = url
        self._stay = stay
        self._abandoned = threading.Event()
        self._locks: dict[str, threading.Lock] = {}
        self._contents: dict[Path, dict[str, tuple[str, int]]] = {}
        """By copy that this process made or took over: stamp and size by file."""
        self._latest: dict[str, Path] = {}
        root = directory or Path(tempfile.gettempdir()) / f"charonia-repositories-{os.getuid()}"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory is None and (root.is_symlink() or root.stat().st_uid != os.getuid()):
                raise StartupError(f"'{root}', for copies of remote models, belongs to another user: set TMPDIR")
            self._root, self._lock = _claim(root, hashlib.blake2b(url.encode(), digest_size=6).hexdigest())
            for left in (*self._root.glob(f"{_PARTIAL}*"), *root.glob(f"{_GONE}*")):
                shutil.rmtree(left, ignore_errors=True)
        except OSError as error:
            raise StartupError(
                f"the directory '{root}', for copies of the models in '{url}', cannot be used: {error.strerror}"
            ) from None

    def fetch(self, model: str, objects: Sequence[RemoteObject], copy: Copy) -> Path:
        """Return a directory of the model with these files, whose names are relative to it. Raises `RemoteError`.

        Existing files are not fetched again. Blocks; one fetch of a model runs at a time.
        """
        with self._locks.setdefault(model, threading.Lock()):
            contents = {found.name: (found.stamp, found.size_bytes) for found in objects if not found.is_directory}
            name = hashlib.blake2b(repr((model, sorted(contents.items()))).encode(), digest_size=12).hexdigest()
            path = self._root / name / model
            # in its own copies, files may have been removed by the system, or changed in size by the model
            if not _complete(path, contents, sizes=path not in self._contents):
                self._make(path, model, objects, copy)
            self._contents[path] = contents
            self._latest[model] = path
            return path

    def take(self, copy: Copy, found: RemoteObject, file: IO[bytes]) -> None:
        """Write an object to a file, and check that it has its listed size. Raises `RemoteError`."""
        sink = _Measured(file, found, self._abandoned)
        copy(found, sink)
        sink.finish()

    def release(self, model: str, keep: Collection[Path], *, latest: bool) -> None:
        """Remove the copies of a model, except those in `keep` and, with `latest`, the last one fetched.

        After `abandon`, does nothing for a model whose fetch still waits for its server, so as not to delay the end.
        """
        lock = self._locks.setdefault(model, threading.Lock())
        if not lock.acquire(blocking=not self._abandoned.is_set()):
            return
        try:
            if not latest:
                self._latest.pop(model, None)
            for path in self._root.glob(f"*/{_escaped(model)}"):
                if path not in keep and path != self._latest.get(model) and not path.parent.name.startswith(_PARTIAL):
                    self._contents.pop(path, None)
                    shutil.rmtree(path.parent, ignore_errors=True)
        finally:
            lock.release()

    def models(self) -> set[str]:
        """The models that have copies."""
        return {path.name for path in self._root.glob("*/*") if path.is_dir()}

    def abandon(self) -> None:
        """Cancel fetches in progress, and fetch nothing more."""
        self._abandoned.set()

    def close(self) -> None:
        """Release the directory, and remove it unless copies stay."""
        self.abandon()
        if not self._stay:
            # a successor may use its name while this is being removed
            gone = self._root.with_name(f"{_GONE}{os.getpid()}-{self._root.name}")
            with contextlib.suppress(OSError):
                self._root.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        self._lock.close()

    # -- making a copy ------------------------------------------------------------------------------------------------

    def _make(self, path: Path, model: str, objects: Sequence[RemoteObject], copy: Copy) -> None:
        partial = self._root / f"{_PARTIAL}{path.parent.name}"
        before = self._latest.get(model)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / model).mkdir(parents=True)
            wanted = [found for found in objects if not self._link(partial / model, before, found)]
            self._check_free_space(model, sum(found.size_bytes for found in wanted))
            with ThreadPoolExecutor(_MAX_CONCURRENT, thread_name_prefix="fetch") as pool:
                list(pool.map(lambda found: self._copy(copy, found, partial / model / found.name), wanted))
            shutil.rmtree(path.parent, ignore_errors=True)
            partial.rename(path.parent)
        except OSError as error:
            what = error.strerror or type(error).__name__
            raise RemoteError(
                f"model '{model}' of '{self._url}' cannot be copied to '{self._root}': {what} ({error.filename})"
            ) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _log.info(
            "fetched %d of %d files of model %s, %d bytes, from %s",
            len(wanted),
            len(objects),
            model,
            sum(found.size_bytes for found in wanted),
            self._url,
        )

    def _link(self, directory: Path, before: Path | None, found: RemoteObject) -> bool:
        """Make a directory, or link an unchanged file; return False when the file must be fetched."""
        target = directory / found.name
        if found.is_directory:
            target.mkdir(parents=True, exist_ok=True)
            return True
        target.parent.mkdir(parents=True, exist_ok=True)
        if before is None or self._contents.get(before, {}).get(found.name) != (found.stamp, found.size_bytes):
            return False
        try:
            os.link(before / found.name, target)
        except OSError:  # a file system without links, or a file that was removed
            return False
        return True

    def _check_free_space(self, model: str, size_bytes: int) -> None:
        free = shutil.disk_usage(self._root).free
        if size_bytes > free:
            raise RemoteError(
                f"model '{model}' of '{self._url}' needs {size_bytes} bytes, '{self._root}' has {free} free"
            )

    def _copy(self, copy: Copy, found: RemoteObject, target: Path) -> None:
        for attempt in range(1, _TRIES + 1):
            try:
                with target.open("wb") as file:
                    self.take(copy, found, file)
                    file.flush()
                    os.fsync(file.fileno())
                return
            except ObjectChanged:
                raise
            except RemoteError as error:
                if attempt == _TRIES or self._abandoned.is_set():
                    raise
                _log.warning("fetching %r, try %d: %s", found.name, attempt, error)


class _Measured:
    """A sink that accepts exactly the listed number of bytes."""

    def __init__(self, file: IO[bytes], found: RemoteObject, abandoned: threading.Event) -> None:
        self._file = file
        self._found = found
        self._abandoned = abandoned
        self._taken = 0

    def write(self, data: bytes, /) -> int:
        if self._abandoned.is_set():
            raise RemoteError(f"fetching {self._found.name!r} was broken off")
        self._taken += len(data)
        if self._taken > self._found.size_bytes:
            raise ObjectChanged(
                f"{self._found.name!r} is larger than the {self._found.size_bytes} bytes it was listed with"
            )
        self._file.write(data)
        return len(data)

    def finish(self) -> None:
        """Check that all bytes were written. Raises `RemoteError`."""
        if self._taken != self._found.size_bytes:
            raise RemoteError(f"{self._found.name!r} ended after {self._taken} of {self._found.size_bytes} bytes")


def is_safe(name: str) -> bool:
    """Whether an object's name is a valid relative path that stays below a directory."""
    try:
        segments = name.encode().split(b"/")
    except UnicodeEncodeError:
        return False
    return "\0" not in name and all(
        segment not in (b"", b".", b"..") and len(segment) <= _MAX_NAME_BYTES for segment in segments
    )


def _claim(root: Path, name: str) -> tuple[Path, IO[str]]:
    """Claim the first directory of this repository that no living process holds; return it and its lock."""
    for number in range(_MAX_PROCESSES):
        path = root / f"{name}-{number}"
        path.mkdir(mode=0o700, exist_ok=True)
        lock: IO[str] | None = None
        try:
            lock = (path / "lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a process that ends removes its directory: this lock file may be deleted already
            if os.path.samestat((path / "lock").stat(), os.fstat(lock.fileno())):
                return path, lock
        except (BlockingIOError, FileNotFoundError):
            pass
        if lock is not None:
            lock.close()
    raise StartupError(f"too many processes use '{root}' for copies of remote models")


def _complete(path: Path, contents: dict[str, tuple[str, int]], *, sizes: bool) -> bool:
    """Whether all files of a copy exist; with `sizes`, with their listed sizes."""
    try:
        found = [(path / name).stat().st_size == size or not sizes for name, (_, size) in contents.items()]
        return path.is_dir() and all(found)
    except OSError:
        return False


def _escaped(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
