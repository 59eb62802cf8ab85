"""The paths of what is stored: all of them are there, documented, and answer as the document says."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import jsonschema_rs
import pytest
from memory_log.log import MemoryLog
from text_handler import BLOB, CANARY

from charonia import keys
from charonia.errors import ResourceExhausted
from charonia.generation.text_assets import TextAssets
from charonia.options.settings import GatewaySettings
from gateway.http.bodies import CLIENT_LEFT
from gateway.http.openapi.document import build_document
from gateway.http.openapi.stored_operations import STORED_OPERATIONS, stored_schemas
from gateway.http.openapi.task_operations import OPENAI_OPERATIONS, openai_schemas
from gateway.openai.openai_application import OpenAiApplication, OpenAiInterface
from gateway.openai.stored import file_routes
from gateway.openai.stored.stored_objects import CHUNK_BYTES, StoredBatches
from gateway.requests.idempotency import request_digest

LIMIT_S = 30
SCHEMAS = {**openai_schemas(), **stored_schemas()}
DOCUMENT = build_document("1.2.3", (*OPENAI_OPERATIONS, *STORED_OPERATIONS), SCHEMAS)


def check(schema: str, value: Any) -> None:
    where = {"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]}
    jsonschema_rs.Draft202012Validator(where).validate(value)


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
async def stored(settings: GatewaySettings, handler: Any, log: MemoryLog) -> Any:
    """The interface over a log, and a client of it."""
    interface = OpenAiInterface(settings, handler, log=log)
    transport = httpx2.ASGITransport(app=OpenAiApplication(settings, handler, interface))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield interface, client


async def test_every_path_is_in_the_document(stored: Any) -> None:
    interface, client = stored
    routes = {(route.path, route.method.lower()) for route in interface.routes.routes}
    assert {(one.path, one.method) for one in STORED_OPERATIONS} <= routes
    documented = {(one.path, one.method) for one in (*OPENAI_OPERATIONS, *STORED_OPERATIONS)}
    words = ("responses", "files", "batches")
    assert {route for route in routes if any(f"/v1/{word}" in route[0] for word in words)} <= documented
    own = (await client.get("/openapi.json")).json()
    assert {one.path for one in STORED_OPERATIONS} <= set(own["paths"])


def test_examples_fit_their_schemas() -> None:
    for one in STORED_OPERATIONS:
        for content in (*one.bodies, *(content for reply in one.replies.values() for content in reply.contents)):
            schema = {**content.schema, "components": DOCUMENT["components"]}
            jsonschema_rs.Draft202012Validator(schema).validate(content.example)


async def test_a_file_and_a_batch_that_is_wrong(stored: Any, log: MemoryLog) -> None:
    interface, client = stored
    made = (await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"{\n")})).json()
    check("OpenAiFile", made)
    check("OpenAiFiles", (await client.get("/v1/files")).json())
    body = {"input_file_id": made["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    check("OpenAiBatchRequest", body)
    batch = (await client.post("/v1/batches", json=body)).json()
    check("OpenAiBatch", batch)
    await log.beat("gateway", "test", 60_000)
    interface.stored.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            while (found := (await client.get(f"/v1/batches/{batch['id']}")).json())["status"] != "failed":
                await asyncio.sleep(0.005)
    finally:
        await interface.stored.close()
    check("OpenAiBatch", found)
    assert found["errors"]["data"][0]["line"] == 1
    check("OpenAiBatches", (await client.get("/v1/batches")).json())
    assert (await client.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 409
    check("OpenAiDeleted", (await client.delete(f"/v1/files/{made['id']}")).json())


async def test_the_input_of_a_batch_stays_until_it_has_ended(stored: Any, log: MemoryLog) -> None:
    _, client = stored
    data = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    content = b"x" * (CHUNK_BYTES + 1)
    made = (await client.post("/v1/files", data=data, files={"file": ("in.jsonl", content)})).json()
    body = {"input_file_id": made["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await client.post("/v1/batches", json=body)).json()
    kept = (await client.get(f"/v1/files/{made['id']}")).json()
    assert kept["expires_at"] > batch["expires_at"]
    assert (await client.get(f"/v1/files/{made['id']}/content")).content == content
    refused = await client.delete(f"/v1/files/{made['id']}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "file_in_use")
    assert batch["id"] in refused.json()["error"]["message"]
    ended = {"kind": "ended", "time_s": 1, "outcome": "cancelled"}
    await StoredBatches(log).add(batch["id"], ended)
    assert (await client.delete(f"/v1/files/{made['id']}")).status_code == 200


async def test_lists_are_paged(stored: Any) -> None:
    _, client = stored
    made = [
        (await client.post("/v1/files", data={"purpose": "batch"}, files={"file": (f"{at}", b"x")})).json()["id"]
        for at in range(5)
    ]
    first = (await client.get("/v1/files", params={"limit": 2, "order": "asc"})).json()
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (made[:2], True)
    rest = (await client.get("/v1/files", params={"order": "asc", "after": first["last_id"]})).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (made[2:], False)
    assert [one["id"] for one in (await client.get("/v1/files")).json()["data"]] == made[::-1]
    for wrong in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "file-none"}):
        assert (await client.get("/v1/files", params=wrong)).status_code == 400


@pytest.mark.parametrize(
    ("data", "content", "status"),
    [
        ({"purpose": "batch"}, b"", 400),
        ({"purpose": "fine-tune"}, b"x", 400),
        ({}, b"x", 400),
        ({"purpose": "batch", "expires_after[anchor]": "now"}, b"x", 400),
        ({"purpose": "batch", "expires_after[seconds]": "1"}, b"x", 400),
        ({"purpose": "batch"}, b"x" * 101, 413),
    ],
)
async def test_uploads_that_are_refused_leave_nothing(
    stored: Any, monkeypatch: pytest.MonkeyPatch, data: dict[str, str], content: bytes, status: int
) -> None:
    _, client = stored
    monkeypatch.setattr("gateway.openai.stored.stored_objects.MAX_FILE_BYTES", 100)
    refused = await client.post("/v1/files", data=data, files={"file": ("in", content)})
    assert (refused.status_code, json.loads(refused.content)["error"]["type"]) == (status, "invalid_request_error")
    assert (await client.get("/v1/files")).json()["data"] == []


async def test_uploads_at_the_same_time_are_bounded_together(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them begin before the first one ends: each sends its body when all have been asked for theirs."""
    interface, client = stored
    monkeypatch.setattr("gateway.openai.stored.stored_objects.MAX_TENANT_BYTES", 2500)
    head = '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += '--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    body = head.encode() + b"y" * 800 + b"\r\n--x--\r\n"
    headers = [(b"content-type", b"multipart/form-data; boundary=x"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": headers, "state": {}}
    waiting, begun, statuses = 0, asyncio.Event(), []

    async def receive() -> Any:
        nonlocal waiting
        waiting += 1
        if waiting + len(statuses) == 10:
            begun.set()
        await begun.wait()
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
            if waiting + len(statuses) == 10:
                begun.set()

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*[interface.answer(scope, receive, send) for _ in range(10)])
    stored_bytes = [one["bytes"] for one in (await client.get("/v1/files")).json()["data"]]
    assert stored_bytes == [800, 800]
    assert Counter(statuses) == {200: 2, 413: 1, 429: 7}  # the third one is told that it may have less


async def test_an_expiry_after_the_file_is_refused(stored: Any) -> None:
    _, client = stored
    parts = [
        '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        '--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nabc\r\n',
        '--x\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n7200\r\n--x--\r\n',
    ]
    headers = {"content-type": "multipart/form-data; boundary=x"}
    refused = await client.post("/v1/files", content="".join(parts).encode(), headers=headers)
    assert refused.json()["error"]["param"] == "expires_after"
    assert (await client.post("/v1/files", json={})).status_code == 415


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": "file-none"}, "id"),
        ({"endpoint": "/v1/audio"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": [1]}, "metadata"),
        ({"output_expires_after": {"anchor": "now"}}, "output_expires_after"),
    ],
)
async def test_batches_that_are_refused(stored: Any, changes: dict[str, Any], param: str) -> None:
    _, client = stored
    made = (await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in", b"x")})).json()
    body = {"input_file_id": made["id"], "endpoint": "/v1/responses", "completion_window": "24h", **changes}
    refused = await client.post("/v1/batches", json=body)
    assert refused.json()["error"]["param"] == param
    assert file_routes.MAX_PAGE >= 1000


async def test_a_file_that_ends_while_it_is_sent_is_cut_short(stored: Any, log: MemoryLog) -> None:
    interface, client = stored
    content = b"x" * (2 * CHUNK_BYTES + 1)
    made = (await client.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("big", content)})).json()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await log.delete_keys([keys.blob(f"{made['id']}.1")])

    async def receive() -> Any:
        return {"type": "http.request"}

    path = f"/v1/files/{made['id']}/content"
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "state": {}}
    with pytest.raises(Exception, match="No such File object"):  # the connection is closed
        await interface.answer(scope, receive, send)
    assert [len(message.get("body", b"")) for message in sent] == [0, CHUNK_BYTES]


