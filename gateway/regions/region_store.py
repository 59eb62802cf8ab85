"""The regions registered on this machine, in a directory that its gateways share (H46-H48).

A region is a directory `<root>/<digest of its tenant and name>/`: `about.json` describes it, and `memory` is a hard
link to its object, so that every gateway opens the same object even if its key is reused. A rename adds or removes a
region, so that one of two gateways that register the same name is refused, without a lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from charonia.errors import AlreadyExists, InternalError, ResourceExhausted
from charonia.eventlog.payloads import REGIONS

HANDLE_BYTES = 64
"""The size of a handle of GPU memory."""
MAX_REGIONS = 4096
"""Max regions of one machine."""
_ABOUT = "about.json"
_MEMORY = "memory"
_UNFINISHED = "."
_UNFINISHED_S = 60.0
"""Unfinished registrations of a gateway that died are removed at this age."""
_MEMORY_ROOT = "/dev/shm"
_MOST_KNOWN = 4096
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Links are not followed, and a pipe of that name does not block."""

RegionKind = Literal["system", "cuda"]
Stamp = tuple[int, int]
"""Differs for every registration."""


@dataclass(frozen=True, slots=True)
class Region:
    """A registered region; `device` and `inode` identify the object of a system region.

    The `key` of a GPU region is the handle of its memory, in base64.
    """

    name: str
    kind: RegionKind
    size_bytes: int
    key: str = ""
    offset: int = 0
    device: int = 0
    inode: int = 0
    device_id: int = 0


def open_object(key: str) -> int:
    """A descriptor of the shared memory object with this key, as shm_open(3) returns it. Raises `InternalError`."""
    name = key.lstrip("/")
    try:
        if not name or "/" in name or "\0" in name:
            raise FileNotFoundError(name)
        return os.open(f"{_MEMORY_ROOT}/{name}", _FLAGS)
    except (OSError, UnicodeError):
        raise InternalError(f"Unable to open shared memory region: '{key}'") from None


