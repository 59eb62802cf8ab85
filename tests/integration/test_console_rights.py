"""The console as containers run it: signed in to the log as its user `operator`, who may read all that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("jinja2")

from console_bench import AT, MODEL, Browser, bury, call, opened, run, submit
from guarded_server import GuardedServer

from charonia import keys
from charonia.console.live_pages import REGIONS
from charonia.console.viewers import Viewer
from charonia.eventlog.redis import RedisLog
from charonia.facts.events import FIELD_FACT, ProcessJoined, pack_fact
from charonia.facts.stream_notes import StreamsNote
from gateway.webhooks.deliveries import Delivery, keep

pytestmark = pytest.mark.integration


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GuardedServer]:
    guarded = GuardedServer(tmp_path)
    guarded.start()
    yield guarded
    guarded.stop()


async def test_the_logs_operator_may_read_every_page(server: GuardedServer) -> None:
    async for log in opened(f"redis://watcher:watcher@127.0.0.1:{server.port}"):
        ended = await submit(log, "acme", webhook={"url": "https://hooks.example/", "events": []})
        await run(log, ended)
        (record,) = await log.jobs(MODEL, ended=True)
        await keep(log, record, Delivery())
        waiting, queued, buried = await submit(log, "acme"), await call(log, "acme"), await bury(log)
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(ProcessJoined("gateway", "gateway-1"))])
        await log.put_note(keys.open_streams("gateway-1"), StreamsNote(1, 1).pack(), 600)
        operator = RedisLog(f"redis://operator:operator's%3Apassword@127.0.0.1:{server.port}")
        await operator.open()
        browser = Browser(operator)
        try:
            requests = [f"/requests/{AT}/{one.hex()}" for one in (ended, waiting, queued)]
            letters = ["/dead-letters", f"/dead-letters/{AT}/{buried.hex()}"]
            for path in ("/", "/models", f"/models/{AT}", "/jobs", "/streams", *requests, *letters):
                assert (await browser.get(path)).status_code == 200, path
            for page in REGIONS:
                live = browser.app.live_events(page, {"model": MODEL, "id": waiting.hex()}, Viewer())
                assert await browser.region(live, REGIONS[page][0]), page
                await live.aclose()  # type: ignore[attr-defined]
            assert (await browser.request("GET", "/health/ready", root="")).status_code == 200
        finally:
            await browser.close()
            await operator.close()
    refused = [one for one in server.refusals() if not one.endswith("command config|get")]
    assert not refused
