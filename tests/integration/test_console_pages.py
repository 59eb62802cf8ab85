"""The console's pages over a real log: what they show, to whom, and that they change nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from console_bench import AT, KEYS, MODEL, Browser, bury, call, opened, run, submit

from charonia import keys
from charonia.composition.console.console_role import identification, read_statistics
from charonia.composition.console.metric_pages import metrics_reader
from charonia.console.log_views import model_page
from charonia.console.viewers import OPERATOR, Viewer
from charonia.console.web_app import POLICY
from charonia.errors import LogUnavailable
from charonia.eventlog.port import EventLog
from charonia.facts.events import FIELD_FACT, ProcessJoined, pack_fact
from charonia.facts.stream_notes import StreamRow, StreamsNote
from charonia.operations.route_commands import change_route
from charonia.options.values import CONSOLE, parse
from charonia.releases.route_rule import RouteRule, route_fact
from gateway.webhooks.deliveries import Delivery, DeliveryState, keep

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


async def test_the_model_page_shows_its_routing_rule(log: EventLog, tmp_path: Path) -> None:
    """Values of headers are for who may change the rule, other tenants' names for no tenant."""
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    changes = Browser(log, actions=True)
    reads, tenant = Browser(log), Browser(log, identification(parse(CONSOLE, [f"--api-keys={file}"], {}, {})))
    acme = {"x-api-key": "key of acme"}
    try:
        assert "Routing rule" not in (await reads.get(f"/models/{AT}")).text
        wanted = {"candidate": 3, "share": 10, "headers": {"x-canary": "hush"}, "tenants": ["acme", "umbrella"]}
        await change_route(log, MODEL, wanted)
        rule = "Routing rule (canary): version 1 gets requests that name no version; version 3 gets 10%, "
        page = (await changes.get(f"/models/{AT}")).text
        assert f"{rule}x-canary=hush, tenant acme, tenant umbrella." in page
        assert "Version 3 is not served: the present version gets its requests until it is." in page
        assert "1 change<" in page
        assert "<td>operator</td>" in page
        page = (await reads.get(f"/models/{AT}")).text
        assert f"{rule}header x-canary, tenant acme, tenant umbrella." in page
        assert "hush" not in page
        page = (await tenant.get(f"/models/{AT}", **acme)).text
        assert f"{rule}header x-canary, tenant acme." in page
        assert "hush" not in page
        assert "umbrella" not in page
    finally:
        for browser in (changes, reads, tenant):
            await browser.close()


@pytest.mark.parametrize(
    ("present", "shadow", "said"),
    [
        (1, 0, []),
        (2, 0, ["version 2 is not served: version 1 gets its requests"]),
        (1, 4, ["version 4 is not served: it gets no copies until it is"]),
    ],
)
async def test_a_routing_rule_says_which_of_its_versions_are_missing(
    log: EventLog, present: int, shadow: int, said: list[str]
) -> None:
    await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(route_fact(MODEL, 1, RouteRule(present, shadow=shadow)))])
    page = await model_page(log, MODEL, OPERATOR, read_statistics)
    assert page["route"]["missing"] == said


async def test_a_jobs_page_tells_with_whom_it_ran(log: EventLog, browser: Browser) -> None:
    first, second = await submit(log), await submit(log)
    await run(log, first, second)
    listed = await browser.get("/jobs?state=succeeded")
    assert f"/console/requests/{AT}/{first.hex()}" in listed.text
    page = await browser.get(f"/requests/{AT}/{first.hex()}")
    assert page.status_code == 200
    assert f"/console/requests/{AT}/{second.hex()}" in page.text
    for shown in ("accepted", "batched", "with 1 other request", "succeeded", "executor-1"):
        assert shown in page.text
    assert "no caller is known to have asked for it" in page.text
    assert "delivered" not in page.text
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
    events = browser.app.live_events("overview", {}, Viewer())
    kind, data = (await anext(events)).decode().split("\n")[:2]
    assert kind == "event: update"
    document = json.loads(data.removeprefix("data: "))
    assert set(document["regions"]) == {"tiles", "models_table", "executors"}
    assert [len(column) for column in document["history"]] == [1] * 5
    second = json.loads((await anext(events)).decode().split("\n")[1].removeprefix("data: "))
    assert len(second["point"]) == 5
    await events.aclose()  # type: ignore[attr-defined]
    of_model = browser.app.live_events("model", {"model": MODEL}, Viewer("acme", scoped=True))
    assert b"model_batches" in await anext(of_model)
    await of_model.aclose()  # type: ignore[attr-defined]
    assert (await browser.get("/live?page=letter")).status_code == 404


async def test_lists_of_jobs_and_dead_letters_are_live(log: EventLog, browser: Browser) -> None:
    first = await submit(log)
    live = browser.app.live_events("jobs", {"state": "queued"}, Viewer())
    _, shown = await browser.event(live)
    assert set(shown) == {"regions"}  # there is nothing to plot
    assert first.hex()[:12] in shown["regions"]["jobs_table"]
    await run(log, first)
    second = await submit(log)
    while second.hex()[:12] not in (table := await browser.region(live, "jobs_table")):
        pass
    assert first.hex()[:12] not in table
    letters = browser.app.live_events("letters", {}, Viewer())
    assert "There are none." in await browser.region(letters, "letters_table")
    buried = await bury(log)
    while buried.hex() not in await browser.region(letters, "letters_table"):
        pass
    page = (await browser.get("/jobs?state=queued&model=a+model")).text
    assert 'data-asked="page=jobs&amp;model=a+model&amp;state=queued&amp;after="' in page
    for events in (live, letters):
        await events.aclose()  # type: ignore[attr-defined]


