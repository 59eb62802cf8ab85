"""A real Redis Cluster of three primaries on loopback ports, and slots that move between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import redis
from free_ports import free_port  # type: ignore[import-not-found]
from log_servers import ADMIN, OPEN, Entrance, LogServer, wait_until  # type: ignore[import-not-found]

SLOTS = 16384


class ClusterServer(LogServer):  # type: ignore[misc]
    """One primary. Its bus listens on a port 10,000 above or, where there is none, on one of its own."""

    def __init__(self, entrance: Entrance = OPEN, **options: str) -> None:
        super().__init__(entrance, cluster_enabled="yes", cluster_node_timeout="2000", **options)
        if entrance.certificates is not None:
            self.options["tls-cluster"] = "yes"
        self.bus_port = free_port()
        self.options["cluster-port"] = str(self.bus_port)
        self.options["cluster-require-full-coverage"] = "no"

    @property
    def node_id(self) -> str:
        return str(self.ask("CLUSTER", "MYID"))


class RedisCluster:
    """Three primaries. `move(slot, to)` moves one slot as `redis-cli --cluster reshard` does."""

    def __init__(self, primaries: int = 3, entrance: Entrance = OPEN) -> None:
        self.entrance = entrance
        self.servers = [ClusterServer(entrance) for _ in range(primaries)]

    @property
    def url(self) -> str:
        return str(self.entrance.url("+cluster", ",".join(f"127.0.0.1:{server.port}" for server in self.servers)))

    def start(self) -> RedisCluster:
        for server in self.servers:
            server.start()
        share = SLOTS // len(self.servers)
        for number, server in enumerate(self.servers):
            last = SLOTS - 1 if server is self.servers[-1] else (number + 1) * share - 1
            server.ask("CLUSTER", "ADDSLOTSRANGE", str(number * share), str(last))
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
        first = self.servers[0]
        for server in self.servers[1:]:
            first.ask("CLUSTER", "MEET", "127.0.0.1", str(server.port), str(server.bus_port))
        wait_until(lambda: all(self._whole(server) for server in self.servers))
        return self

    def be_patient(self) -> None:
        """Take no server for lost that a busy machine holds up, or that a test stops for a while."""
        for server in self.servers:
            server.ask("CONFIG", "SET", "cluster-node-timeout", "60000")

    def _whole(self, server: ClusterServer) -> bool:
        told = server.ask("CLUSTER", "SLOTS")
        assert isinstance(told, list)
        covered = sum(int(one[1]) - int(one[0]) + 1 for one in told) == SLOTS and len(told) == len(self.servers)
        return covered and "cluster_state:ok" in str(server.ask("CLUSTER", "INFO")).replace("'", "")

    def holder(self, slot: int) -> ClusterServer:
        told = self.servers[0].ask("CLUSTER", "SLOTS")
        assert isinstance(told, list)
        port = next(int(one[2][1]) for one in told if int(one[0]) <= slot <= int(one[1]))
        return next(server for server in self.servers if server.port == port)

    def move(self, slot: int, to: ClusterServer) -> None:
        source = self.holder(slot)
        if source is to:
            return
        self.begin_move(slot, to)
        while names := source.ask("CLUSTER", "GETKEYSINSLOT", str(slot), "20"):
            assert isinstance(names, list)
            self._migrate(source, to, *map(str, names))
        for server in (to, source, *self.servers):
            server.ask("CLUSTER", "SETSLOT", str(slot), "NODE", to.node_id)
        wait_until(lambda: all(self._knows(server, slot, to) for server in self.servers))

    def begin_move(self, slot: int, to: ClusterServer, *names: str) -> None:
        """Move only these keys of a slot so far; `move` goes on."""
        source = self.holder(slot)
        to.ask("CLUSTER", "SETSLOT", str(slot), "IMPORTING", source.node_id)
        source.ask("CLUSTER", "SETSLOT", str(slot), "MIGRATING", to.node_id)
        if names:
            self._migrate(source, to, *names)

    def _migrate(self, source: ClusterServer, to: ClusterServer, *names: str) -> None:
        known = ("AUTH2", ADMIN, ADMIN) if self.entrance.users else ()
        source.ask("MIGRATE", "127.0.0.1", str(to.port), "", "0", "30000", *known, "KEYS", *names)

    def _knows(self, server: ClusterServer, slot: int, holder: ClusterServer) -> bool:
        told = server.ask("CLUSTER", "SLOTS")
        assert isinstance(told, list)
        return any(int(one[0]) <= slot <= int(one[1]) and int(one[2][1]) == holder.port for one in told)

    def replicate(self, primary: ClusterServer, replica: ClusterServer) -> None:
        """Start `replica`, which joins and follows `primary`; every server knows it, else it could not be elected.

        They learn of it from its primary within two seconds; Redis 7.0 replicates long before that. One that they do
        not know gets no votes, and once its primary is lost nobody introduces it any more.
        """
        replica.start()
        replica.ask("CLUSTER", "MEET", "127.0.0.1", str(primary.port), str(primary.bus_port))
        wait_until(lambda: primary.node_id in str(replica.ask("CLUSTER", "NODES")))
        replica.ask("CLUSTER", "REPLICATE", primary.node_id)
        wait_until(lambda: str(replica.ask("ROLE")).count("connected"))
        known = f"{replica.node_id} 127.0.0.1:{replica.port}@{replica.bus_port}", f"slave {primary.node_id} "
        wait_until(lambda: all(self._lists(server, *known) for server in self.servers))

    def _lists(self, server: ClusterServer, name: str, role: str) -> bool:
        lines = str(server.ask("CLUSTER", "NODES")).splitlines()
        return any(line.startswith(name) and role in line for line in lines)

    def flush(self, servers: Iterable[ClusterServer] = ()) -> None:
        for server in servers or self.servers:
            with contextlib.suppress(redis.RedisError):
                server.ask("FLUSHALL")

    def stop(self) -> None:
        for server in self.servers:
            server.stop()
