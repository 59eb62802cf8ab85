"""A server of the chart's `RedisFailover`, started as Spotahome's operator starts it: killed, it has all that it wrote.

The operator's own file turns no append-only file on, and `customConfig` is sent to servers that run already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml
from helm_chart.chart_files import RENDERED
from log_servers import LogServer

pytestmark = pytest.mark.integration

FILE = "/redis/redis.conf"
"""Where the operator mounts its file."""
DEFAULT = ["redis-server", FILE]
"""What it runs for a manifest without `command`."""


class OperatedServer(LogServer):
    """A server with the operator's file, in its own folder, and a manifest's command and configuration."""

    def __init__(self, command: list[str], configuration: list[str]) -> None:
        super().__init__()
        assert command[0] == "redis-server"
        self._words = [str(self.directory / "redis.conf") if word == FILE else word for word in command[1:]]
        self._configuration = configuration
        lines = {**self.entrance.options(self.port), "dir": self.directory, "replicaof": f"127.0.0.1 {self.port}"}
        lines["save"] = "900 1 300 10"
        (self.directory / "redis.conf").write_text("".join(f"{name} {value}\n" for name, value in lines.items()))

    def words(self) -> list[str]:
        return self._words

    def lead(self) -> None:
        """What the operator does with it once it runs."""
        self.ask("REPLICAOF", "NO", "ONE")
        for line in self._configuration:
            self.ask("CONFIG", "SET", *line.split(" ", 1))


@pytest.fixture(scope="module")
def manifest() -> Any:
    """The fields of Redis's servers."""
    manifests = yaml.safe_load_all((RENDERED / "operator-hpa.yaml").read_text())
    (found,) = (one for one in manifests if one and one["kind"] == "RedisFailover")
    return found["spec"]["redis"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def kept(command: list[str], configuration: list[str], stack: ExitStack) -> object:
    """What a server that was killed has of a value for which its client had a reply."""
    server = OperatedServer(command, configuration)
    stack.callback(server.stop)
    server.start()
    server.lead()
    server.ask("SET", "accepted", "1")
    server.kill()
    server.start()
    server.lead()
    return server.ask("GET", "accepted")


def test_it_has_what_it_wrote(manifest: Any, stack: ExitStack) -> None:
    assert kept(manifest["command"], manifest["customConfig"], stack) == "1"


def test_configuration_of_running_servers_alone_would_lose_it(manifest: Any, stack: ExitStack) -> None:
    assert kept(DEFAULT, manifest["customConfig"], stack) is None
