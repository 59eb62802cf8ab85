"""What the console changes over a real log, for whom, and whose forms it refuses."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from console_bench import AT, KEYS, MODEL, Browser, bury, opened, submit

from charonia import keys
from charonia.composition.console.console_role import identification
from charonia.eventlog.port import START, EventLog
from charonia.facts.events import (
    FIELD_FACT,
    ModelRequested,
    ModelRequestFinished,
    RepositoryScanned,
    VersionStateChanged,
    VersionUnloaded,
    facts_of,
    pack_fact,
)
from charonia.facts.jobs import JobState, public_id
from charonia.options.values import CONSOLE, parse

pytestmark = pytest.mark.integration

Fields = list[tuple[str, str]]
ACME = {"x-api-key": "key of acme"}


@pytest.fixture
async def log(fresh_log_url: str) -> AsyncIterator[EventLog]:
    async for log in opened(fresh_log_url, "explicit"):
        yield log


@pytest.fixture
async def browser(log: EventLog) -> AsyncIterator[Browser]:
    made = Browser(log, actions=True)
    yield made
    await made.close()


async def token(browser: Browser, path: str = f"/models/{AT}", **headers: str) -> tuple[str, str]:
    """The field that forms of a page carry; the browser keeps the cookie."""
    page = await browser.get(path, **headers)
    assert page.status_code == 200
    found = re.search(r'name="token" value="([0-9a-f]{64})"', page.text)
    assert found is not None, "the page has no form"
    return "token", found[1]


async def done(browser: Browser, answer: httpx2.Response, **headers: str) -> str:
    """The page that an action leads to, with its message."""
    assert answer.status_code == 303, answer.text
    where = answer.headers["location"].removeprefix("/console")
    page = await browser.get(where, **headers)
    assert page.status_code == 200
    assert 'class="outcome"' in page.text or 'class="problem"' in page.text
    again = await browser.get(where, **headers)
    assert 'class="outcome"' not in again.text
    return page.text


async def state(log: EventLog, job_id: bytes) -> JobState:
    job = await log.job(MODEL, job_id)
    assert job is not None
    return job.state


def chosen(*ids: bytes) -> Fields:
    return [("id", public_id(MODEL, one)) for one in ids]


async def test_a_queue_is_paused_and_resumed(log: EventLog, browser: Browser, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fields = [await token(browser), ("model", MODEL), ("back", "model")]
    page = await done(browser, await browser.post("/actions/pause", fields))
    assert f"The queue of &#39;{MODEL}&#39; is paused" in page
    assert await log.paused(MODEL)
    assert "Resume the queue" in page
    page = await done(browser, await browser.post("/actions/resume", fields))
    assert "is served again" in page
    assert not await log.paused(MODEL)
    assert f"console: pause of model '{MODEL}' by an operator at 127.0.0.1: The queue" in caplog.text
    gone = await browser.post("/actions/pause", [fields[0], ("model", "none")])
    assert gone.headers["location"].startswith("/console/models/none?notice=")


async def test_a_job_is_cancelled_after_a_question(log: EventLog, browser: Browser) -> None:
    first, second = await submit(log), await submit(log)
    fields = [await token(browser, "/jobs"), ("back", "jobs"), *chosen(first)]
    question = await browser.post("/actions/cancel", fields)
    assert question.status_code == 200
    assert "Cancel 1 request?" in question.text
    assert 'name="confirmed" value="yes"' in question.text
    assert await state(log, first) is JobState.QUEUED
    page = await done(browser, await browser.post("/actions/cancel", [*fields, ("confirmed", "yes")]))
    assert "1 request cancelled." in page
    assert (await state(log, first), await state(log, second)) == (JobState.CANCELLED, JobState.QUEUED)
    job = await log.job(MODEL, first)
    assert job is not None
    assert job.events[-1].detail["by"] == "operator"
    again = [*fields, *chosen(bytes(16)), ("confirmed", "yes")]
    page = await done(browser, await browser.post("/actions/cancel", again))
    assert "0 requests cancelled." in page
    assert "had ended before: cancelled" in page
    every = [fields[0], ("model", MODEL), ("back", "model")]
    assert "About 1 unsettled request" in (await browser.post("/actions/cancel-all", every)).text
    page = await done(browser, await browser.post("/actions/cancel-all", [*every, ("confirmed", "yes")]))
    assert "1 request of &#39;a model&#39; cancelled." in page
    assert await state(log, second) is JobState.CANCELLED


async def test_moving_needs_a_paused_queue_and_a_level(log: EventLog, browser: Browser) -> None:
    job = await submit(log)
    fields = [await token(browser), ("back", "model"), ("level", "2"), *chosen(job)]
    assert "is not paused" in await done(browser, await browser.post("/actions/move", fields))
    await log.set_paused(MODEL, True)
    assert "has no priority levels, not 2" in await done(browser, await browser.post("/actions/move", fields))


async def test_dead_letters_are_submitted_again_and_discarded(log: EventLog, browser: Browser) -> None:
    await bury(log)
    kept = await bury(log)
    first, second = await log.range(keys.dead_letters(MODEL))
    entries = [("id", f"{one.id.decode()}.{AT}") for one in (first, second)]
    fields = [await token(browser, "/dead-letters"), ("back", "letters"), *entries]
    page = await done(browser, await browser.post("/actions/replay", fields))
    assert "2 dead letters submitted again" in page
    linked = re.findall(rf"/console/requests/{AT}/([0-9a-f]{{32}})", page)
    assert [await state(log, bytes.fromhex(one)) for one in linked] == [JobState.QUEUED] * 2
    assert len(await log.range(keys.dead_letters(MODEL))) == 2
    only = [fields[0], ("back", "letter"), entries[0]]
    assert "Discard 1 dead letter?" in (await browser.post("/actions/discard", only)).text
    answer = await browser.post("/actions/discard", [*only, ("confirmed", "yes")])
    assert answer.headers["location"].startswith("/console/dead-letters?notice=")
    assert "1 dead letter discarded." in await done(browser, answer)
    assert [one.id for one in await log.range(keys.dead_letters(MODEL))] == [second.id]
    page = await done(browser, await browser.post("/actions/replay", [fields[0], ("back", "letters"), entries[0]]))
    assert "0 dead letters submitted again" in page
    assert "it was discarded, or has expired" in page
    by_request = ("id", public_id(MODEL, kept))  # would be looked for among all letters
    page = await done(browser, await browser.post("/actions/discard", [fields[0], ("confirmed", "yes"), by_request]))
    assert "0 dead letters discarded" in page


async def answer_requests(log: EventLog, error: str = "") -> str:
    """Answer the next request for a model as its executor; what was asked."""
    after = START
    while True:
        for entry in await log.range(keys.CONTROL, after):
            after = entry.id
            for fact in facts_of(entry):
                if isinstance(fact, ModelRequested):
                    finished = ModelRequestFinished("executor-1", fact.request_id, 1 if error else 0, error)
                    await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(finished)])
                    return f"{fact.action} {fact.model} {fact.unload_dependents}"
        await asyncio.sleep(0.01)


async def test_a_model_that_is_not_loaded_cannot_be_unloaded(log: EventLog, browser: Browser) -> None:
    async def buttons() -> list[str]:
        page = (await browser.get(f"/models/{AT}")).text
        return [button for button in ("Load<", "Load again<", "Unload…<") if button in page]

    assert await buttons() == ["Load again<", "Unload…<"]
    await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(VersionUnloaded("executor-1", MODEL, 1))])
    assert await buttons() == ["Load<"]
    await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(VersionStateChanged("executor-1", MODEL, 1, "LOADING"))])
    assert await buttons() == ["Load<", "Unload…<"]


async def test_models_are_loaded_and_unloaded(log: EventLog, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    assert browser.app._actions is not None
    monkeypatch.setattr(browser.app._actions._performer, "_answer_s", 120.0)  # a busy machine may need more than ten
    fields = [await token(browser), ("model", MODEL), ("back", "model")]
    answered = asyncio.create_task(answer_requests(log, "no such file"))
    page = await done(browser, await browser.post("/actions/load", fields))
    assert await answered == f"load {MODEL} False"
    assert "was not loaded: no such file" in page
    await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(RepositoryScanned("executor-1", (MODEL,), "none", True))])
    assert "--model-control-mode=explicit" in await done(browser, await browser.post("/actions/load", fields))
    assert "Unload a model?" in (await browser.post("/actions/unload", fields)).text


async def test_a_tenant_changes_its_own_work_alone(log: EventLog, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS.replace('["key of acme"]', '["key of acme"]\nmax_pending_requests = 2'))
    browser = Browser(log, identification(parse(CONSOLE, [f"--api-keys={file}"], {}, {})), actions=True)
    mine, other, theirs = await submit(log, "acme"), await submit(log, "acme"), await submit(log, "umbrella")
    try:
        page = (await browser.get(f"/models/{AT}", **ACME)).text
        assert "Cancel all my jobs" in page
        assert "Pause the queue" not in page
        own = await token(browser, "/jobs", **ACME)
        confirmed = ("confirmed", "yes")
        fields = [own, confirmed, ("back", "jobs"), *chosen(mine, theirs)]
        assert (await browser.post("/actions/cancel", fields)).status_code == 401
        as_other = await browser.post("/actions/cancel", fields, **{"x-api-key": "key of umbrella"})
        assert as_other.status_code == 403
        page = await done(browser, await browser.post("/actions/cancel", fields, **ACME), **ACME)
        assert "1 request cancelled." in page
        assert "is neither queued nor a job of this log" in page
        assert (await state(log, mine), await state(log, theirs)) == (JobState.CANCELLED, JobState.QUEUED)
        job = await log.job(MODEL, mine)
        assert job is not None
        assert job.events[-1].detail["by"] == "caller"
        for action in ("pause", "resume", "load", "unload"):
            refused = await browser.post(f"/actions/{action}", [own, confirmed, ("model", MODEL)], **ACME)
            assert refused.status_code == 403
            assert "is for operators" in refused.text
        assert not await log.paused(MODEL)
        await bury(log, "acme")
        await bury(log, "umbrella")
        entries = [("id", f"{one.id.decode()}.{AT}") for one in await log.range(keys.dead_letters(MODEL))]
        replay = [own, ("back", "letters"), *entries]
        page = await done(browser, await browser.post("/actions/replay", replay, **ACME), **ACME)
        assert "1 dead letter submitted again" in page
        assert "is unknown to model" in page
        page = await done(browser, await browser.post("/actions/replay", [*replay[:2], entries[0]], **ACME), **ACME)
        assert "0 dead letters submitted again" in page  # two of its jobs are unsettled, as many as it may have
        every = [own, confirmed, ("model", MODEL), ("back", "model")]
        page = await done(browser, await browser.post("/actions/cancel-all", every, **ACME), **ACME)
        assert "2 requests of yours" in page
        assert (await state(log, other), await state(log, theirs)) == (JobState.CANCELLED, JobState.QUEUED)
        discard = [own, confirmed, ("back", "letters"), *entries]
        page = await done(browser, await browser.post("/actions/discard", discard, **ACME), **ACME)
        assert "1 dead letter discarded" in page
        assert len(await log.range(keys.dead_letters(MODEL))) == 1
    finally:
        await browser.close()


async def test_restricted_apis_are_restricted_here(log: EventLog) -> None:
    options = ["--http-restricted-api=model-repository:admin=secret", "--grpc-restricted-protocol=inference:work=too"]
    browser = Browser(log, identification(parse(CONSOLE, options, {}, {})), actions=True)
    admin, work = {"admin": "secret"}, {"triton-grpc-protocol-work": "too"}
    try:
        assert 'name="token"' not in (await browser.get(f"/models/{AT}")).text
        fields = [await token(browser, **admin), ("model", MODEL), ("back", "model"), ("confirmed", "yes")]
        assert (await browser.post("/actions/pause", fields, **admin)).status_code == 303
        refused = await browser.post("/actions/cancel-all", fields, **admin)
        assert (refused.status_code, "restricts &#39;inference&#39;" in refused.text) == (403, True)
        refused = await browser.post("/actions/resume", fields, **work)
        assert (refused.status_code, "restricts &#39;model-repository&#39;" in refused.text) == (403, True)
        assert await log.paused(MODEL)
        page = (await browser.get(f"/models/{AT}", **work)).text
        assert "Pause the queue" not in page
        assert "Cancel all requests" in page  # of all, as it has no tenant
        question = await browser.post("/actions/cancel-all", fields[:-1], **work)
        assert "Cancel all requests of" in question.text
        assert "yours" not in question.text
        assert (await browser.post("/actions/cancel-all", fields, **work)).status_code == 303
    finally:
        await browser.close()


async def test_forms_of_other_sites_change_nothing(log: EventLog, browser: Browser) -> None:
    own = await token(browser)
    fields = [own, ("model", MODEL), ("back", "model")]
    cookie = (await browser.get("/jobs")).request.headers["cookie"]
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "", "sec-fetch-site": ""},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "origin": ""},
        {"cookie": "charonia-console=" + "0" * 32},
        {"cookie": "other=1"},
    ):
        refused = await browser.post("/actions/pause", fields, **{"cookie": cookie, **headers})
        assert refused.status_code == 403, headers
        assert "open the console" in refused.text or "programs use the API" in refused.text
    for sent in ([fields[1]], [("token", own[1][::-1]), fields[1]]):
        assert (await browser.post("/actions/pause", sent)).status_code == 403
    assert (await browser.post("/actions/pause", fields, **{"content-type": "text/plain"})).status_code == 415
    assert (await browser.post("/actions/pause", [*fields, ("x", "y" * 70_000)])).status_code == 413
    assert (await browser.post("/actions/pause", fields, **{"transfer-encoding": "chunked"})).status_code == 411
    assert (await browser.get("/actions/pause")).status_code == 405
    assert (await browser.post("/actions/strange", fields)).status_code == 404
    assert (await browser.post("/actions/pause", [own])).status_code == 400
    assert (await browser.post("/jobs", fields)).status_code == 405
    assert not await log.paused(MODEL)
    page = await browser.get("/jobs")
    assert page.headers["referrer-policy"] == "same-origin"
    assert "form-action 'self'" in page.headers["content-security-policy"]


async def test_the_cookie_is_for_this_console_alone(log: EventLog, browser: Browser) -> None:
    set_cookie = (await browser.get("/jobs")).headers["set-cookie"].lower()
    for part in ("charonia-console=", "httponly", "samesite=strict", "path=/console"):
        assert part in set_cookie
    assert "set-cookie" not in (await browser.get("/jobs")).headers
