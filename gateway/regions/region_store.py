"""The regions that are registered on this machine, in a directory that its gateways share (H46-H48).

A region is a directory `<root>/<digest of its tenant and name>/`: `about.json` describes it, and `memory` is a hard
link to the object it is in, so that every gateway opens the same object, whatever becomes of its key. A rename puts a
region there and takes it away, so that of two gateways that register one name one is refused, without a lock.
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

MAX_REGIONS = 4096
"""Of one machine."""
_ABOUT = "about.json"
_MEMORY = "memory"
_UNFINISHED = "."
_UNFINISHED_S = 60.0
"""What a gateway that died in the middle of a registration left is removed when it is so old."""
_MEMORY_ROOT = "/dev/shm"
_MOST_KNOWN = 4096
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""No link is followed, and a pipe under the name does not block."""

RegionKind = Literal["system", "cuda"]
Stamp = tuple[int, int]
"""Changes with every registration."""


@dataclass(frozen=True, slots=True)
class Region:
    """A registered region; `device` and `inode` say which object a system region is in."""

    name: str
    kind: RegionKind
    size_bytes: int
    key: str = ""
    offset: int = 0
    device: int = 0
    inode: int = 0
    device_id: int = 0


def open_object(key: str) -> int:
    """A descriptor of the shared memory object with this key, as shm_open(3) finds it. Raises `InternalError`."""
    name = key.lstrip("/")
    try:
        if not name or "/" in name or "\0" in name:
            raise FileNotFoundError(name)
        return os.open(f"{_MEMORY_ROOT}/{name}", _FLAGS)
    except (OSError, UnicodeError):
        raise InternalError(f"Unable to open shared memory region: '{key}'") from None


class RegionStore:
    """The regions of one machine; `directory` "" for those of this process alone. `find` is cheap, the rest is not."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._root: Path | None = None
        self._is_own = False
        self._known: dict[tuple[str, str], tuple[str, Stamp, Region]] = {}

    def close(self) -> None:
        if self._is_own and self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    def add(self, tenant: str, region: Region, descriptor: int) -> None:
        """Register a region; `descriptor` is of its object.

        Raises `AlreadyExists`, `ResourceExhausted`, and `InternalError` when the directory cannot be written.
        """
        root = self._made()
        unfinished = root / f"{_UNFINISHED}{secrets.token_hex(8)}"
        try:
            if len(os.listdir(root)) >= MAX_REGIONS:
                raise ResourceExhausted(f"at most {MAX_REGIONS} shared memory regions can be registered")
            unfinished.mkdir(mode=0o700)
            with contextlib.suppress(OSError):  # on another file system: then it is opened by its key
                # with a descriptor Python calls linkat(2), which follows; link(2) would link to the symbolic link
                os.link(f"/proc/self/fd/{descriptor}", unfinished / _MEMORY, src_dir_fd=descriptor)
            (unfinished / _ABOUT).write_text(json.dumps({"tenant": tenant, **asdict(region)}))
            target = self._path(tenant, region.name)
            try:
                unfinished.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
                raise AlreadyExists(f"shared memory region '{region.name}' already in manager") from None
        except OSError as error:
            raise InternalError(f"shared memory regions cannot be kept: {error.strerror}") from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def find(self, tenant: str, name: str) -> tuple[Stamp, Region] | None:
        """The region with this name, as every gateway of the machine has it at this moment."""
        known = self._known.get((tenant, name))
        path = f"{self._path(tenant, name)}/{_ABOUT}" if known is None else known[0]
        try:
            status = os.stat(path)
        except OSError:
            self._known.pop((tenant, name), None)
            return None
        stamp = (status.st_ino, status.st_mtime_ns)
        if known is not None and known[1] == stamp:
            return stamp, known[2]
        about = _read(path)
        if about is None:
            return None
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[tenant, name] = (path, stamp, about[1])
        return stamp, about[1]

    def open(self, tenant: str, region: Region) -> int:
        """A descriptor of the object of a system region. Raises `InternalError` when it is gone."""
        try:
            return os.open(f"{self._path(tenant, region.name)}/{_MEMORY}", _FLAGS)
        except FileNotFoundError:
            descriptor = open_object(region.key)
        except OSError:
            raise InternalError(f"Unable to open shared memory region: '{region.key}'") from None
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (region.device, region.inode):  # another one took its key
            os.close(descriptor)
            raise InternalError(f"Unable to open shared memory region: '{region.key}'")
        return descriptor

    def all(self, tenant: str, kind: RegionKind) -> list[Region]:
        """The regions of a tenant, by name."""
        if self._existing() is None:
            return []
        found = [_read(str(path / _ABOUT)) for path in self._entries()]
        regions = [about[1] for about in found if about is not None and about[0] == tenant]
        return sorted((region for region in regions if region.kind == kind), key=lambda region: region.name)

    def remove(self, tenant: str, name: str) -> None:
        """Forget a region; one that is not there is no error. Descriptors that are open stay."""
        root = self._existing()
        if root is None:
            return
        gone = root / f"{_UNFINISHED}{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            self._path(tenant, name).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    # -- the directory ------------------------------------------------------------------------------------------------

    def _path(self, tenant: str, name: str) -> Path:
        digest = blake2b(f"{tenant}\0{name}".encode(errors="surrogatepass"), digest_size=20)
        return (self._existing() or Path("/nowhere")) / digest.hexdigest()

    def _existing(self) -> Path | None:
        if self._root is None and self._directory:
            shared = Path(self._directory) / REGIONS
            if shared.is_dir():
                self._root = shared
        return self._root

    def _made(self) -> Path:
        """The directory, made by the first registration. Raises `InternalError`."""
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

    def _entries(self) -> list[Path]:
        """The registered regions; what was never finished and is old is removed."""
        root = self._existing()
        found: list[Path] = []
        with contextlib.suppress(OSError):
            for path in [] if root is None else list(root.iterdir()):
                if not path.name.startswith(_UNFINISHED):
                    found.append(path)
                elif time.time() - path.stat().st_mtime > _UNFINISHED_S:
                    shutil.rmtree(path, ignore_errors=True)
        return found


def _memory_root() -> str | None:
    return _MEMORY_ROOT if os.access(_MEMORY_ROOT, os.W_OK) else None


def _read(path: str) -> tuple[str, Region] | None:
    """The tenant and the region of a description; None when it has just been removed, or cannot be read."""
    try:
        with open(path) as file:
            about: dict[str, Any] = json.load(file)
        return about.pop("tenant"), Region(**about)
    except (OSError, ValueError, TypeError, KeyError):
        return None
