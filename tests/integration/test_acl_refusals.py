"""What the users of `infra/redis/users.acl.template` are refused, and what is found when one may not do enough."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from guarded_server import REDIS, ROLES, GuardedServer
from log_servers import at_once

from charonia import keys
from charonia.errors import StartupError
from charonia.eventlog.redis import RedisLog

pytestmark = pytest.mark.integration


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GuardedServer]:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    server = GuardedServer(secrets)
    server.start()
    yield server
    server.stop()


_FORBIDDEN_TO_ALL = (
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "SET", "appendonly", "no"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("SHUTDOWN", "NOSAVE"),
    ("ACL", "LIST"),
    ("MONITOR",),
    ("REPLICAOF", "NO", "ONE"),
    ("SAVE",),
    ("EVAL", "return 1", "0"),
    ("SET", "anything", "1"),
    ("XADD", "r2d2", "*", "a", "b"),
    ("DEL", "ctl"),
    ("DEL", "epoch"),
)

_FORBIDDEN = {
    "gateway": (
        ("XDEL", "ctl", "1-1"),
        ("XRANGE", "dlq:{m}", "-", "+"),
        ("XDEL", "x:executor-1", "1-1"),
        ("XREAD", "STREAMS", "x:executor-1", "0"),
        ("SET", "whs:{m}:00", "1"),
        ("ZADD", "wht:{m}", "1", "a"),
        ("SET", "alive:executor:e", "1"),
    ),
    "batcher": (
        ("CONFIG", "GET", "*"),
        ("XRANGE", "r:gateway-1", "-", "+"),
        ("SET", "blob:1", "1"),
        ("DEL", "dlq:{m}"),
        ("XREAD", "STREAMS", "dlq:{m}", "0"),
        ("GET", "whs:{m}:00"),
        ("SET", "alive:gateway:g", "1"),
    ),
    "executor": (
        ("XDEL", "ctl", "1-1"),
        ("CONFIG", "GET", "*"),
        ("XRANGE", "q:{m}:0:0", "-", "+"),
        ("DEL", "q:{m}:0:0"),
        ("XRANGE", "r:gateway-1", "-", "+"),
        ("XREAD", "STREAMS", "r:gateway-1", "0"),
        ("XREAD", "STREAMS", "f:{m}", "0"),
        ("SMEMBERS", "jm"),
        ("XADD", "dlq:{m}", "*", "a", "b"),
        ("GET", "whs:{m}:00"),
        ("SET", "alive:batcher:b", "1"),
    ),
    "webhooks": (
        ("XDEL", "ctl", "1-1"),
        ("CONFIG", "GET", "*"),
        ("HSET", "job:{m}:00", "s", "s"),
        ("XRANGE", "q:{m}:0:0", "-", "+"),
        ("XRANGE", "j:{m}", "-", "+"),
        ("XADD", "r:gateway-1", "*", "a", "b"),
        ("GET", "blob:1"),
        ("HSET", "n:{m}", "paused", "1"),
        ("SET", "alive:gateway:g", "1"),
    ),
    "operator": (
        ("XDEL", "ctl", "1-1"),
        ("SET", "whs:{m}:00", "1"),
        ("XADD", "ctl", "*", "a", "b"),
        ("XADD", "x:executor-1", "*", "a", "b"),
        ("SET", "blob:1", "1"),
        ("SET", "alive:gateway:g", "1"),
    ),
}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_refused_what_is_not_its_own(server: GuardedServer, role: str) -> None:
    with server.client_of(role) as client:
        assert client.ping()
        for command in (*_FORBIDDEN_TO_ALL, *_FORBIDDEN[role]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
        # a script may do no more than who runs it
        digest = client.script_load("return redis.call('DEL', 'epoch')")
        with pytest.raises(redis.exceptions.ResponseError, match=r"NOPERM|ACL failure|can't access|No permission"):
            client.evalsha(digest, 0)
    with server.client() as watcher:
        assert watcher.dbsize() == 0


def test_nobody_comes_in_without_a_password(server: GuardedServer) -> None:
    for user, password in ((None, None), ("default", ""), ("default", "default")):
        unknown = redis.Redis("127.0.0.1", server.port, username=user, password=password, retry=at_once())
        with unknown as client, pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()
    with server.client_of("health", "anything") as client:
        assert client.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.get("epoch")
    stranger = server.client_of("gateway", "operator's:password")
    with stranger as client, pytest.raises(redis.exceptions.AuthenticationError):
        client.ping()


async def test_a_role_that_may_not_ask_for_appendfsync_says_what_is_missing(
    server: GuardedServer, tmp_path: Path
) -> None:
    """The level is refused with a sentence that names the way out; without one the server is used as it is."""
    with server.client() as watcher:
        watcher.execute_command("ACL", "SETUSER", "gateway", "-config|get")
    url = f"redis://gateway:gateway's%3Apassword@127.0.0.1:{server.port}"
    log = RedisLog(url, durability="memory")
    await log.open()
    assert await log.epoch()
    await log.close()
    with pytest.raises(StartupError, match=r"the log's user must be allowed to ask \(ACL \+config\|get\)"):
        await RedisLog(url, durability="fsync").open()


def test_every_key_of_the_log_is_somebody_s() -> None:
    """A new kind of key must be given to the roles that need it."""
    template = (REDIS / "users.acl.template").read_text()
    (table,) = [part for part in (keys.__doc__ or "").split("\n\n") if part.startswith("    q:{m}")]
    kinds = {
        kind for line in table.splitlines() for kind in re.findall(r"^    (\w+)|, (\w+):\{", line) for kind in kind
    }
    assert {"q", "dlq", "fence", "jd"} <= kinds
    assert [kind for kind in sorted(kinds - {""}) if not re.search(rf"~{kind}(:\*)?[ )\n]", template)] == []


def test_an_empty_secret_makes_no_user(tmp_path: Path) -> None:
    for role in ROLES:
        (tmp_path / f"redis_{role}").write_text(f"{role}\n")
    (tmp_path / "redis_batcher").write_text(" \n")
    words = ["sh", str(REDIS / "users.sh"), str(REDIS / "users.acl.template"), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "redis_batcher is empty" in done.stderr
