from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from charonia.errors import DeadlineExceeded, InternalError
from charonia.facts.jobs import JobState
from gateway.http import job_routes

BODY: dict[str, Any] = {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.5]}]}


async def submit(client: httpx2.AsyncClient, model: str = "identity", **members: Any) -> str:
    reply = await client.post(
        f"/v2/models/{model}/infer", json={**BODY, **members}, headers={"prefer": "respond-async"}
    )
    assert reply.status_code == 202
    return str(reply.headers["location"])


async def ended(client: httpx2.AsyncClient, location: str) -> httpx2.Response:
    return await client.get(location + "/result?wait=5")


async def test_the_state_of_a_job(client: httpx2.AsyncClient, handler: Any) -> None:
    location = await submit(client, id="mine")
    await ended(client, location)
    reply = await client.get(location)
    assert reply.json() == {
        "id": "00000000000000000000000000000001.identity", "state": "succeeded", "location": location,
        "model_name": "identity", "model_version": "1", "request_id": "mine", "attempts": 1,
        "timings": {
            "accepted_us": 1000, "batched_us": 2000, "ended_us": 3000, "queue_s": 0.001, "execute_s": 0.001,
        },
        "position": 0, "queue_length": 0, "eta_s": None, "wait_reason": "", "error": "", "durability": "memory",
        "tenant": "", "has_result": True, "expires_us": 9000,
    }  # fmt: skip


async def test_no_result_yet_is_202(client: httpx2.AsyncClient, handler: Any) -> None:
    handler.gate.clear()
    location = await submit(client)
    await handler.waiting.wait()
    for url in (location + "/result", location + "/result?wait=0.01"):
        reply = await client.get(url)
        assert (reply.status_code, reply.json()["state"]) == (202, "running")
        assert reply.headers["location"] == location
    assert (await client.get(location)).json()["timings"]["ended_us"] is None


async def test_waits_are_bounded(client: httpx2.AsyncClient, handler: Any) -> None:
    await client.get(await submit(client) + "/result?wait=100000")
    assert handler.waits_s == [60.0]


@pytest.mark.parametrize(
    ("failure", "status", "state"),
    [(InternalError("it broke"), 500, "failed"), (DeadlineExceeded("too late"), 504, "failed")],
)
async def test_a_failure_is_its_error(
    client: httpx2.AsyncClient, handler: Any, failure: Exception, status: int, state: str
) -> None:
    handler.failure = failure
    location = await submit(client)
    reply = await ended(client, location)
    assert (reply.status_code, reply.json()) == (status, {"error": str(failure)})
    view = (await client.get(location)).json()
    assert (view["state"], view["error"], view["has_result"]) == (state, str(failure), False)