async def test_a_response_that_is_refused_leaves_nothing(
    stored: Any, handler: Any, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = stored
    long = "".join(random.Random(1).choices(string.printable, k=1 << 17))

    async def full(request: Any, options: Any) -> Any:
        raise ResourceExhausted("full")

    handler.submit_job = full
    body = {"model": "plain", "input": long}
    put, made = log.put_blob, []

    async def put_blob(blob_id: str, data: Any, ttl_s: int) -> None:
        made.append(blob_id)
        await put(blob_id, data, ttl_s)

    monkeypatch.setattr(log, "put_blob", put_blob)
    reply = await client.post("/v1/responses", json=body)
    assert reply.status_code == 429
    assert [await log.blob(blob_id) for blob_id in made] == [None]


async def test_the_key_of_a_response_stands_for_its_body(stored: Any, handler: Any) -> None:
    """Its request may be another one the next time: here the model is loaded again with another chat template."""
    _, client = stored
    asked = []

    async def submit_job(request: Any, options: Any) -> Any:
        asked.append((options.idempotency_key, options.digest, request_digest(request)))
        raise ResourceExhausted("full")

    handler.submit_job = submit_job
    body = {"model": "says", "input": "a"}
    says, assets = handler.models["says"], TextAssets.unpack(BLOB)
    for template in ("{{ messages[0].content }}", "a{{ messages[0].content }}"):
        handler.blobs[template] = replace(assets, chat_template=template).pack()
        parameters = {**says.parameters, "charonia.text_assets": template}
        handler.models["says"] = replace(says, parameters=parameters)
        await client.post("/v1/responses", json=body, headers={"idempotency-key": "k"})
    await client.post("/v1/responses", json={**body, "input": "b"}, headers={"idempotency-key": "k"})
    await client.post("/v1/responses", json=body)
    (first, again, other, plain) = asked
    assert first[:2] == again[:2]
    assert first[2] != again[2]
    assert other[1] != first[1]
    assert plain[:2] == ("", b"")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "none"}}}}, "text.format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"stop": [""]}, "stop"),
        ({"top_k": -2}, "top_k"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"min_tokens": 9, "max_output_tokens": 8}, "min_tokens"),
    ],
)
async def test_refusals_name_the_field_of_the_response(stored: Any, more: dict[str, Any], param: str) -> None:
    _, client = stored
    reply = await client.post("/v1/responses", json={"model": "says", "input": "a", **more})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_what_a_routing_rule_says_counts_for_responses_that_are_not_stored(stored: Any, handler: Any) -> None:
    """Jobs get the present version."""
    _, client = stored
    asked: list[Any] = []

    async def submit_job(request: Any, options: Any) -> Any:
        asked.append(request)
        raise ResourceExhausted("full")

    handler.submit_job = submit_job
    name, value = CANARY
    body = {"model": "says", "input": "say a."}
    for store in (False, True):
        await client.post("/v1/responses", json={**body, "store": store}, headers={name.decode(): value.decode()})
    assert [request.served.version for request in (*handler.requests, *asked)] == [2, 1]