class RegionStore:
    """The regions of one machine; with `directory` "" of this process alone.

    `find` costs one system call, `all` one for each region.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._root: Path | None = None
        self._is_own = False
        self._known: dict[str, tuple[Stamp, str, Region]] = {}

    def close(self) -> None:
        if self._is_own and self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    def add(self, tenant: str, region: Region, descriptor: int | None = None) -> None:
        """Register a region; `descriptor` is that of a system region's object.

        Raises `AlreadyExists`, `ResourceExhausted`, and `InternalError` if the directory cannot be written.
        """
        root = self._made()
        unfinished = root / f"{_UNFINISHED}{secrets.token_hex(8)}"
        try:
            if len(os.listdir(root)) >= MAX_REGIONS:
                raise ResourceExhausted(f"at most {MAX_REGIONS} shared memory regions can be registered")
            unfinished.mkdir(mode=0o700)
            if descriptor is not None:
                with contextlib.suppress(OSError):  # on another file system: then it is opened by its key
                    # with a descriptor Python calls linkat(2), which follows; link(2) would link to the symbolic link
                    os.link(f"/proc/self/fd/{descriptor}", unfinished / _MEMORY, src_dir_fd=descriptor)
            (unfinished / _ABOUT).write_text(json.dumps({"tenant": tenant, **asdict(region)}))
            target = self._path(tenant, region.name)
            try:
                unfinished.rename(target)
            except OSError:
                if not os.path.isdir(target):
                    raise
                raise AlreadyExists(f"shared memory region '{region.name}' already in manager") from None
        except OSError as error:
            raise InternalError(f"shared memory regions cannot be kept: {error.strerror}") from None
        finally:
            _clear(unfinished)

    def find(self, tenant: str, name: str) -> tuple[Stamp, Region] | None:
        """The region with this name, as every gateway of the machine sees it now."""
        found = self._about(self._path(tenant, name))
        return None if found is None else (found[0], found[2])

    def open(self, tenant: str, region: Region) -> int:
        """A descriptor of a system region's object. Raises `InternalError` if it is gone."""
        try:
            descriptor = os.open(f"{self._path(tenant, region.name)}/{_MEMORY}", _FLAGS)
        except FileNotFoundError:
            descriptor = open_object(region.key)
        except OSError:
            raise InternalError(f"Unable to open shared memory region: '{region.key}'") from None
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (
            region.device,
            region.inode,
        ):  # another object has its key now
            os.close(descriptor)
            raise InternalError(f"Unable to open shared memory region: '{region.key}'")
        return descriptor

    def all(self, tenant: str, kind: RegionKind) -> list[Region]:
        """The regions of a tenant, by name."""
        if self._existing() is None:
            return []
        found = [self._about(path) for path in self._entries()]
        regions = [about[2] for about in found if about is not None and about[1] == tenant]
        return sorted((region for region in regions if region.kind == kind), key=lambda region: region.name)

    def remove(self, tenant: str, name: str) -> None:
        """Forget a region, if it is registered. Open descriptors stay open."""
        root = self._existing()
        if root is None:
            return
        gone = root / f"{_UNFINISHED}{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            os.rename(self._path(tenant, name), gone)
            _clear(gone)

    # -- the directory ------------------------------------------------------------------------------------------------

    def _path(self, tenant: str, name: str) -> str:
        digest = blake2b(f"{tenant}\0{name}".encode(errors="surrogatepass"), digest_size=20)
        return f"{self._existing() or '/nowhere'}/{digest.hexdigest()}"

    def _existing(self) -> Path | None:
        if self._root is None and self._directory:
            shared = Path(self._directory) / REGIONS
            if shared.is_dir():
                self._root = shared
        return self._root

    def _made(self) -> Path:
        """The directory, made for the first registration. Raises `InternalError`."""
        root = self._existing()
        if root is not None and root.is_dir():
            return root
        try:
            if self._directory and not self._is_own:
                with contextlib.suppress(OSError):
                    shared = Path(self._directory) / REGIONS
                    shared.mkdir(parents=True, mode=0o700, exist_ok=True)
                    self._root = shared
                    return shared
            self._root = Path(tempfile.mkdtemp(prefix="charonia-regions-", dir=_memory_root()))
        except OSError as error:
            raise InternalError(f"shared memory regions cannot be kept: {error.strerror}") from None
        self._is_own = True
        return self._root

    def _about(self, path: str) -> tuple[Stamp, str, Region] | None:
        """Stamp, tenant and region at a path; None if it was just removed."""
        file = f"{path}/{_ABOUT}"
        try:
            status = os.stat(file)
            stamp = (status.st_ino, status.st_mtime_ns)
            known = self._known.get(path)
            if known is not None and known[0] == stamp:
                return known
            with open(file) as text:
                about: dict[str, Any] = json.load(text)
            found = stamp, about.pop("tenant"), Region(**about)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self._known.pop(path, None)
            return None
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[path] = found
        return found

    def _entries(self) -> list[str]:
        """The paths of registered regions; removes old unfinished ones."""
        root = self._existing()
        found: list[str] = []
        with contextlib.suppress(OSError):
            for name in [] if root is None else os.listdir(root):
                path = f"{root}/{name}"
                if not name.startswith(_UNFINISHED):
                    found.append(path)
                elif time.time() - os.stat(path).st_mtime > _UNFINISHED_S:
                    _clear(Path(path))
        return found


def _clear(directory: Path) -> None:
    """Remove a region's directory, if it exists; faster than a recursive walk, as there may be many."""
    for name in (_ABOUT, _MEMORY):
        with contextlib.suppress(OSError):
            os.unlink(f"{directory}/{name}")
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _memory_root() -> str | None:
    return _MEMORY_ROOT if os.access(_MEMORY_ROOT, os.W_OK) else None