class TestForms:
    """A result is written as the submission asked, unless its reader asks otherwise."""

    LISTED: dict[str, Any] = {"outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]}  # noqa: RUF012
    BINARY: dict[str, Any] = {"parameters": {"binary_data_output": True}}  # noqa: RUF012

    @pytest.mark.parametrize("members", [{}, LISTED, BINARY, {"id": "mine"}])
    @pytest.mark.parametrize("encoding", ["identity", "gzip"])
    async def test_as_submitted(self, client: httpx2.AsyncClient, members: dict[str, Any], encoding: str) -> None:
        headers = {"accept-encoding": encoding}
        direct = await client.post("/v2/models/identity/infer", json={**BODY, **members}, headers=headers)
        result = await client.get(await submit(client, **members) + "/result?wait=5", headers=headers)
        assert (result.status_code, result.content, result.headers) == (200, direct.content, direct.headers)

    @pytest.mark.parametrize("members", [{}, LISTED, BINARY])
    @pytest.mark.parametrize(
        ("query", "accept", "binary"),
        [
            ("&binary=true", "application/json", True),
            ("&binary=false", "application/octet-stream", False),
            ("", "application/octet-stream;q=1, text/html", True),
            ("", "application/json", False),
        ],
    )
    async def test_as_read(
        self, client: httpx2.AsyncClient, members: dict[str, Any], query: str, accept: str, binary: bool
    ) -> None:
        location = await submit(client, **members)
        reply = await client.get(f"{location}/result?wait=5{query}", headers={"accept": accept})
        assert reply.headers["content-type"] == ("application/octet-stream" if binary else "application/json")
        size = int(reply.headers.get("inference-header-content-length", len(reply.content)))
        (output,) = json.loads(reply.content[:size])["outputs"]
        assert ("data" in output) is not binary
        assert len(reply.content) - size == (8 if binary else 0)

    @pytest.mark.parametrize("served", [True, False])
    async def test_classification(
        self, client: httpx2.AsyncClient, handler: Any, served: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handler.labels = {"OUTPUT0": ["small", "large"]}
        location = await submit(client, outputs=[{"name": "OUTPUT0", "parameters": {"classification": 1}}])
        await ended(client, location)
        if not served:
            monkeypatch.setattr(f"{type(handler).__module__}.MODELS", {})
        (output,) = (await ended(client, location)).json()["outputs"]
        assert output["shape"] == [1, 1]  # the batch dimension is known though the model is gone
        assert output["data"] == (["2.500000:1:large"] if served else ["2.500000:1"])


class TestCancelling:
    async def test_one(self, client: httpx2.AsyncClient, handler: Any) -> None:
        handler.gate.clear()
        location = await submit(client)
        await handler.waiting.wait()
        reply = await client.delete(location)
        assert (reply.status_code, reply.json()["state"]) == (200, "cancelled")
        result = await client.get(location + "/result")
        assert (result.status_code, result.json()) == (400, {"error": "the job was cancelled"})
        assert (await client.delete(location)).json()["state"] == "cancelled"

    async def test_what_has_ended_stays(self, client: httpx2.AsyncClient) -> None:
        location = await submit(client)
        await ended(client, location)
        reply = await client.delete(location)
        assert (reply.status_code, reply.json()["state"]) == (200, "succeeded")

    async def test_many(self, client: httpx2.AsyncClient, handler: Any) -> None:
        handler.gate.clear()
        for model in ("identity", "identity", "wide"):
            await submit(client, model)
        reply = await client.delete("/v2/jobs?model=identity")
        assert reply.json() == {"cancelled": 2}
        assert (await client.delete("/v2/jobs?state=queued&tenant=t")).status_code == 200
        assert (handler.filters[-1].state, handler.filters[-1].tenant) == (JobState.QUEUED, "t")

    async def test_all_are_not_cancelled_by_an_oversight(self, client: httpx2.AsyncClient, handler: Any) -> None:
        reply = await client.delete("/v2/jobs")
        assert (reply.status_code, reply.json()) == (
            400, {"error": "name at least one of model, state and tenant to cancel jobs by"},
        )  # fmt: skip
        assert not handler.filters


async def test_listing_by_pages(client: httpx2.AsyncClient) -> None:
    locations = [await submit(client) for _ in range(5)]
    seen: list[str] = []
    cursor, pages = "", 0
    while True:
        page = (await client.get(f"/v2/jobs?model=identity&limit=2&cursor={cursor}")).json()
        seen += [job["location"] for job in page["jobs"]]
        pages += 1
        cursor = page["next"]
        if cursor is None:
            break
    assert (seen, pages) == (locations, 3)
    assert (await client.get("/v2/jobs?model=wide")).json() == {"jobs": [], "next": None}


async def test_a_timeline(client: httpx2.AsyncClient) -> None:
    location = await submit(client)
    await ended(client, location)
    timeline = (await client.get(location + "/timeline")).json()
    assert timeline["state"] == "succeeded"
    assert timeline["events"] == [
        {"number": 1, "event": "accepted", "time_us": 1000, "after_s": 0.0, "detail": {}},
        {"number": 2, "event": "batched", "time_us": 2000, "after_s": 0.001,
         "detail": {"executor": "e1", "raw": "\ufffd"}},
        {"number": 3, "event": "succeeded", "time_us": 3000, "after_s": 0.002, "detail": {}},
    ]  # fmt: skip


class TestEvents:
    async def test_of_an_ended_job(self, client: httpx2.AsyncClient, handler: Any) -> None:
        location = await submit(client)
        await ended(client, location)
        reply = await client.get(location + "/events")
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-store"
        assert "content-length" not in reply.headers
        blocks = reply.text.split("\n\n")
        assert blocks[0] == "retry: 1000"
        assert blocks[1] == 'id: 1\nevent: accepted\ndata: {"number":1,"time_us":1000,"detail":{}}'
        assert [block.split("\n")[1] for block in blocks[1:4]] == [
            "event: accepted", "event: batched", "event: succeeded",
        ]  # fmt: skip
        assert blocks[4:] == [""]
        assert handler.followers_closed == 1

    @pytest.mark.parametrize("how", ["header", "query"])
    async def test_going_on_after_the_last_one_seen(self, client: httpx2.AsyncClient, how: str) -> None:
        location = await submit(client)
        await ended(client, location)

        async def after(number: int) -> httpx2.Response:
            if how == "header":
                return await client.get(location + "/events", headers={"last-event-id": str(number)})
            return await client.get(f"{location}/events?after={number}")

        assert [line for line in (await after(2)).text.split("\n") if line.startswith("id")] == ["id: 3"]
        nothing_more = await after(3)
        assert (nothing_more.status_code, nothing_more.content) == (204, b"")

    async def test_streams_are_counted(
        self, client: httpx2.AsyncClient, handler: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_routes, "MAX_EVENT_STREAMS", 1)
        location = await submit(client)
        await ended(client, location)
        for _ in range(3):  # one that has ended makes room, one that was refused takes none
            assert (await client.get(location + "/events")).status_code == 200
            assert (await client.get("/v2/jobs/no/events")).status_code == 404
        monkeypatch.setattr(job_routes, "MAX_EVENT_STREAMS", 0)
        reply = await client.get(location + "/events")
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize(
    ("method", "url", "error"),
    [
        ("GET", "/v2/jobs?models=x", "unknown query parameter 'models', expected model, state, tenant, limit, cursor"),
        ("GET", "/v2/jobs?limit=many", "query parameter 'limit' must be a whole number"),
        ("GET", "/v2/jobs?limit=0", "limit must be 1 to 1000"),
        ("GET", "/v2/jobs?model=a&model=b", "query parameter 'model' is given twice"),
        ("GET", "/v2/jobs?state=asleep",
         "query parameter 'state' must be one of queued, running, succeeded, failed, cancelled, expired"),
        ("DELETE", "/v2/jobs?limit=1", "unknown query parameter 'limit', expected model, state, tenant"),
        ("GET", "/v2/jobs/x?y", "unknown query parameter 'y', expected none"),
        ("GET", "/v2/jobs/x/result?wait=-1", "query parameter 'wait' must be a number of seconds"),
        ("GET", "/v2/jobs/x/result?wait=1e9", "query parameter 'wait' must be a number of seconds"),
        ("GET", "/v2/jobs/x/result?binary=maybe", "query parameter 'binary' must be true or false"),
        ("GET", "/v2/jobs/x/events?after=x", "Last-Event-ID must be the id of an event"),
    ],
)  # fmt: skip
async def test_bad_queries(client: httpx2.AsyncClient, method: str, url: str, error: str) -> None:
    reply = await client.request(method, url)
    assert (reply.status_code, reply.json()) == (400, {"error": error})


@pytest.mark.parametrize("job_id", ["x", "0" * 32 + ".identity", "0" * 32, "%2e%2e", "a" * 3000, "%00", "\u00e9"])
@pytest.mark.parametrize("tail", ["", "/result", "/events", "/timeline"])
async def test_an_unknown_id_is_404_whatever_it_is(client: httpx2.AsyncClient, job_id: str, tail: str) -> None:
    reply = await client.get(f"/v2/jobs/{job_id}{tail}")
    assert (reply.status_code, reply.json()["error"].lower()) in ((404, "job not found"), (404, "not found"))


async def test_a_wrong_method(client: httpx2.AsyncClient) -> None:
    assert (await client.post("/v2/jobs")).status_code == 405
    assert (await client.delete("/v2/jobs/x/result")).status_code == 405


async def test_the_documentation_names_them(client: httpx2.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert set(paths["/v2/jobs"]) == {"get", "delete"}
    assert set(paths["/v2/jobs/{job_id}"]) == {"get", "delete"}
    assert {p["name"] for p in paths["/v2/jobs/{job_id}/result"]["get"]["parameters"]} == {"job_id", "wait", "binary"}
    assert "202" in paths["/v2/jobs/{job_id}/result"]["get"]["responses"]
    for tail in ("/events", "/timeline"):
        assert "get" in paths["/v2/jobs/{job_id}" + tail]
