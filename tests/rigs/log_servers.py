"""Real log servers on loopback ports for tests: primaries, replicas and sentinels. Stopped by their pids only."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from charonia.eventlog.embedded import find_server

PATIENCE_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LogServer:
    """One server process on 127.0.0.1. `options` are `--name value` pairs as on its command line."""

    def __init__(self, **options: str) -> None:
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="charonia-test-"))
        self.options = {"appendonly": "yes", "save": "", "repl-diskless-sync-delay": "0"} | {
            name.replace("_", "-"): value for name, value in options.items()
        }
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> LogServer:
        options = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.directory), **self.options}
        words = [word for name, value in options.items() for word in (f"--{name}", *(value.split(" ")))]
        self._run(words)
        with self.client() as client:
            wait_until(lambda: _pings(client))
        return self

    def _run(self, words: list[str]) -> None:
        with (self.directory / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [find_server().path, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def client(self) -> redis.Redis:
        return redis.Redis("127.0.0.1", self.port, socket_timeout=5, decode_responses=True)

    def ask(self, *words: str) -> object:
        with self.client() as client:
            return client.execute_command(*words)  # type: ignore[no-untyped-call]

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGKILL and self.process is not None:
            self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


class SentinelServer(LogServer):
    """A sentinel that watches one primary as `service`, with a quorum of its own voice and one more."""

    def __init__(self, primary: LogServer, service: str, down_after_ms: int = 600) -> None:
        super().__init__()
        self._configuration = "\n".join(
            (
                f"port {self.port}",
                "bind 127.0.0.1",
                f"dir {self.directory}",
                f"sentinel monitor {service} 127.0.0.1 {primary.port} 2",
                f"sentinel down-after-milliseconds {service} {down_after_ms}",
                f"sentinel failover-timeout {service} 3000",
                f"sentinel parallel-syncs {service} 1",
            )
        )

    def start(self) -> LogServer:
        path = self.directory / "sentinel.conf"
        path.write_text(self._configuration)
        self._run([str(path), "--sentinel"])
        with self.client() as client:
            wait_until(lambda: _pings(client))
        return self


def _pings(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def wait_until(condition: object) -> None:
    """Poll a condition that another process makes true."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < give_up_at, "it did not come true"
        time.sleep(0.01)


def replicates(primary: LogServer) -> bool:
    """Whether a replica follows and confirms."""
    with primary.client() as client:
        client.set("probe", "1")
        return int(client.wait(1, 100)) > 0  # type: ignore[no-untyped-call]


class Cluster:
    """Three servers and three sentinels that agree on the first server."""

    def __init__(self, stack: ExitStack) -> None:
        def started(server: Any) -> Any:
            stack.callback(server.stop)
            return server.start()

        self.primary = started(LogServer())
        follow = f"127.0.0.1 {self.primary.port}"
        self.replicas = [started(LogServer(replicaof=follow)) for _ in range(2)]
        wait_until(self._confirm)
        self.sentinels = [started(SentinelServer(self.primary, "log")) for _ in range(3)]
        wait_until(self._agree)
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        self.url = f"redis+sentinel://{hosts}/log"

    def _confirm(self) -> bool:
        with self.primary.client() as client:
            client.set("probe", "1")
            return int(client.wait(2, 100)) == 2

    def _agree(self) -> bool:
        """Every sentinel knows the others and both replicas, else they could not fail over yet."""
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                found = client.sentinel_master("log")
            if found["num-other-sentinels"] < 2 or found["num-slaves"] < 2:
                return False
        return True

    def named(self) -> int:
        """The port of the primary that the last sentinel names."""
        with self.sentinels[-1].client() as client:
            return int(client.sentinel_get_master_addr_by_name("log")[1])
