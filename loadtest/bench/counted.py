"""A server that counts its calls, and the load for it in waves, without h2load."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench import calls
from loadtest.bench.cases import CASES
from loadtest.bench.processes import load_roles
from loadtest.bench.servers import Charonia, Endpoints
from loadtest.bench.waves import send_waves
from loadtest.model import LoadTestError

WARM_REQUESTS = 200
IDLE_S = 2.0


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
    background: calls.Background

    def roles(self) -> Mapping[int, str]:
        """Role by pid, "model" for processes of python models."""
        file = self.endpoints.processes_file
        return load_roles(file, models=True) if file else {}

    def count(self, load: Callable[[], None], requests: int) -> dict[str, dict[str, float]]:
        """Calls per request by role and function during a load of so many requests, without the background."""
        before, started = calls.read(self.directory), time.monotonic()
        load()
        seconds = time.monotonic() - started
        net = self.background.taken_from(calls.since(calls.read(self.directory), before), seconds)
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
        with Charonia(repository, options, checkout, calls.environment(directory)) as server:
            for model in models:
                for protocol in ("http", "grpc"):
                    ask(server.endpoints, model, protocol, 8, WARM_REQUESTS)
            yield CountedServer(server.endpoints, directory, calls.measure_background(directory, IDLE_S))
