"""The copies of one remote repository's models that lie on this machine, for one process.

    <directory>/<repository>-<n>/lock                      held by the process for as long as it lives
    <directory>/<repository>-<n>/<copy>/<model>/...        complete, and never written to again
    <directory>/<repository>-<n>/partial-<copy>/<model>/   being fetched

`<repository>` and `<copy>` are digests: of the URL, and of the names, sizes and stamps of the files in the copy. A
model that changes gets a new copy, which shares what did not change with the last one by hard links, so that what is
served from the old one goes on reading what it was loaded from. A process that comes after one that was killed takes
its directory over, copies included.
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

_AT_ONCE = 4
_TRIES = 3
_MOST_PROCESSES = 1024
_PARTIAL, _GONE = "partial-", "gone-"
_LONGEST_NAME_BYTES = 255

Copy = Callable[[RemoteObject, Sink], None]
"""Writes the content of an object. Raises `RemoteError`, and what the sink does."""


class Copies:
    """`directory` is made when it is not there; None: a part of the system's temporary directory, the user's own.

    `stay`: what is there when the process ends stays for the next one.
    """

    def __init__(self, directory: Path | None, url: str, *, stay: bool) -> None:
        """Raises `StartupError` when the directory cannot be used."""
        self._url = url
        self._stay = stay
        self._abandoned = threading.Event()
        self._locks: dict[str, threading.Lock] = {}
        self._contents: dict[Path, dict[str, tuple[str, int]]] = {}
        """What is in a copy that this process made or took over: stamp and size by file."""
        self._latest: dict[str, Path] = {}
        root = directory or Path(tempfile.gettempdir()) / f"charonia-repositories-{os.getuid()}"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory is None and (root.is_symlink() or root.stat().st_uid != os.getuid()):
                raise StartupError(f"'{root}', for copies of remote models, is somebody else's: set TMPDIR")
            self._root, self._lock = _claim(root, hashlib.blake2b(url.encode(), digest_size=6).hexdigest())
            for left in (*self._root.glob(f"{_PARTIAL}*"), *root.glob(f"{_GONE}*")):
                shutil.rmtree(left, ignore_errors=True)
        except OSError as error:
            raise StartupError(
                f"the directory '{root}', for copies of the models in '{url}', cannot be used: {error.strerror}"
            ) from None

    def fetch(self, model: str, objects: Sequence[RemoteObject], copy: Copy) -> Path:
        """The directory of a model that has these files, named relative to it. Raises `RemoteError`.

        What is here already is not fetched again. Blocks; one fetch of a model at a time.
        """
        with self._locks.setdefault(model, threading.Lock()):
            contents = {found.name: (found.stamp, found.size_bytes) for found in objects if not found.is_directory}
            name = hashlib.blake2b(repr((model, sorted(contents.items()))).encode(), digest_size=12).hexdigest()
            path = self._root / name / model
            # of its own copies files may have been tidied away, or be larger now by what the model writes
            if not _complete(path, contents, sizes=path not in self._contents):
                self._make(path, model, objects, copy)
            self._contents[path] = contents
            self._latest[model] = path
            return path

    def take(self, copy: Copy, found: RemoteObject, file: IO[bytes]) -> None:
        """Write an object into a file: whole, and no more than it was listed with. Raises `RemoteError`."""
        sink = _Measured(file, found, self._abandoned)
        copy(found, sink)
        sink.finish()

    def release(self, model: str, keep: Collection[Path], *, latest: bool) -> None:
        """Remove the copies of a model, but those to `keep` and, if so, the one that was fetched last.

        After `abandon` nothing is done for a model whose fetch still waits for its server: the end does not wait.
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
        """The models of which there are copies."""
        return {path.name for path in self._root.glob("*/*") if path.is_dir()}

    def abandon(self) -> None:
        """Break off what is being fetched, and fetch nothing more."""
        self._abandoned.set()

    def close(self) -> None:
        """Give the directory back."""
        self.abandon()
        if not self._stay:
            # a successor may begin in its place while this goes on
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
            self._check_room(model, sum(found.size_bytes for found in wanted))
            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as pool:
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
        """Whether nothing needs to be fetched: a directory is made, a file that did not change is linked."""
        target = directory / found.name
        if found.is_directory:
            target.mkdir(parents=True, exist_ok=True)
            return True
        target.parent.mkdir(parents=True, exist_ok=True)
        if before is None or self._contents.get(before, {}).get(found.name) != (found.stamp, found.size_bytes):
            return False
        try:
            os.link(before / found.name, target)
        except OSError:  # a file system without links, or somebody tidied up
            return False
        return True

    def _check_room(self, model: str, size_bytes: int) -> None:
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
    """A sink that takes exactly as many bytes as the listing said."""

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
        """Nothing more will come."""
        if self._taken != self._found.size_bytes:
            raise RemoteError(f"{self._found.name!r} ended after {self._taken} of {self._found.size_bytes} bytes")


def is_safe(name: str) -> bool:
    """Whether an object's name can be a file's below a directory, and no place outside of it."""
    try:
        segments = name.encode().split(b"/")
    except UnicodeEncodeError:
        return False
    return "\0" not in name and all(
        segment not in (b"", b".", b"..") and len(segment) <= _LONGEST_NAME_BYTES for segment in segments
    )


def _claim(root: Path, name: str) -> tuple[Path, IO[str]]:
    """The first directory of this repository that no living process has, and its lock."""
    for number in range(_MOST_PROCESSES):
        path = root / f"{name}-{number}"
        path.mkdir(mode=0o700, exist_ok=True)
        lock: IO[str] | None = None
        try:
            lock = (path / "lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # one that ends takes its directory away: this may be the lock of what is gone
            if os.path.samestat((path / "lock").stat(), os.fstat(lock.fileno())):
                return path, lock
        except (BlockingIOError, FileNotFoundError):
            pass
        if lock is not None:
            lock.close()
    raise StartupError(f"too many processes use '{root}' for copies of remote models")


def _complete(path: Path, contents: dict[str, tuple[str, int]], *, sizes: bool) -> bool:
    """Whether all files of a copy are there; with `sizes`, and as long as they were listed."""
    try:
        found = [(path / name).stat().st_size == size or not sizes for name, (_, size) in contents.items()]
        return path.is_dir() and all(found)
    except OSError:
        return False


def _escaped(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
