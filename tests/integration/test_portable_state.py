"""Exported states: from Valkey to Redis and back, of every type of key, and what is refused."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis

from charonia.errors import InvalidArgument
from charonia.eventlog.embedded import PrivateServer, find_server, wheel_binary
from charonia.eventlog.redis.portable.exporting import export_keys
from charonia.eventlog.redis.portable.state_file import StateWriter
from charonia.eventlog.redis.server.address import parse_address
from charonia.eventlog.redis.server.hot_connection import Connection
from charonia.operations.command_line import run

pytestmark = pytest.mark.integration

FOR_AN_HOUR = 3600
PROGRAMS = ("valkey", "redis")


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="charonia-test-"))
    yield path
    shutil.rmtree(path)


def program(name: str) -> str:
    path = wheel_binary() if name == "valkey" else shutil.which("redis-server")
    if path is None:
        pytest.skip("redis-server is not installed")
    return path


class Running:
    """A private server of a program on a state directory; a context manager with a client."""

    def __init__(self, state: Path, name: str) -> None:
        self.server = PrivateServer(state, find_server(program(name)))

    def __enter__(self) -> Any:
        self.server.start()
        self.server.wait_ready()
        self.client = redis.Redis.from_url(self.server.url)
        return self.client

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.stop()


def fill(client: Any) -> None:
    """Every type small and large, expiries, and a stream with all that a stream can have."""
    client.set("epoch", "abc")
    client.set("bytes", bytes(range(256)))
    client.set("blob:large", bytes(range(256)) * 20_000)
    client.set("soon", "x", ex=FOR_AN_HOUR)
    client.hset("job:{m}:1", mapping={"state": "queued", b"\xff\x00": b"\x80"})
    client.hset("st:{m}", mapping={f"sequence{n}": bytes([n % 256]) * 3000 for n in range(700)})
    client.expire("st:{m}", FOR_AN_HOUR)
    client.sadd("jm", "a", "b")
    client.sadd("large", *(f"member{n}" * 10 for n in range(5000)))
    client.zadd("ja:{m}", {"one": 1795359339.123456, "two": float("inf"), "three": -0.1, "four": 1 / 3})
    client.zadd("jd:{m}", {f"{n:032x}": n / 7 for n in range(5000)})
    client.rpush("tk:{m}:01", b"b", b"a", b"", b"b", bytes(range(256)))
    client.rpush("tk:{m}:02", *(b"%d" % n * 20 for n in range(3001)))
    with client.pipeline(transaction=False) as pipeline:
        for number in range(3000):
            pipeline.xadd("q:{m}:0:0", {"r": bytes([number % 256]) * 500, "n": number}, id=f"{1000 + number}-1")
        pipeline.execute()
    client.xdel("q:{m}:0:0", "1005-1", "3999-1")
    client.xtrim("q:{m}:0:0", minid="1003-1")
    client.xadd("f:{empty}", {"x": "y"}, id="77-5")
    client.xdel("f:{empty}", "77-5")
    client.xadd("g", {"x": "1"}, id="1-0")
    for number in range(2, 30):
        client.xadd("g", {"x": number, "binary": b"\x00\xff\r\n"}, id=f"{number}-0")
    client.xgroup_create("g", "readers", "0")
    client.xgroup_create("g", "others", "9-0")
    client.xgroup_createconsumer("g", "others", "idle")
    client.xreadgroup("readers", "first", {"g": ">"}, count=10)
    client.xreadgroup("readers", "second", {"g": ">"}, count=5)
    client.xack("g", "readers", "3-0")
    client.xclaim("g", "readers", "second", 0, ["4-0"])
    client.xdel("g", "5-0", "12-0")
    client.xgroup_create("g", "counted", "20-0", entries_read=20)
    client.xgroup_create("only-group", "waiting", "0", mkstream=True)


def dump(client: Any) -> dict[bytes, Any]:
    """All that is in a log, in words of no server."""
    found: dict[bytes, Any] = {}
    for name in sorted(client.scan_iter(count=1000)):
        kind = client.type(name).decode()
        content: Any
        if kind == "string":
            content = client.get(name)
        elif kind == "hash":
            content = client.hgetall(name)
        elif kind == "set":
            content = client.smembers(name)
        elif kind == "zset":
            content = client.zrange(name, 0, -1, withscores=True)
        elif kind == "list":
            content = client.lrange(name, 0, -1)
        else:
            info = client.xinfo_stream(name)
            names = ("length", "last-generated-id", "max-deleted-entry-id", "entries-added", "recorded-first-entry-id")
            content = {"entries": client.xrange(name), **{each: info[each] for each in names}}
            for group in client.xinfo_groups(name):
                pending = client.xpending_range(name, group["name"], "-", "+", 1000)
                content[group["name"]] = (
                    {each: group[each] for each in ("last-delivered-id", "entries-read", "pending")},
                    sorted(consumer["name"] for consumer in client.xinfo_consumers(name, group["name"])),
                    [(one["message_id"], one["consumer"], one["times_delivered"]) for one in pending],
                )
        found[name] = (kind, client.pexpiretime(name), content)
    return found


def delivered_ms(client: Any) -> list[float]:
    """When the pending entries of a group were delivered."""
    now_ms = time.time() * 1000
    return [now_ms - one["time_since_delivered"] for one in client.xpending_range("g", "readers", "-", "+", 1000)]


def state(*words: str | Path) -> int:
    return run(["state", *map(str, words)], {}, lambda: "/nowhere")


@pytest.mark.parametrize("first", PROGRAMS)
def test_a_state_is_the_same_in_the_other_program_and_back(
    directory: Path, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    second = PROGRAMS[1 - PROGRAMS.index(first)]
    with Running(directory / "one", first) as client:
        fill(client)
    with Running(directory / "one", first) as client:  # Redis 7.0 forgets `entries-read` of some groups in a restart
        before, times_ms = dump(client), delivered_ms(client)
    assert len(before) == 16
    assert before[b"g"][2][b"counted"][0]["entries-read"] == 20
    assert state("export", directory / "a.state", "--state-dir", directory / "one") == 0
    other = ("--log-server", program(second))
    assert state("import", directory / "a.state", "--state-dir", directory / "two", *other) == 0
    with Running(directory / "two", second) as client:
        assert dump(client) == before
        assert delivered_ms(client) == pytest.approx(times_ms, abs=5000, rel=0)
    assert state("export", directory / "b.state", "--state-dir", directory / "two") == 0
    back = ("--log-server", program(first), "--replace", "--json")
    capsys.readouterr()
    assert state("import", directory / "b.state", "--state-dir", directory / "one", *back) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["keys"] == 16
    with Running(directory / "one", first) as client:
        assert dump(client) == before
        # streams go on behind what they have had, deleted entries included
        assert client.xadd("f:{empty}", {"a": "b"}, id="77-*") == b"77-6"
        with pytest.raises(redis.ResponseError, match="equal or smaller"):
            client.xadd("q:{m}:0:0", {"a": "b"}, id="3999-1")
    assert Path(told["replaced"]).is_dir()


def test_what_only_concerns_former_runs_stays_behind(directory: Path) -> None:
    with Running(directory / "one", "valkey") as client:
        for name in ("ctl", "x:executor-1", "r:gateway-1", "s:{m}:1:ab"):
            client.xadd(name, {"a": "b"})
        client.set("alive:gateway:g", "1", px=60_000)
        client.set("sl:{m}", "stays")
    assert state("export", directory / "a.state", "--state-dir", directory / "one") == 0
    assert state("import", directory / "a.state", "--state-dir", directory / "two") == 0
    with Running(directory / "two", "valkey") as client:
        assert client.keys() == [b"sl:{m}"]


def test_the_secret_of_webhooks_moves_with_a_state_and_nothing_else_does(directory: Path) -> None:
    with Running(directory / "one", "valkey") as client:
        client.set("epoch", "1")
    (directory / "one" / "webhook-secret").write_text("whsec_x\n")
    assert state("export", directory / "a.state", "--state-dir", directory / "one") == 0
    assert (directory / "a.state").stat().st_mode & 0o077 == 0
    assert state("import", directory / "a.state", "--state-dir", directory / "two") == 0
    assert (directory / "two" / "webhook-secret").read_text() == "whsec_x\n"
    assert (directory / "two" / "webhook-secret").stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in (directory / "two").iterdir()) == [
        "appendonlydir", "lock", "server.json", "server.stopped", "webhook-secret",
    ]  # fmt: skip


def test_a_log_by_url(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Running(directory / "one", "valkey") as client, Running(directory / "two", "valkey") as target:
        fill(client)
        client.xadd("ctl", {"a": "b"})
        before = dump(client)
        url = ["--log-url", "unix://" + str(directory / "one" / "server.sock")]
        to = ["--log-url", "unix://" + str(directory / "two" / "server.sock")]
        client.set("alive:gateway:gateway-1", "1", px=60_000)
        assert state("export", directory / "a.state", *url) == 1
        assert "is used by gateway-1: stop them first" in capsys.readouterr().err
        assert not (directory / "a.state").exists()
        client.delete("alive:gateway:gateway-1")
        assert state("export", directory / "a.state", *url) == 0
        target.set("in", "the way")
        assert state("import", directory / "a.state", *to) == 1
        assert "holds 1 keys; --replace deletes them first" in capsys.readouterr().err
        assert target.keys() == [b"in"]
        assert state("import", directory / "a.state", *to, "--replace") == 0
        assert dump(target) == before
        capsys.readouterr()
        assert state("show", *to, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["keys"], told["program"].split()[0], told["used_by"]) == (17, "Valkey", "")


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(directory: Path) -> Path:
    with Running(directory / "one", "valkey") as client:
        client.set("blob:1", bytes(20_000))
        client.hset("job:{m}:1", mapping={"state": "queued"})
        client.xadd("q:{m}:0:0", {"r": "x"})
    assert state("export", directory / "a.state", "--state-dir", directory / "one") == 0
    return directory / "a.state"


def test_nothing_is_overwritten_unasked(directory: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = exported.read_bytes()
    assert state("export", exported, "--state-dir", directory / "one") == 1
    assert f"'{exported}' exists; --overwrite replaces it" in capsys.readouterr().err
    assert exported.read_bytes() == before
    assert state("import", exported, "--state-dir", directory / "one") == 1
    assert "holds a state, written by Valkey 9" in capsys.readouterr().err
    assert state("export", exported, "--state-dir", directory / "one", "--overwrite") == 0
    assert [path.name for path in directory.iterdir() if path.name not in ("one", "a.state")] == []


def test_a_directory_in_use_is_refused_and_says_by_whom(
    directory: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Running(directory / "one", "valkey"):
        assert state("export", directory / "b.state", "--state-dir", directory / "one") == 1
    assert "is in use by another server: the log server (pid " in capsys.readouterr().err
    assert state("export", directory / "b.state", "--state-dir", directory / "none") == 1
    assert "there is no state in" in capsys.readouterr().err
    assert not (directory / "b.state").exists()


def reseal(content: bytes) -> bytes:
    """The file with a checksum that fits."""
    import hashlib

    return content + hashlib.blake2b(content, digest_size=32).digest()


MAGIC = b"CHARONIA STATE\n"


def framed(*frames: Any) -> bytes:
    packed = [msgpack.packb(frame) for frame in frames]
    return MAGIC + b"".join(len(each).to_bytes(4, "big") + each for each in packed) + bytes(4)


HEADER = {"format": 1}
END = ["e", {"keys": 1, "files": 0}]
STREAM = ["k", b"s", "stream", 0, []]
DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda content: content[:-100], "damaged or incomplete"),
    "empty": (lambda _: b"", "is no exported state"),
    "short": (lambda content: content[:20], "damaged or incomplete"),
    "flipped": (lambda content: content[:5000] + b"\x00\x01" + content[5002:], "damaged or incomplete"),
    "other": (lambda _: b"REDIS0010" * 10, "is no exported state"),
    "newer": (lambda _: reseal(framed({"format": 2, "charonia": "9.9"})), "format 2, written by charonia 9.9"),
    "no header": (lambda _: reseal(framed(["k"])), "has no header"),
    "no end": (lambda _: reseal(framed(HEADER)), "is not what it says"),
    "lost key": (lambda _: reseal(framed(HEADER, END)), "is not what it says"),
    "no msgpack": (lambda _: reseal(MAGIC + b"\0\0\0\1\xc1" + bytes(4)), "cannot be read"),
    "unhashable": (lambda _: reseal(MAGIC + b"\0\0\0\3\x81\x90\x01" + bytes(4)), "cannot be read"),
    "long frame": (lambda _: reseal(MAGIC + b"\xff\xff\xff\xff" + bytes(4)), "ends within a frame"),
    "type": (lambda _: reseal(framed(HEADER, ["k", b"x", "tree", 0, []], END)), "a frame that is not known"),
    "pairs": (lambda _: reseal(framed(HEADER, ["k", b"x", "hash", 0, [b"a"]], END)), "a frame that is not known"),
    "text": (lambda _: reseal(framed(HEADER, ["k", b"x", "string", 0, "a"], END)), "a frame that is not known"),
    "more": (lambda _: reseal(framed(HEADER, ["m", b"x"], END)), "a frame that is not known"),
    "path": (lambda _: reseal(framed(HEADER, ["f", "../x", b""], END)), "a frame that is not known"),
    "group": (
        lambda _: reseal(framed(HEADER, STREAM, ["s", {"last": b"1-0", "deleted": b"0-0", "added": 1, "groups": [1]}])),
        "a frame that is not known",
    ),
    "pending": (lambda _: reseal(framed(HEADER, STREAM, ["p", b"g", [1, 2, 3, 4]])), "a frame that is not known"),
}


def test_a_full_disk_is_one_sentence_and_leaves_no_file(directory: Path) -> None:
    """What is buffered cannot be written when the file is closed, either."""

    def write() -> None:
        with StateWriter(directory / "s", {}, overwrite=False) as writer:
            for number in range(100):
                writer.add(["k", b"%d" % number, "string", 0, bytes(1000)])

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(InvalidArgument, match="File too large"):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(directory.glob(".*"))


def test_records_that_are_nonsense_are_left_out(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "odd/appendonlydir").mkdir(parents=True)
    (directory / "odd/appendonlydir/appendonly.aof.manifest").touch()
    for name in ("server.json", "lost-writes-1.json"):
        (directory / "odd" / name).write_text("[]")
    assert state("show", "--state-dir", directory / "odd") == 0
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_file_changes_nothing(
    directory: Path, exported: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, says = DAMAGED[how]
    exported.write_bytes(change(exported.read_bytes()))
    before = sorted((directory / "one").rglob("*"))
    assert state("import", exported, "--state-dir", directory / "one", "--replace") == 1
    assert says in capsys.readouterr().err
    assert sorted((directory / "one").rglob("*")) == before


def test_what_the_log_refuses_leaves_no_half_state(
    directory: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ["k", b"s", "stream", 0, [b"5-0", [b"a", b"b"], b"4-0", [b"a", b"b"]]]
    exported.write_bytes(reseal(framed(HEADER, ["k", b"x", "string", 0, b"1"], key, ["e", {"keys": 2, "files": 0}])))
    with Running(directory / "two", "valkey") as client:
        to = ["--log-url", "unix://" + str(directory / "two" / "server.sock")]
        assert state("import", exported, *to) == 1
        assert "cannot be imported: the log answered" in capsys.readouterr().err
        assert client.dbsize() == 0
    assert state("import", exported, "--state-dir", directory / "three") == 1
    assert sorted(path.name for path in (directory / "three").iterdir()) == ["lock"]


def test_keys_that_expire_expire_at_the_same_time_after_an_import(directory: Path) -> None:
    """Of every type, small and large."""
    with Running(directory / "one", "valkey") as client:
        client.set("c:small", "x")
        client.set("blob:large", bytes(3_000_000))
        client.hset("job:{m}:1", mapping={"state": "completed"})
        client.hset("st:{m}", mapping={f"sequence{n}": bytes(3000) for n in range(100)})
        client.sadd("jm", "a")
        client.sadd("large", *(f"member{n}" * 10 for n in range(3000)))
        client.zadd("oba", {"one": 1})
        client.zadd("usm", {f"{n:032x}": n for n in range(3000)})
        client.rpush("tk:{m}:01", "a")
        client.rpush("tk:{m}:02", *("a" * 40 for _ in range(3000)))
        client.xadd("ofl:e:t", {"a": "b"})
        for _ in range(40):
            client.xadd("jr:{m}:1", {"r": bytes(3000)})
        for number, name in enumerate(names := sorted(client.keys())):
            client.expire(name, FOR_AN_HOUR + number)
        before = dump(client)
    assert state("export", directory / "a.state", "--state-dir", directory / "one") == 0
    assert state("import", directory / "a.state", "--state-dir", directory / "two") == 0
    with Running(directory / "two", "valkey") as client:
        assert dump(client) == before
    assert len(names) == len({expires_ms for _, expires_ms, _ in before.values() if expires_ms > 0}) == 12


class Overtaken:
    """A connection to a log in which a key's time is over just before the command that begins so."""

    def __init__(self, connection: Any, name: str, command: tuple[str, ...]) -> None:
        self._connection, self._name, self._command = connection, name, command

    async def execute(self, *words: Any) -> Any:
        if words[: len(self._command)] == self._command:
            await self._connection.execute("PEXPIREAT", self._name, 1)
        return await self._connection.execute(*words)

    async def execute_all(self, *pieces: Any) -> Any:
        return await self._connection.execute_all(*pieces)


