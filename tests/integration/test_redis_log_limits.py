"""`RedisLog` against a real server that is full, slow, guarded or not there, and how it is closed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from pathlib import Path

import pytest
from own_server import PATIENCE_S, admin

from charonia import keys
from charonia.errors import InvalidArgument, LogUnavailable, StartupError
from charonia.eventlog import port
from charonia.eventlog.embedded import PrivateServer
from charonia.eventlog.port import Limits, ProgressPart, Reply
from charonia.eventlog.redis import RedisLog

pytestmark = pytest.mark.integration


async def test_a_full_server_refuses_work_as_a_whole_and_still_settles(server: PrivateServer, log: RedisLog) -> None:
    await log.accept("m", 0, 0, [(b"a", 1)], [b"r", b"x"], Limits())
    await admin(server, "CONFIG", "SET", "maxmemory", "1")

    with pytest.raises(LogUnavailable, match="OOM"):
        await log.accept("m", 0, 0, [(b"b", 1)], [b"r", b"x"], Limits())
    assert await log.pending("m") == (1, 1)
    assert await log.settle("m", [(b"a", 0)], None, []) == [True]
    assert await log.pending("m") == (0, 0)


async def test_statistics_that_cannot_be_kept_do_not_hide_the_settlement(server: PrivateServer, log: RedisLog) -> None:
    await log.accept("m", 0, 0, [(b"a", 1)], [b"r", b"x"], Limits())
    await admin(server, "SET", "s", "no hash")

    assert await log.settle("m", [(b"a", 0)], (b"s", {"n": 1, "last_ns": 7}), []) == [True]
    with pytest.raises(LogUnavailable, match="WRONGTYPE"):
        await log.add_statistics(b"s", {"n": 1})

    await log.accept("m", 0, 0, [(b"b", 1)], [b"r", b"x"], Limits())
    await log.delete_keys([b"s"])
    await admin(server, "HSET", "s", "n", "no number", "full", str(2**63 - 1))
    assert await log.settle("m", [(b"b", 0)], (b"s", {"n": 1, "full": 1, "ok": 3}), []) == [True]
    assert await admin(server, "HGET", "s", "ok") == b"3"
    assert await admin(server, "HGET", "s", "full") == b"%d" % (2**63 - 1)


async def test_a_slow_server_holds_writers_back_and_loses_nothing(server: PrivateServer, log: RedisLog) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    payload = os.urandom(1_000_000)
    calls = [asyncio.ensure_future(log.append(b"s", [b"r", b"%d" % n, b"r", payload])) for n in range(20)]
    done, _ = await asyncio.wait(calls, timeout=0.05)
    assert not done
    os.kill(server.pid, signal.SIGCONT)
    ids = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)

    entries = await log.range(b"s")
    assert sorted(entry.id for entry in entries) == sorted(ids)
    assert all(entry.fields[3] == payload for entry in entries)


async def test_signing_in_and_databases(server: PrivateServer) -> None:
    await admin(server, "ACL", "SETUSER", "worker", "on", ">se/cret", "~*", "+@all")
    path = server.url.removeprefix("unix://")
    good = RedisLog(f"unix://worker:se%2Fcret@{path}?db=3")
    await good.open()
    await good.append(b"s", [b"r", b"x"])
    plain = RedisLog(server.url)
    await plain.open()
    assert await plain.range(b"s") == []
    await plain.close()
    await good.close()

    with pytest.raises(StartupError, match="refused the user name or password") as caught:
        await RedisLog(f"unix://worker:wrong@{path}").open()
    assert "wrong@" not in str(caught.value)
    await admin(server, "ACL", "SETUSER", "default", "resetpass", ">needed")
    for url in (server.url, f"unix://:another@{path}?db=3"):
        with pytest.raises(StartupError, match="refused the user name or password"):
            await RedisLog(url).open()
    log = RedisLog(f"unix://:needed@{path}")
    await log.open()
    await log.close()


async def test_nobody_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"the event log at unix://.*none\.sock cannot be reached"):
        await RedisLog(f"unix://{tmp_path}/none.sock").open()
    with pytest.raises(StartupError, match=r"the event log at redis://127\.0\.0\.1:1/0 cannot be reached"):
        await RedisLog("redis://user:secret@127.0.0.1:1").open()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://x", "must begin with"),
        ("unix://", "names no socket path"),
        ("redis://h/x", "names the database 'x', which is no number"),
        ("redis://h:99999", "cannot be read"),
        ("rediss://h?ssl_ca_certs=/none", "certificate"),
    ],
)
def test_urls_that_say_nothing_are_refused(url: str, sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        RedisLog(url)


async def test_closing_flushes_and_then_refuses(server: PrivateServer) -> None:
    log = RedisLog(server.url)
    await log.open()
    call = asyncio.ensure_future(log.append(b"s", [b"r", b"x"]))
    await asyncio.sleep(0)
    await log.close()
    await asyncio.gather(call, return_exceptions=True)

    with pytest.raises(LogUnavailable, match="closed"):
        await log.append(b"s", [b"r", b"x"])


async def test_entries_go_by_the_names_of_the_key_table(server: PrivateServer, log: RedisLog) -> None:
    await log.accept("m", 1, 2, [(b"a", 10)], [b"r", b"x"], Limits())
    await log.take_ownership("m", "me", "")
    await log.beat("batcher", "me", 60_000)
    await log.put_blob("b", b"x", 60)

    found = await admin(server, "KEYS", "*")
    assert isinstance(found, list)
    assert set(found) == {
        keys.queue("m", 1, 2),
        keys.lanes("m"),
        keys.unsettled("m"),
        keys.counters("m"),
        keys.facts("m"),
        keys.alive("batcher", "me"),
        keys.blob("b"),
    }


async def test_a_string_that_the_server_would_not_take_is_refused_before_it_is_sent(
    server: PrivateServer, log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server would end the connection, and with it what others have sent on that."""
    most = 1 << 20
    await admin(server, "CONFIG", "SET", "proto-max-bulk-len", str(most))
    monkeypatch.setattr(port, "MAX_STRING_BYTES", most)
    above = bytes(most + 1)
    text = f"{most + 1} bytes are more than the event log takes at once \\({most}\\)"
    await log.accept("m", 0, 0, [(b"a", 1)], [b"r", b"x"], Limits())

    async def refused(call: Awaitable[object]) -> None:
        with pytest.raises(InvalidArgument, match=text):
            await call

    def end_now() -> bool:
        return log.settle_now("m", [(b"a", 0)], None, [Reply(b"s", [b"r", above])], [], lambda _outcome: None)

    part = ProgressPart(b"a", 0, 0, [above])
    small = [asyncio.ensure_future(log.append(b"s", [b"r", b"%d" % n])) for n in range(10)]
    await refused(log.append(b"s", [b"r", above]))
    await refused(log.accept("m", 0, 0, [(b"b", 1)], [b"r", above], Limits()))
    await refused(log.put_blob("b", above, 60))
    await refused(log.append_progress("m", [part]))
    await refused(log.settle("m", [(b"a", 0)], None, [Reply(b"s", [b"r", above])]))
    with pytest.raises(InvalidArgument, match=text):
        end_now()
    await asyncio.wait_for(asyncio.gather(*small), PATIENCE_S)
    assert await log.pending("m") == (1, 1)
    await log.append(b"s", [b"r", above[:most]])
    assert [len(entry.fields[1]) for entry in await log.range(b"s")] == [1] * 10 + [most]