async def test_a_request_is_followed_to_its_end(log: EventLog, browser: Browser) -> None:
    job = await submit(log, "acme")
    asked = {"model": MODEL, "id": job.hex()}
    live = browser.app.live_events("request", asked, Viewer("acme", scoped=True))
    assert "state-queued" in await browser.region(live, "request_state")
    page = (await browser.get(f"/requests/{AT}/{job.hex()}")).text
    assert f'data-asked="page=request&amp;model=a+model&amp;id={job.hex()}"' in page
    await run(log, job)
    kind = ""
    while kind != "ended":
        kind, shown = await browser.event(live)
    assert "state-succeeded" in shown["regions"]["request_state"]
    assert [event async for event in live] == []
    assert 'id="live"' not in (await browser.get(f"/requests/{AT}/{job.hex()}")).text
    others = browser.app.live_events("request", asked, Viewer("umbrella", scoped=True))
    assert (await browser.event(others))[0] == "problem"
    await others.aclose()  # type: ignore[attr-defined]


async def test_a_call_of_a_webhook_is_in_the_timeline(log: EventLog, browser: Browser) -> None:
    job = await submit(log, webhook={"url": "https://hooks.example/", "events": ["succeeded"]})
    await run(log, job)
    page = (await browser.get(f"/requests/{AT}/{job.hex()}")).text
    assert "its webhook is pending, and was not called yet" in page
    (record,) = await log.jobs(MODEL, ended=True)
    called = Delivery(DeliveryState.DELIVERED, 2, 204, "", record.ended_us + 5_000_000)
    await keep(log, record, called)
    page = (await browser.get(f"/requests/{AT}/{job.hex()}")).text
    (told,) = re.findall(r'<th scope="row">delivered</th><td[^>]*>([^<]*)</td>', page)
    assert told == "attempt 2 to call its webhook answered 204"


async def test_queued_calls_are_shown_with_their_tenants(log: EventLog, browser: Browser) -> None:
    mine, theirs, job = await call(log, "acme"), await call(log, "umbrella"), await submit(log, "acme")
    page = (await browser.get(f"/models/{AT}")).text
    assert '<th scope="row">acme</th><td class="number">2</td>' in page
    assert '<th scope="row">umbrella</th><td class="number">1</td>' in page
    assert f'href="/console/requests/{AT}/{theirs.hex()}"' in page
    of_acme = browser.app.live_events("model", {"model": MODEL}, Viewer("acme", scoped=True))
    queue = await browser.region(of_acme, "model_queue")
    assert mine.hex() in queue
    assert f'href="/console/requests/{AT}/{job.hex()}"' in queue
    assert f'href="/console/requests/{AT}/{mine.hex()}"' not in queue  # once it has ended, no record says whose it was
    assert theirs.hex() not in queue
    assert "umbrella" not in queue
    await of_acme.aclose()  # type: ignore[attr-defined]


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


async def test_its_port_says_how_it_is(log: EventLog, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked(path: str) -> tuple[int, Any]:
        answer = await browser.request("GET", path, root="")
        return answer.status_code, answer.json()

    assert await asked("/health/live") == (200, {"live": True})
    assert await asked("/health/ready") == (200, {"ready": True})

    async def away() -> tuple[int, int]:
        raise LogUnavailable("the log is away")

    monkeypatch.setattr(log, "memory_bytes", away)
    assert await asked("/health/ready") == (503, {"error": "the log is away"})
    assert await asked("/health/live") == (200, {"live": True})


async def test_metrics_that_do_not_answer_are_left_out(tmp_path: Path) -> None:
    assert await metrics_reader([f"unix:{tmp_path}/none", "http://127.0.0.1:1/metrics"])() == ""


async def test_metrics_are_read_at_the_addresses_of_a_name() -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\nconnection: close\r\n\r\nup_of 1\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert "up_of 1" in await metrics_reader([f"dns+http://localhost:{port}/metrics"])()
    assert len(asked) == 1
    assert f"host: localhost:{port}\r\n".encode() in asked[0].lower()


async def test_open_streams_are_those_that_gateways_publish(log: EventLog, browser: Browser) -> None:
    assert "No stream is open." in (await browser.get("/streams")).text
    mine = StreamRow(MODEL, 1, "acme", "<mine>", 1_000_000, 2_000_000, 41)
    theirs = StreamRow(MODEL, 1, "umbrella", "theirs", 3_000_000, 0, 0)
    for number in (1, 2):
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(ProcessJoined("gateway", f"gateway-{number}"))])
    await log.put_note(keys.open_streams("gateway-1"), StreamsNote(1, 1, (theirs,)).pack(), 600)
    await log.put_note(keys.open_streams("gateway-2"), StreamsNote(300, 1, (mine,)).pack(), 600)
    events = browser.app.live_events("streams", {}, Viewer())
    regions = json.loads((await anext(events)).decode().split("\n")[1].removeprefix("data: "))["regions"]
    shown = regions["streams_table"]
    for words in ("301 open streams at 2 gateways", "&lt;mine&gt;", "41", "acme", "umbrella", "1970-01-01 00:00:01"):
        assert words in shown
    assert shown.index("acme") < shown.index("umbrella")  # the one that is open the longest first
    of_acme = browser.app.live_events("streams", {}, Viewer("acme", scoped=True))
    shown = (await anext(of_acme)).decode()
    assert "&lt;mine&gt;" in shown
    assert "theirs" not in shown
    assert "301" not in shown
    for live in (events, of_acme):
        await live.aclose()  # type: ignore[attr-defined]
