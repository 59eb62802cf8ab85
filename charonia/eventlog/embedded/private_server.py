"""The private server: a Redis or Valkey child on a Unix socket, for `charonia serve` without a log URL.

Starts the server program that `programs` chooses with its files in the state directory, and sees that it ends with its
parent. Talking to the server as a log is `charonia.eventlog.redis`'s.

A terminal's Ctrl-C reaches the whole process group; the server has SIGINT blocked, so that the services can drain into
it first. It ends by `stop()`, by SIGTERM, or when its parent dies (the kernel sends it SIGTERM then).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from charonia.errors import StartupError
from charonia.offload.time_slices import LOOP_SLICE_NS, set_time_slice

from .append_tail import Repair, repair
from .holder import hold_within, holder_of, in_words, write_down
from .programs import ServerBinary, find_server
from .state_files import StateFiles

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


_FORMER_RUNS = re.compile(rb"(?:s|alive|r|x):|ctl$")


def of_former_runs(key: bytes) -> bool:
    """Whether `PrivateServer.begin_run` forgets a key."""
    return _FORMER_RUNS.match(key) is not None


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
        self.files = StateFiles(self.state_dir)
        self.repaired: Repair | None = None
        """What the last start cut off the end of the append-only file."""
        self.log_path = self.state_dir / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._program: ServerBinary | None = None
        self._held: int | None = None
        self._socket_path: Path | None = None

    @property
    def url(self) -> str:
        """The log URL of the started server."""
        return "unix://" + quote(str(self.socket_path))

    @property
    def pid(self) -> int:
        return self._started().pid

    def prepare(self, lock_patience_s: float = _LOCK_PATIENCE_S) -> None:
        """Take the state directory, choose the program and repair the files: what of a start may take long.

        Raises `StartupError` when no program can read the state, the files are damaged or the directory stays in use,
        `OSError` where the system refuses what it needs.
        """
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError("the private server has been started already")
        self._release()
        self.state_dir.mkdir(parents=True, exist_ok=True)
        self._held = self._lock(lock_patience_s)
        try:
            self._program = self.binary or find_server(state=self.files)
            self.repaired = repair(self.files, self._program)
        except BaseException:
            self._release()
            raise

    def start(self, lock_patience_s: float = _LOCK_PATIENCE_S) -> None:
        """Start the child, prepared first if it is not. Raises `StartupError`; no child is left then."""
        if self._held is None:
            self.prepare(lock_patience_s)
        lock, program = self._held, self._program
        if lock is None or program is None:
            raise RuntimeError("the private server has not been prepared")
        process = None
        try:
            path = self.socket_path
            path.unlink(missing_ok=True)  # the lock is ours: what is left here is a dead server's
            with self.log_path.open("ab") as log:
                process = subprocess.Popen(
                    [program.path, *self._options(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.state_dir,
                    pass_fds=(lock,),
                    preexec_fn=_tie_to_parent(),
                )
            write_down(lock, "the log server", process.pid)
            set_time_slice(LOOP_SLICE_NS, inherited=False, thread=process.pid)
            self._process, process = process, None
        except OSError as error:
            raise StartupError(f"the private server '{program.path}' cannot be started: {error}") from None
        finally:
            if process is not None:
                process.kill()
                process.wait()
            self._release()  # the child holds it from here on, past our own death

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            os.close(held)

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
                raise StartupError(
                    f"the private server ended at once with status {status}: {self._last_words()}{self._of_another()}"
                )
            if time.monotonic() > deadline:
                raise StartupError(f"the private server was not ready after {timeout_s:g} s: {self._last_words()}")
            time.sleep(_POLL_S)
        if self._program is not None:
            self.files.remember(self._program.writer)

    def begin_run(self) -> None:
        """Forget what only concerned the processes of former runs; what they were given to do, and did, stays.

        Gone are control facts, heartbeats, statistics (X6), replies without a reader and batches without an executor:
        the queues still hold what those carried. To be called once the server answers and before any process uses it.
        """
        words = ("EVAL", _BEGIN_RUN, "0")
        command = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_LONG_S)
            client.connect(str(self.socket_path))
            client.sendall(command.encode())
            answer = client.recv(4096)
        if not answer.startswith(b":"):
            raise StartupError(f"the private server refused to forget former runs: {answer.decode(errors='replace')}")

    def poll(self) -> int | None:
        """The exit status of a server that has ended, or None."""
        return self._started().poll()

    def kill(self) -> None:
        """End the server at once, without what it would write out; it may be started again."""
        process = self._started()
        process.kill()
        process.wait()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the server, which writes out what it has. Does nothing when it has not been started."""
        self._release()
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            if process.wait(timeout_s) == 0:
                self.files.stopped()
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.socket_path.unlink(missing_ok=True)

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
        path = self.state_dir / "server.lock"
        lock = hold_within(path, "a starting log server", patience_s)
        if lock is None:
            holder = in_words(holder_of(path))
            raise StartupError(f"the state directory {self.state_dir} is in use by another server: {holder}")
        return lock

    @property
    def socket_path(self) -> Path:
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
                client.connect(str(self.socket_path))
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

    def _of_another(self) -> str:
        """What to do when the state is another program's: its snapshot can be read, but not what was appended to it."""
        writer = self.files.writer
        if writer is None or self._program is None or writer.text == self._program.writer.text:
            return ""
        return (
            f"; the state was written by {writer.text}, not {self._program.text}: start it with that one, or move it "
            "by 'charonia state export' and 'charonia state import' (docs/howto/upgrades.md)"
        )


def short_directory(state_dir: Path) -> Path:
    """Where the sockets of an existing state directory can be: always the same, so that a killed server leaves one
    at most.

    A server in another container may have the same path of its state, and share the temporary directory: so the name is
    also of the directory itself. It is never that of `StateDirectory.memory_directory`, whose folder is the temporary
    one where TMPDIR is /dev/shm. It is short, because paths of sockets are bounded.
    """
    itself = state_dir.stat()
    named = b"%b\0%d:%d" % (os.fsencode(state_dir), itself.st_dev, itself.st_ino)
    digest = hashlib.blake2b(named, digest_size=7).hexdigest()
    path = Path(tempfile.gettempdir()) / f"charonia-s-{os.getuid()}-{digest}"
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