async def test_what_a_response_repeats_is_bounded(stored: Any) -> None:
    _, client = stored
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        reply = await client.post("/v1/responses", json={"model": "plain", "input": "a", name: "x" * 100_000})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("more", "key", "is_kept"),
    [({}, b"", False), ({"stream": True}, b"", False), ({"background": True}, b"", True), ({}, b"key-1", True)],
)
@pytest.mark.parametrize("step", ["it is recorded", "it is found"])
async def test_a_client_that_leaves_before_its_response_began(
    stored: Any, handler: Any, more: dict[str, Any], key: bytes, is_kept: bool, step: str
) -> None:
    """The job that it asked for is cancelled, once it is known, unless it was to go on."""
    interface, _ = stored
    job_id = "a" * 32 + ".says"
    asked, goes_on = asyncio.Event(), asyncio.Event()
    cancelled: list[str] = []

    async def hold(here: bool) -> None:
        if here:
            asked.set()
            await goes_on.wait()

    async def submit_job(*_: Any) -> Any:
        await hold(step == "it is recorded")
        return SimpleNamespace(id=job_id, created=True)

    async def view(*_: Any) -> Any:
        await hold(True)

    async def cancel(found: str, _caller: Any) -> None:
        cancelled.append(found)

    handler.submit_job = submit_job
    handler.jobs = SimpleNamespace(cancel=cancel, queries=SimpleNamespace(view=view))
    body = json.dumps({"model": "says", "input": "x", **more}).encode()
    headers = [(b"idempotency-key", key)] if key else []
    state: dict[str, Any] = {}
    scope = {"type": "http", "method": "POST", "path": "/v1/responses", "headers": headers, "state": state}

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(_message: Any) -> None:
        pytest.fail("the client has left")

    call = asyncio.create_task(interface.answer(scope, receive, send))
    async with asyncio.timeout(LIMIT_S):
        await asked.wait()
        state[CLIENT_LEFT] = True
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        goes_on.set()
        await interface.stored.close()  # waits for what is still to be done
    assert cancelled == ([] if is_kept else [job_id])
