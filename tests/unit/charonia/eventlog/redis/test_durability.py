"""What servers can promise, from what they say of themselves."""

from __future__ import annotations

from typing import Any

import hiredis
import pytest

from charonia.eventlog.durability_levels import FSYNC, MEMORY, parse_level
from charonia.eventlog.redis.durability import Server
from charonia.eventlog.redis.server.transport import Refused

REPLICATED = parse_level("replicated:1")


def server(
    version: bytes = b"redis_version:7.0.15\r\n",
    *,
    aof: bytes = b"aof_enabled:1",
    policy: bytes = b"maxmemory_policy:noeviction",
    fsync: Any = (b"appendfsync", b"everysec"),
) -> Server:
    appendfsync = list(fsync) if isinstance(fsync, tuple) else fsync
    return Server.of([b"# Server\r\n" + version, b"# Persistence\r\n" + aof, b"# Memory\r\n" + policy, appendfsync])


ALWAYS = (b"appendfsync", b"always")
VALKEY = b"redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2\r\n"


def test_versions_are_each_servers_own() -> None:
    assert server().version == (7, 0, 15)
    assert not server().valkey
    assert server(VALKEY).version == (9, 1, 2)
    assert server(VALKEY).valkey


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (server(fsync=ALWAYS), ""),
        (server(VALKEY, fsync=ALWAYS), ""),
        (server(b"redis_version:8.0.0\r\n"), ""),
        (server(), "appendfsync always"),
        (server(b"redis_version:7.4.2\r\n"), "appendfsync always"),
        (server(VALKEY), "appendfsync always"),
        (server(b"redis_version:8.0.0\r\n", fsync=(b"appendfsync", b"no")), "not 'no'"),
        (server(fsync=hiredis.ReplyError("NOPERM")), "it does not tell its appendfsync"),
        (server(fsync=[]), "it does not tell its appendfsync"),
        (server(fsync=(*ALWAYS, b"no-appendfsync-on-rewrite", b"no")), ""),
        (server(fsync=(*ALWAYS, b"no-appendfsync-on-rewrite", b"yes")), "while it rewrites"),
        (server(fsync=ALWAYS, aof=b"aof_enabled:0"), "appendonly no"),
        (server(fsync=ALWAYS, policy=b"maxmemory_policy:allkeys-lru"), "allkeys-lru"),
        (server(fsync=ALWAYS, policy=b"maxmemory_policy:volatile-ttl"), "volatile-ttl"),
    ],
)
def test_fsync_needs_a_server_that_flushes_before_it_answers(found: Server, reason: str) -> None:
    assert found.shortfall(MEMORY) == ""
    assert reason in found.shortfall(FSYNC)
    assert bool(found.shortfall(FSYNC)) == bool(reason)


def test_replicas_need_a_file_and_no_eviction_either() -> None:
    assert server().shortfall(REPLICATED) == ""
    assert "append-only" in server(aof=b"aof_enabled:0").shortfall(REPLICATED)
    assert "evict" in server(policy=b"maxmemory_policy:allkeys-lfu").shortfall(REPLICATED)
    assert server(policy=b"maxmemory_policy:allkeys-lfu").evicts


def test_a_server_that_tells_nothing_is_refused() -> None:
    with pytest.raises(Refused):
        Server.of([hiredis.ReplyError("NOPERM this user has no permissions"), b"", b"", []])
