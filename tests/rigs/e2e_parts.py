"""The parts of a stack as processes of their own over one log, as on many machines. Stopped by their pids only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e_asking import until
from e2e_server import LEASES, REPOSITORY, Server
from topologies import Topology, wanted

from charonia.eventlog.embedded import PrivateServer, find_server

CHARONIA = str(Path(sys.executable).parent / "charonia")
GATEWAY_FLAGS = ("--http-port=0", "--grpc-port=0", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1")


@contextmanager
def log_of(directory: Path) -> Iterator[str]:
    """The URL of a log for the length of a block: a private server in `directory`, or the topology of this run."""
    log: PrivateServer | Topology
    if wanted():
        log = Topology(wanted())
    else:
        (directory / "log").mkdir()
        log = PrivateServer(directory / "log", find_server())
        log.start()
    try:
        yield log.url
        assert not isinstance(log, Topology) or log.refusals() == []
    finally:
        log.stop()


class Part(Server):
    """One role's process; gateways have their addresses once they say that they are up."""

    def __init__(self, role: str, name: str, directory: Path, log_url: str, *flags: str) -> None:
        self.name = name
        log_file = directory / f"{name}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [CHARONIA, role, "--log-url", log_url, "--metrics-port=0", "--metrics-address=127.0.0.1", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=REPOSITORY,
                env={**LEASES, **os.environ},
            )
        super().__init__(process, directory, log_file)

    def until_says(self, pattern: str) -> re.Match[str]:
        def look() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log()
            return re.search(pattern, self.log())

        found = until(f"{self.name} says {pattern}", look)
        assert found is not None
        return found

    def learn_addresses(self) -> None:
        """A port of 0 is a free one, which the gateway tells."""
        said = self.until_says(r"gateway is up, http on ([\d.:]+), grpc on ([\d.:]+)")
        self.http, self.grpc = said[1], said[2]

    def read_endpoints(self) -> None:
        pass
