"""The console's pages over a real log: what they show, to whom, and that they change nothing."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from console_bench import AT, KEYS, MODEL, Browser, bury, opened, run, submit

from charonia import keys
from charonia.composition.console.console_role import identification, metrics_reader
from charonia.console.viewers import EVERYTHING, Viewer
from charonia.console.web_app import POLICY
from charonia.eventlog.port import EventLog
from charonia.facts.events import FIELD_FACT, ProcessJoined, pack_fact
from charonia.facts.stream_notes import StreamRow, StreamsNote
from charonia.options.values import CONSOLE, parse

pytestmark = pytest.mark.integration


@pytest.fixture
async def log(fresh_log_url: str) -> AsyncIterator[EventLog]:
    async for log in opened(fresh_log_url):
        yield log


@pytest.fixture
async def browser(log: EventLog) -> AsyncIterator[Browser]:
    made = Browser(log)
    yield made
    await made.close()


async def test_the_overview_shows_models_executors_and_the_log(log: EventLog, browser: Browser) -> None:
    await submit(log)
    page = await browser.get("/")
    assert page.status_code == 200
    assert page.headers["content-security-policy"] == POLICY
    assert page.headers["x-content-type-options"] == "nosniff"
    assert f'<a href="/console/models/{AT}">{MODEL}</a>' in page.text
    assert "executor-1" in page.text
    assert "&lt;b&gt;host&lt;/b&gt;" in page.text
    assert "Log memory" in page.text
    assert '<div class="value">1 of 1</div>' in page.text


async def test_the_model_page_shows_config_statistics_and_queue(log: EventLog, browser: Browser) -> None:
    waiting = await submit(log, "acme")
    page = await browser.get(f"/models/{AT}")
    assert page.status_code == 200
    for shown in ("max_batch_size", "TYPE_FP32", "3 s", waiting.hex(), "acme"):
        assert shown in page.text
    rows = page.text.split("Sizes of executed batches")[1].split("</section>")[0]
    assert '<th scope="row">4</th>' in rows
    assert (await browser.get("/models/other")).status_code == 404


async def test_a_jobs_page_tells_with_whom_it_ran(log: EventLog, browser: Browser) -> None:
    first, second = await submit(log), await submit(log)
    await run(log, first, second)
    listed = await browser.get("/jobs?state=succeeded")
    assert f"/console/requests/{AT}/{first.hex()}" in listed.text
    page = await browser.get(f"/requests/{AT}/{first.hex()}")
    assert page.status_code == 200
    assert f"/console/requests/{AT}/{second.hex()}" in page.text
    for shown in ("accepted", "batched", "with 1 other request", "succeeded", "delivered", "executor-1"):
        assert shown in page.text
    found = await browser.get(f"/find?id={first.hex()}.{AT}")
    assert (found.status_code, found.headers["location"]) == (303, f"/console/requests/{AT}/{first.hex()}")
    assert (await browser.get(f"/requests/{AT}/{bytes(16).hex()}")).status_code == 404
    assert (await browser.get("/jobs?state=strange")).status_code == 200


async def test_dead_letters_show_what_was_asked(log: EventLog, browser: Browser) -> None:
    buried = await bury(log)
    listed = await browser.get("/dead-letters")
    link = re.search(rf'"/console(/dead-letters/{AT}/[0-9]+-[0-9]+)" title="{buried.hex()}"', listed.text)
    assert link is not None
    for path in (link[1], f"/dead-letters/{AT}/{buried.hex()}"):
        page = await browser.get(path)
        assert page.status_code == 200
        for shown in ("it &lt;i&gt;died&lt;/i&gt;", "last words", "1 × 16", "0.0, 1.0, 2.0"):
            assert shown in page.text


async def test_live_updates_carry_regions_and_points(log: EventLog, browser: Browser) -> None:
    events = browser.app.live_events("overview", "", EVERYTHING)
    kind, data = (await anext(events)).decode().split("\n")[:2]
    assert kind == "event: update"
    document = json.loads(data.removeprefix("data: "))
    assert set(document["regions"]) == {"tiles", "models_table", "executors"}
    assert [len(column) for column in document["history"]] == [1] * 5
    second = json.loads((await anext(events)).decode().split("\n")[1].removeprefix("data: "))
    assert len(second["point"]) == 5
    await events.aclose()  # type: ignore[attr-defined]
    of_model = browser.app.live_events("model", MODEL, Viewer("acme", scoped=True))
    assert b"model_batches" in await anext(of_model)
    await of_model.aclose()  # type: ignore[attr-defined]
    assert (await browser.get("/live?page=jobs")).status_code == 404


async def test_nothing_can_be_changed(log: EventLog, browser: Browser) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/jobs", "/actions/pause"):
            refused = await browser.request(method, path)
            assert refused.status_code == 405
            assert "started without --console-actions" in refused.text
        assert refused.headers["content-security-policy"] == POLICY
    assert (await browser.get("/static/console.js")).status_code == 200
    assert (await browser.get("/static/../web_app.py")).status_code == 404


async def test_a_tenant_sees_its_own_work_alone(log: EventLog, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    mine, theirs = await submit(log, "acme"), await submit(log, "umbrella")
    buried = await bury(log, "umbrella")
    browser = Browser(log, identification(parse(CONSOLE, [f"--api-keys={file}"], {}, {})))
    try:
        refused = await browser.get("/")
        assert (refused.status_code, refused.headers["www-authenticate"][:5]) == (401, "Basic")
        assert (await browser.get("/live", authorization="Bearer wrong")).status_code == 401
        typed = "Basic " + base64.b64encode(b"anyone:key of acme").decode()
        for path in ("/jobs", f"/models/{AT}"):
            page = await browser.get(path, authorization=typed)
            assert page.status_code == 200
            assert mine.hex() in page.text
            assert theirs.hex() not in page.text
            assert "umbrella" not in page.text
        assert (await browser.get(f"/requests/{AT}/{mine.hex()}", authorization=typed)).status_code == 200
        for path in (f"/requests/{AT}/{theirs.hex()}", f"/dead-letters/{AT}/{buried.hex()}"):
            assert (await browser.get(path, authorization=typed)).status_code == 404
        own = await bury(log, "acme")
        letter = await browser.get(f"/dead-letters/{AT}/{own.hex()}", authorization=typed)
        assert letter.status_code == 200
        assert "last words" not in letter.text  # the instance may have written about requests of others
        await run(log, mine, theirs)
        story = await browser.get(f"/requests/{AT}/{mine.hex()}", authorization=typed)
        assert "1 other" in story.text
        assert theirs.hex() not in story.text
        letters = await browser.get("/dead-letters", **{"x-api-key": "key of umbrella"})
        assert buried.hex() in letters.text
    finally:
        await browser.close()


async def test_metrics_that_do_not_answer_are_left_out(tmp_path: Path) -> None:
    assert await metrics_reader([f"unix:{tmp_path}/none", "http://127.0.0.1:1/metrics"])() == ""


async def test_open_streams_are_those_that_gateways_publish(log: EventLog, browser: Browser) -> None:
    assert "No stream is open." in (await browser.get("/streams")).text
    mine = StreamRow(MODEL, 1, "acme", "<mine>", 1_000_000, 2_000_000, 41)
    theirs = StreamRow(MODEL, 1, "umbrella", "theirs", 3_000_000, 0, 0)
    for number in (1, 2):
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(ProcessJoined("gateway", f"gateway-{number}"))])
    await log.put_note(keys.open_streams("gateway-1"), StreamsNote(1, 1, (theirs,)).pack(), 600)
    await log.put_note(keys.open_streams("gateway-2"), StreamsNote(300, 1, (mine,)).pack(), 600)
    events = browser.app.live_events("streams", "", EVERYTHING)
    regions = json.loads((await anext(events)).decode().split("\n")[1].removeprefix("data: "))["regions"]
    shown = regions["streams_table"]
    for words in ("301 open streams at 2 gateways", "&lt;mine&gt;", "41", "acme", "umbrella", "1970-01-01 00:00:01"):
        assert words in shown
    assert shown.index("acme") < shown.index("umbrella")  # the one that is open the longest first
    of_acme = browser.app.live_events("streams", "", Viewer("acme", scoped=True))
    shown = (await anext(of_acme)).decode()
    assert "&lt;mine&gt;" in shown
    assert "theirs" not in shown
    assert "301" not in shown
    for live in (events, of_acme):
        await live.aclose()  # type: ignore[attr-defined]
