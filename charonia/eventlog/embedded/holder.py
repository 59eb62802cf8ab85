"""Locks on files that say who holds them: process, command, since when.

The kernel ends a lock with its last holder, so what a locked file says is about a process that lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from charonia.errors import StartupError

LOCK = "lock"
"""The file in a state directory that its one user locks: `charonia serve`, or a command that reads or fills it."""
SERVE = "charonia serve"

_POLL_S = 0.003


def hold(path: Path, command: str) -> int | None:
    """Lock the file and write down that `command` of this process holds it; its descriptor, None when it is held."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_down(lock, command, os.getpid())
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


def hold_within(path: Path, command: str, patience_s: float) -> int | None:
    """`hold` for a file whose holder may be about to let go."""
    deadline = time.monotonic() + patience_s
    while (lock := hold(path, command)) is None and time.monotonic() <= deadline:
        time.sleep(_POLL_S)
    return lock


def hold_state_directory(directory: Path, command: str) -> int:
    """Make the directory and keep others out of it until the descriptor is closed. Raises `StartupError`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = hold(directory / LOCK, command)
    except OSError as error:
        raise StartupError(f"state directory '{directory}' cannot be used: {error.strerror}") from None
    if lock is None:
        holder = holder_of(directory / LOCK)
        other = "another " if holder.get("command", SERVE) == SERVE and command == SERVE else ""
        do = "give this one its own with --state-dir" if command == SERVE else "stop that first"
        raise StartupError(f"state directory '{directory}' is used by {other}{in_words(holder)}; {do}")
    return lock


def write_down(lock: int, command: str, pid: int) -> None:
    """Say in a locked file who holds it."""
    about = {"pid": pid, "command": command, "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    text = json.dumps({**about, "host": socket.gethostname()}) + "\n"
    os.pwrite(lock, text.encode(), 0)  # over what is there before it is cut: a reader finds one of the two whole
    os.ftruncate(lock, len(text))


def holder_of(path: Path) -> dict[str, Any]:
    """What the file of a lock says of its holder, now or before; empty when it says nothing."""
    try:
        found = json.loads(path.read_text().partition("\n")[0])
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_held(path: Path) -> bool:
    """Whether a process holds the lock now."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def in_words(holder: dict[str, Any]) -> str:
    """`charonia serve (pid 12, since 2026-05-01T12:00:00Z)`; its host when that is another, with pids of its own."""
    command = str(holder.get("command") or SERVE)
    known = [f"{name} {holder[name]}" for name in ("pid", "since") if holder.get(name)]
    if holder.get("host") not in (None, socket.gethostname()):
        known.append(f"on host {holder['host']}")
    return f"{command} ({', '.join(known)})" if known else command