@pytest.mark.parametrize("command", [("XINFO", "STREAM"), ("XINFO", "GROUPS"), ("XRANGE",), ("XINFO", "CONSUMERS")])
async def test_a_stream_whose_time_is_over_while_it_is_exported_is_left_out(
    directory: Path, command: tuple[str, ...]
) -> None:
    """The log refuses questions about a stream that is gone. An ended job of a decoupled model has one that expires."""
    file = directory / "a.state"
    with Running(directory / "one", "valkey") as client:
        client.xadd("jr:{m}:1", {"r": "x"})
        client.xgroup_create("jr:{m}:1", "readers", "0")
        client.expire("jr:{m}:1", FOR_AN_HOUR)
        for number in range(20):
            client.xadd(f"q:{{m}}:0:{number}", {"r": "x"})
        connection = Connection(parse_address("unix://" + str(directory / "one" / "server.sock")), name="test")
        await connection.open()
        try:
            with StateWriter(file, {}, overwrite=False) as writer:
                overtaken: Any = Overtaken(connection, "jr:{m}:1", command)
                await export_keys(overtaken, writer, lambda _name: False, lambda _done, _all: None)
                writer.finish()
        finally:
            await connection.close()
    assert await asyncio.to_thread(state, "import", file, "--state-dir", directory / "two") == 0
    with Running(directory / "two", "valkey") as client:
        assert len(client.keys("q:*")) == 20


def test_a_key_that_no_log_has_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Running(directory / "one", "valkey") as client:
        client.rpush("other:list", "x")
    assert state("export", directory / "a.state", "--state-dir", directory / "one") == 1
    assert "the key 'other:list' is a list: no log of charonia has such" in capsys.readouterr().err
    assert not [path for path in directory.iterdir() if path.name != "one"]


def test_keys_whose_time_is_over_are_left_out(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    past = ["k", b"past", "hash", 1000, [b"a", b"b"]]
    kept = ["k", b"kept", "string", int(time.time() * 1000) + 60_000, b"v"]
    file = directory / "a.state"
    file.write_bytes(reseal(framed(HEADER, past, ["m", [b"c", b"d"]], kept, ["e", {"keys": 2, "files": 0}])))
    assert state("import", file, "--state-dir", directory / "one") == 0
    assert "1 keys were left out, their time is over" in capsys.readouterr().out
    with Running(directory / "one", "valkey") as client:
        assert (client.keys(), 0 < client.ttl("kept") <= 60) == ([b"kept"], True)
