"""The console's pages over a real log: what they show, to whom, and that they change nothing."""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgpack
import numpy as np
import pytest

pytest.importorskip("jinja2")

from charonia import keys
from charonia.clock import wall_ns
from charonia.composition.console.console_role import identification, metrics_reader, read_statistics
from charonia.console.log_views import EVERYTHING, Viewer
from charonia.console.readings import Sampler
from charonia.console.web_app import POLICY, ConsoleApp
from charonia.eventlog.port import EventLog, Limits
from charonia.eventlog.redis import open_log
from charonia.facts.events import FIELD_FACT, ProcessJoined, RepositoryScanned, VersionLoaded, pack_fact
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobState, NewJob
from charonia.operations.dead_letters import FIELD_ABOUT
from charonia.tensors import Tensor
from charonia.wire import (
    FIELD_RECORD,
    FLAG_JOB,
    FLAG_JOURNALLED,
    pack_request,
    pack_response,
    record_fields,
    request_meta,
)
from executors.configuration.config import normalise
from executors.repository.pbtxt import parse

pytestmark = pytest.mark.integration

MODEL = "a model"  # its name has to be quoted in addresses
AT = "a%20model"
INPUT = Tensor.of("X", np.arange(16, dtype=np.float32).reshape(1, 16))
META = request_meta(1, "hash", [INPUT], ("Y",), {})
CONFIG = f"""
name: "{MODEL}" backend: "python" max_batch_size: 8
input {{ name: "X" data_type: TYPE_FP32 dims: 16 }}
output {{ name: "Y" data_type: TYPE_FP32 dims: 16 }}
"""
KEYS = '[tenants.acme]\nkeys = ["key of acme"]\n[tenants.umbrella]\nkeys = ["key of umbrella"]\n'
METRICS = (
    f'# TYPE nv_inference_request_success counter\nnv_inference_request_success{{model="{MODEL}",version="1"}} 5\n'
)


@pytest.fixture
async def log(fresh_log_url: str) -> AsyncIterator[EventLog]:
    log = open_log(fresh_log_url)
    await log.open()
    packed = normalise(parse(CONFIG)).SerializeToString()
    for fact in (
        ProcessJoined("executor", "executor-1", host="<b>host</b>", pid=7),
        VersionLoaded("executor-1", MODEL, 1, "hash", 2, packed, load_ns=3_000_000_000),
        RepositoryScanned("executor-1", (MODEL,), "none", True),
    ):
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])
    counters = {"success_count": 40, "success_ns": 10**9, "execution_count": 10, "b4_count": 10, "b4_infer_ns": 10**8}
    await log.add_statistics(keys.statistics(MODEL, 1, "hash"), counters)
    await log.beat("executor", "executor-1", 60_000)
    yield log
    await log.close()


async def metrics() -> str:
    return METRICS


class Browser:
    """A viewer of the console in this process."""

    def __init__(self, log: EventLog, identify: Any = None) -> None:
        self.sampler = Sampler(log, metrics)
        self.app = ConsoleApp(log, self.sampler, read_statistics, identify)
        self._client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=self.app.asgi), base_url="http://console")

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self._client.get(f"/console{path}", headers=headers)

    async def request(self, method: str, path: str) -> httpx2.Response:
        return await self._client.request(method, f"/console{path}")

    async def close(self) -> None:
        await self._client.aclose()
        await self.sampler.close()


@pytest.fixture
async def browser(log: EventLog) -> AsyncIterator[Browser]:
    made = Browser(log)
    yield made
    await made.close()


def packed_request(request_id: bytes) -> bytes:
    now_ns, flags = wall_ns(), FLAG_JOB | FLAG_JOURNALLED
    return pack_request(
        request_id, b"g", b"", META, [INPUT.data], rows=1, signature=1, level=0, accepted_ns=now_ns, flags=flags
    )


async def submit(log: EventLog, tenant: str = "") -> bytes:
    job_id = secrets.token_bytes(16)
    packed = packed_request(job_id)
    new = NewJob(job_id, len(packed), wall_ns() // 1000, 600, tenant)
    await log.accept_job(MODEL, 0, keys.lane_of(tenant), new, record_fields([packed]), Limits())
    return job_id


async def run(log: EventLog, *ids: bytes) -> None:
    token = await log.take_ownership(MODEL, "batcher-1", "")
    await log.begin_attempt(MODEL, token, ids, 1, jobs=ids, journalled=ids, executor="executor-1", batch_id="b1")
    for job_id in ids:
        end = JobEnd(JobState.SUCCEEDED, pack_response(job_id, MODEL, 1, [INPUT], {}), {"batch_rows": 2})
        code = OUTCOME_CODES[JobState.SUCCEEDED]
        assert await log.settle(MODEL, [(job_id, 1)], None, [], ends={job_id: end}, outcomes=code) == [True]


async def bury(log: EventLog, tenant: str = "") -> bytes:
    """A dead letter; its id."""
    request_id = secrets.token_bytes(16)
    about = {"id": request_id, "model": MODEL, "version": 1, "attempts": 4, "error": "it <i>died</i>", "tenant": tenant}
    fields = [FIELD_RECORD, packed_request(request_id), FIELD_ABOUT, msgpack.packb({**about, "stderr": "last words"})]
    await log.append(keys.dead_letters(MODEL), fields)
    return request_id


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
        refused = await browser.request(method, "/jobs")
        assert refused.status_code == 405
        assert refused.headers["content-security-policy"] == POLICY
    assert (await browser.get("/static/console.js")).status_code == 200
    assert (await browser.get("/static/../web_app.py")).status_code == 404


async def test_a_tenant_sees_its_own_work_alone(log: EventLog, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    mine, theirs = await submit(log, "acme"), await submit(log, "umbrella")
    buried = await bury(log, "umbrella")
    browser = Browser(log, identification({"api_keys": str(file), "tenant_header": ""}))
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
