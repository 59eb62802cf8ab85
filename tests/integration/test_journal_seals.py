"""The chain of a journal in a real log: tampered with, and carried to another server as a state."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from batcher.housekeeping.journal_sealing import JournalSealing
from charonia import keys
from charonia.eventlog.embedded import PrivateServer, find_server, wheel_binary
from charonia.eventlog.port import Limits
from charonia.eventlog.redis import open_log
from charonia.facts.events import FIELD_FACT, RepositoryScanned, pack_fact
from charonia.operations.command_line import run

pytestmark = pytest.mark.integration

MODEL = "identity"


def lived(url: str, requests: int) -> None:
    """Accept and end requests, and seal what the journal says of them."""

    async def live() -> None:
        log = open_log(url)
        await log.open()
        try:
            scanned = RepositoryScanned("executor-1", (MODEL,), "none", True)
            await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(scanned)])
            sealing = JournalSealing(log, MODEL)
            for number in range(requests):
                request_id = b"%016d" % number
                await log.accept(MODEL, 0, 0, [(request_id, 5)], [b"r", b"x"], Limits(), journalled=True)
                assert await log.settle(MODEL, [(request_id, 0)], None, [], outcomes=b"s") == [True]
                while await sealing.seal():
                    pass
        finally:
            await log.close()

    asyncio.run(live())


def verified(url: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    """The exit code of `charonia audit --verify` and what it says of the model."""
    capsys.readouterr()
    code = run(["audit", "--verify", "--json", "--model", MODEL, "--log-url", url], {}, str)
    (model,) = json.loads(capsys.readouterr().out)["models"]
    return code, model


def test_a_changed_entry_of_a_real_log_is_found(
    fresh_log_url: str, log_client: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    lived(fresh_log_url, 4)
    code, model = verified(fresh_log_url, capsys)
    assert (code, model["sealed"], model["last_seal"], model["unsealed"]) == (0, 8, 4, 0)

    with log_client() as client:
        entries = client.xrange(keys.journal(MODEL))
        changed, values = entries[5]
        values[b"f"] = values[b"f"].replace(b"s", b"f")
        client.delete(keys.journal(MODEL))
        for entry_id, fields in entries:
            client.xadd(keys.journal(MODEL), fields, id=entry_id)
    code, model = verified(fresh_log_url, capsys)
    assert (code, model["intact"], model["sealed"], model["broken"]["fault"]) == (1, False, 4, "entries_changed")
    assert (model["broken"]["first"], model["broken"]["last"]) == (entries[4][0].decode(), changed.decode())


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="charonia-test-"))
    yield path
    shutil.rmtree(path)


def test_a_moved_state_has_its_chain(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, heads = directory / "state", []
    for name in ("one", "other"):
        server = PrivateServer(directory / name, find_server(wheel_binary()))
        if heads:
            assert run(["state", "import", str(file), "--state-dir", str(directory / name)], {}, str) == 0
        server.start()
        try:
            server.wait_ready()
            if not heads:
                lived(server.url, 3)
                with redis.Redis.from_url(server.url) as client:  # as after a trim
                    client.hset(keys.counters(MODEL), "journal_trimmed", 1)
                    first = client.xrange(keys.journal_seals(MODEL), count=1)[0][0].decode()
                    milliseconds, _, number = first.partition("-")
                    client.xtrim(keys.journal(MODEL), minid=f"{milliseconds}-{int(number) + 1}", approximate=False)
            code, model = verified(server.url, capsys)
            assert (code, model["sealed"], model["last_seal"]) == (0, 4, 3)
            heads.append(model["head"])
        finally:
            server.stop()
        if len(heads) == 1:
            assert run(["state", "export", str(file), "--state-dir", str(directory / name)], {}, str) == 0
    assert heads[0] == heads[1]
