"""The log that a run of the tests is over: one server, or what `CHARONIA_TEST_TOPOLOGY` names.

`single`, `sentinel` (a primary, two replicas, three sentinels) or `cluster` (three primaries), and after a comma `tls`
(encrypted, clients with certificates) and `acl` (a user who may do what all roles of the stack's template together may,
and nothing else): `cluster,tls,acl`. Servers are real processes on loopback ports. `make topologies` goes through them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis
from certificates import HAS_OPENSSL, authority, certificate
from cluster_servers import RedisCluster
from log_servers import ADMIN, Cluster, Entrance, LogServer, server_with_tls

VARIABLE = "CHARONIA_TEST_TOPOLOGY"
_REDIS = Path(__file__).resolve().parents[2] / "infra" / "redis"
ROLES = ("gateway", "batcher", "executor", "webhooks", "operator")
_PATIENT_MS = 20_000
"""Nobody fails over because machines are busy: failovers have tests of their own."""


def wanted() -> str:
    """What the environment names, "" for the usual single server."""
    return os.environ.get(VARIABLE, "")


class Topology:
    """The servers. `url` is what a user of the log gets; `client()` may do everything, also what a user may not."""

    def __init__(self, name: str) -> None:
        kind, *more = name.split(",")
        assert kind in ("single", "sentinel", "cluster"), f"{VARIABLE}={name}"
        assert set(more) <= {"tls", "acl"}, f"{VARIABLE}={name}"
        self._stack = ExitStack()
        directory = Path(tempfile.mkdtemp(prefix="charonia-test-"))
        self._stack.callback(shutil.rmtree, directory, ignore_errors=True)
        self.entrance = Entrance(
            certificates=_certificates(directory) if "tls" in more else None,
            users=_users(directory) if "acl" in more else None,
        )
        self._slots: Any = None
        try:
            self.url = getattr(self, f"_{kind}")()
        except BaseException:
            self.stop()
            raise

    def _single(self) -> str:
        server = LogServer(self.entrance)
        self._stack.callback(server.stop)
        self._primaries = [server.start()]
        return str(self.entrance.url("", f"127.0.0.1:{server.port}", "/0"))

    def _sentinel(self) -> str:
        cluster = Cluster(self._stack, self.entrance, _PATIENT_MS)
        self._primaries = [cluster.primary]
        return str(cluster.url)

    def _cluster(self) -> str:
        self._slots = RedisCluster(entrance=self.entrance)
        self._stack.callback(self._slots.stop)
        self._primaries = self._slots.start().servers
        return str(self._slots.url)

    def client(self) -> Any:
        """A client of redis-py for all keys, with bytes as they are."""
        words: dict[str, Any] = {}
        if self.entrance.users is not None:
            words |= {"username": ADMIN, "password": ADMIN}
        if self.entrance.certificates is not None:
            words |= {"ssl": True, **self.entrance.files()}
        made = redis.RedisCluster if self._slots is not None else redis.Redis
        return made(host="127.0.0.1", port=self._primaries[0].port, **words)

    def flush(self) -> None:
        for server in self._primaries:
            server.ask("FLUSHALL")

    def refusals(self) -> list[str]:
        """What users were refused, by the servers that hold the data."""
        found = []
        for server in self._primaries if self.entrance.users is not None else ():
            with server.client() as client:
                entries = client.acl_log()
            found += [f"{one['username']} {one['context']} {one['reason']} {one['object']}" for one in entries]
        return found

    def stop(self) -> None:
        self._stack.close()


def _certificates(directory: Path) -> Path:
    assert server_with_tls(), "no server with TLS: set CHARONIA_TEST_TLS_SERVER or install redis-server"
    assert HAS_OPENSSL, "openssl makes the certificates"
    authority(directory, "ours")
    for name in ("server", "client"):
        certificate(directory, name, "ours")
    return directory


def _users(directory: Path) -> Path:
    """The stack's own template with one user more, who has the rights of all roles."""
    for role in ROLES:
        (directory / f"redis_{role}").write_text(f"{role}\n")
    words = ["sh", str(_REDIS / "users.sh"), str(_REDIS / "users.acl.template"), str(directory)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    rights = " ".join(re.findall(rf"^user (?:{'|'.join(ROLES)}) reset on \S+ (.*)$", text, re.MULTILINE))
    users = directory / "users.acl"
    users.write_text(f"{text}user somebody reset on >somebody {rights}\nuser {ADMIN} reset on >{ADMIN} ~* &* +@all\n")
    return users
