"""Counts the calls of Python functions that a request passes in each process of a server.

The server is started with `counting/` on its PYTHONPATH (see there what counts as a call); its code is not changed,
so any revision can be counted. Counting slows a server down several times, so timed runs are never counted ones.
Work of the background is taken out: what an idle server calls in the same time is subtracted, function by function.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.cases import CASES
from loadtest.bench.processes import load_roles
from loadtest.bench.servers import Charonia, Endpoints
from loadtest.bench.waves import send_waves
from loadtest.model import CONTROL_TIMEOUT_S, LoadTestError

HOOK = Path(__file__).with_name("counting")
VARIABLE = "LOADTEST_COUNT_CALLS"
WARM_REQUESTS = 200
IDLE_S = 2.0
_LOOK_S = 0.2
_PATIENCE_S = 30.0
"""For the imports of an idle server to end."""
_IMPORTS = "<frozen importlib"

Counts = dict[int, Counter[str]]
"""By process id: calls by "FILE:LINE:FUNCTION"."""


@dataclass(frozen=True)
class Function:
    """Where a counted function is defined."""

    file: str
    line: int
    name: str


def function(text: str) -> Function:
    """Parses "FILE:LINE:FUNCTION"."""
    file, line, name = text.rsplit(":", 2)
    return Function(file, int(line), name)


def environment(directory: Path) -> dict[str, str]:
    """What a server's environment needs for its processes to count; sockets appear in the directory."""
    return {VARIABLE: str(directory), "PYTHONPATH": str(HOOK)}


def read_process(path: Path) -> Counter[str]:
    """Counts of one process so far. Raises OSError when it has ended."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(CONTROL_TIMEOUT_S)
        client.connect(str(path))
        parts = []
        while part := client.recv(1 << 16):
            parts.append(part)
    return Counter(json.loads(b"".join(parts)))


def read(directory: Path) -> Counts:
    """Counts of all live processes so far. Raises LoadTestError when none counts."""
    counts = {}
    for path in directory.glob("*.sock"):
        try:
            counts[int(path.stem)] = read_process(path)
        except (ConnectionError, FileNotFoundError):
            continue
    if not counts:
        raise LoadTestError(f"no process of the server counts its calls in {directory}")
    return counts


def since(after: Counts, before: Counts) -> Counts:
    """Calls between two readings."""
    return {pid: Counter(after[pid]) - before.get(pid, Counter()) for pid in after}


@dataclass(frozen=True)
class Background:
    """Calls per second of an idle server, by process and function."""

    per_s: Mapping[int, Mapping[str, float]]

    def taken_from(self, counts: Counts, seconds: float) -> dict[int, dict[str, float]]:
        """The counts of `seconds` without what an idle server would have called in them; never below 0."""
        net: dict[int, dict[str, float]] = {}
        for pid, calls in counts.items():
            idle = self.per_s.get(pid, {})
            rest = {name: count - idle.get(name, 0.0) * seconds for name, count in calls.items()}
            net[pid] = {name: count for name, count in rest.items() if count > 0}
        return net


def measure_background(directory: Path, seconds: float) -> Background:
    """Watches an idle server for a while; again where a process was still importing: on a busy machine that is late."""
    give_up_at = time.monotonic() + _PATIENCE_S
    before, started = read(directory), time.monotonic()
    while True:
        time.sleep(_LOOK_S)
        idle, looked_at = since(read(directory), before), time.monotonic()
        if _is_importing(idle) and looked_at < give_up_at:
            before, started = read(directory), looked_at
        elif looked_at - started >= seconds:
            elapsed = looked_at - started
            return Background({pid: {name: n / elapsed for name, n in calls.items()} for pid, calls in idle.items()})


def _is_importing(counts: Counts) -> bool:
    return any(n and name.startswith(_IMPORTS) for calls in counts.values() for name, n in calls.items())


def package_of(file: str, packages: tuple[str, ...]) -> str:
    """The top package of a file: the innermost of its folders that is one of `packages`, as the checkout itself may
    have such a name; else the distribution's, or "python" for the standard library."""
    parts = file.split(os.sep)
    for name in reversed(parts[:-1]):
        if name in packages and "site-packages" not in parts:
            return name
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1].removesuffix(".py")
    return "python"


def ask(endpoints: Endpoints, model: str, protocol: str, in_flight: int, requests: int) -> None:
    """Sends requests to an identity model in waves and compares the answers. Raises LoadTestError."""
    address = endpoints.http if protocol == "http" else endpoints.grpc
    if address is None:
        raise LoadTestError(f"the server has no {protocol} front")
    send_waves(address, CASES[model], protocol, in_flight, requests)


@dataclass(frozen=True)
class CountedServer:
    """A server whose processes count their calls, and what it calls while idle."""

    endpoints: Endpoints
    directory: Path
    background: Background

    def roles(self) -> Mapping[int, str]:
        """Role by pid, "model" for processes of python models."""
        file = self.endpoints.processes_file
        return load_roles(file, models=True) if file else {}

    def count(self, load: Callable[[], None], requests: int) -> dict[str, dict[str, float]]:
        """Calls per request by role and function during a load of so many requests, without the background."""
        before, started = read(self.directory), time.monotonic()
        load()
        seconds = time.monotonic() - started
        net = self.background.taken_from(since(read(self.directory), before), seconds)
        roles, found = self.roles(), dict[str, dict[str, float]]()
        for pid, functions in net.items():
            role = found.setdefault(roles.get(pid, "other"), {})
            for name, count in functions.items():
                role[name] = role.get(name, 0.0) + count / requests
        return found


@contextmanager
def counted(
    repository: Path, models: tuple[str, ...], checkout: Path | None = None, options: tuple[str, ...] = ()
) -> Iterator[CountedServer]:
    """A counted server, warm for the given identity models, while it runs."""
    with tempfile.TemporaryDirectory(prefix="lt-calls-") as home:
        directory = Path(home)
        with Charonia(repository, options, checkout, environment(directory)) as server:
            for model in models:
                for protocol in ("http", "grpc"):
                    ask(server.endpoints, model, protocol, 8, WARM_REQUESTS)
            yield CountedServer(server.endpoints, directory, measure_background(directory, IDLE_S))
