"""The parts of a stack as processes of their own over one log, as on many machines. Stopped by their pids only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

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
        log.wait_ready()  # a part that finds no log ends at once
    try:
        yield log.url
        assert not isinstance(log, Topology) or log.refusals() == []
    finally:
        log.stop()


P = TypeVar("P", bound="Part")


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
        self.log_url = log_url

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


class Parts:
    """The parts that a test starts over one log; `parts_over_a_log` makes it and stops them."""

    def __init__(self, directory: Path, log_url: str) -> None:
        self.directory = directory
        self.log_url = log_url
        self.started: list[Part] = []

    def start(self, role: str, name: str, *flags: str) -> Part:
        return self.add(Part(role, name, self.directory, self.log_url, *flags))

    def add(self, part: P) -> P:
        self.started.append(part)
        return part

    def gateway(self, name: str, *flags: str) -> Part:
        """A gateway that is ready. No other part may have failed: requests would wait for it in vain."""
        part = self.start("gateway", name, *GATEWAY_FLAGS, *flags)
        part.learn_addresses()
        part.wait_ready()
        failed = [one.name for one in self.started if (one.process.poll() or 0) > 0]
        assert not failed, f"ended with an error: {failed}"
        return part

    def running(self) -> list[Part]:
        return [part for part in self.started if part.process.poll() is None]


@contextmanager
def parts_over_a_log(directory: Path) -> Iterator[Parts]:
    """Parts over a log of their own. Those that still run after the block are stopped, and have to end with 0.

    If anything fails, their logs are printed and they are killed.
    """
    with log_of(directory) as log_url:
        parts = Parts(directory, log_url)
        try:
            yield parts
            codes = {part.name: part.stop() for part in parts.running()}
            assert set(codes.values()) <= {0}, codes
        except BaseException:
            for part in parts.started:
                sys.stderr.write(f"--- {part.name}\n{part.log()}\n")
            raise
        finally:
            for part in parts.running():
                part.process.kill()
                part.process.wait()
