"""What the progress of requests is in the log: the keys and values that later releases must read, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from charonia import keys
from charonia.eventlog.port import Limits, ProgressPart
from charonia.eventlog.redis import open_log

pytestmark = pytest.mark.integration

ID = bytes(range(16))
NAME = "tk:{m}:000102030405060708090a0b0c0d0e0f"


def _calls(client: Any) -> int:
    return sum(int(one["calls"]) for name, one in client.info("commandstats").items() if name != "cmdstat_info")


async def test_a_list_for_each_request_and_a_set_of_their_ids(fresh_log_url: str, log_client: Callable[[], Any]) -> None:
    log = open_log(fresh_log_url)
    await log.open()
    with log_client() as client:
        await log.accept("m", 0, 0, [(ID, 1)], [b"r", b"x"], Limits())
        assert await log.append_progress("m", [ProgressPart(ID, 1, 0, [b"\1\0", b""])]) == [2]
        assert client.lrange(NAME, 0, -1) == [b"\1\0", b""]
        assert client.smembers("tk:{m}") == {ID}
        assert client.hget("n:{m}", "tk") == b"1"
        assert await log.settle("m", [(ID, 1)], None, []) == [True]
        assert client.keys("tk:*") == []
        # one that older releases have settled: they do not know of it
        client.rpush(NAME, b"late")
        client.sadd("tk:{m}", ID)
        assert await log.progress_ids("m") == [ID]
        await log.drop_progress("m", [ID])
        assert client.keys("tk:*") == []
    await log.close()


async def test_other_models_do_not_pay(fresh_log_url: str, log_client: Callable[[], Any]) -> None:
    """A settlement runs as many commands as before, unless a request of its model ever had progress."""
    log = open_log(fresh_log_url)
    await log.open()
    counts: dict[str, int] = {}
    with log_client() as client:
        for model in ("plain", "resumable"):
            for number in range(2):
                one = bytes(15) + bytes([number])
                await log.accept(model, 0, 0, [(one, 1)], [b"r", b"x"], Limits())
                if model == "resumable":
                    assert await log.append_progress(model, [ProgressPart(one, 1, 0, [b"a"])]) == [1]
                before = _calls(client)
                assert await log.settle(model, [(one, 1)], None, []) == [True]
                counts[model] = _calls(client) - before
        assert not client.hexists(keys.counters("plain"), "tk")
    # EVALSHA, HGET, HDEL, HMGET, HSET; then SREM and UNLINK
    assert counts == {"plain": 5, "resumable": 7}
    await log.close()
