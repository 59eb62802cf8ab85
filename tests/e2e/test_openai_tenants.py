"""Tenants of the OpenAI API: responses, files and batches of one are unknown to the other. Without OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from e2e_asking import until
from e2e_server import Server, serving
from told_texts import MODEL, told_model

pytestmark = pytest.mark.e2e

ACME, OTHER = {"authorization": "Bearer acme-key"}, {"authorization": "Bearer other-key"}
ADMIN = {"admin-key": "secret"}
BOUNDARY = "parts"
CHATS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("openai-tenants")
    told_model(directory / "models")
    tenant_keys = directory / "keys.toml"
    tenant_keys.write_text("".join(f'[tenants.{name}]\nkeys = ["{name}-key"]\n' for name in ("acme", "other")))
    flags = (f"--api-keys={tenant_keys}", "--openai-on-http-port=true")
    restricted = "--http-restricted-api=metadata:admin-key=secret"
    with serving(directory / "models", directory / "state", *flags, restricted) as server:
        yield server


def call(server: Server, who: dict[str, str], method: str, path: str, body: Any = None) -> tuple[int, Any]:
    if isinstance(body, bytes):
        who = {**who, "content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    else:
        body = json.dumps(body).encode() if body is not None else None
    status, reply = server.request(method, path, body, who)
    try:
        return status, json.loads(reply)
    except ValueError:
        return status, bytes(reply)


def upload(server: Server, who: dict[str, str], content: str) -> str:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="'
    form = f'{head}purpose"\r\n\r\nbatch\r\n{head}file"; filename="in"\r\n\r\n{content}\r\n--{BOUNDARY}--\r\n'
    status, made = call(server, who, "POST", "/v1/files", form.encode())
    assert status == 200, made
    return str(made["id"])


def test_responses_of_others_are_unknown(server: Server) -> None:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 2}
    status, made = call(server, ACME, "POST", "/v1/responses", body)
    assert status == 200, made
    path = f"/v1/responses/{made['id']}"
    for method, place in (
        ("GET", path),
        ("GET", f"{path}?stream=true"),
        ("GET", f"{path}/input_items"),
        ("POST", f"{path}/cancel"),
        ("DELETE", path),
    ):
        status, refused = call(server, OTHER, method, place)
        assert (status, refused["error"]["param"]) == (404, "response_id"), place
        assert call(server, {}, method, place)[0] == 401
    status, refused = call(server, OTHER, "POST", "/v1/responses", {**body, "previous_response_id": made["id"]})
    assert (status, refused["error"]["code"]) == (400, "previous_response_not_found")
    assert call(server, ACME, "GET", path)[1]["output"] == made["output"]


def test_files_and_batches_of_others_are_unknown(server: Server) -> None:
    line = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    text = json.dumps({"custom_id": "a", "method": "POST", "url": CHATS, "body": line})
    file_id = upload(server, ACME, text)
    body = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"}
    assert call(server, OTHER, "POST", "/v1/batches", body)[0] == 404
    status, batch = call(server, ACME, "POST", "/v1/batches", body)
    assert status == 200, batch

    def ended() -> Any:
        found = call(server, ACME, "GET", f"/v1/batches/{batch['id']}")[1]
        return found if found["status"] in ("completed", "failed") else None

    done = until("the batch ends", ended)
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", 1)
    for kept in (file_id, done["output_file_id"]):
        for method, place in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert call(server, OTHER, method, f"/v1/files/{kept}{place}")[0] == 404
            assert call(server, {}, method, f"/v1/files/{kept}{place}")[0] == 401
        assert call(server, ACME, "GET", f"/v1/files/{kept}/content")[0] == 200
    for method, place in (("GET", ""), ("POST", "/cancel")):
        assert call(server, OTHER, method, f"/v1/batches/{batch['id']}{place}")[0] == 404
    for listed in ("files", "batches"):
        assert call(server, OTHER, "GET", f"/v1/{listed}")[1]["data"] == []
        assert call(server, ACME, "GET", f"/v1/{listed}")[1]["data"] != []
        status, refused = call(server, OTHER, "GET", f"/v1/{listed}?after={batch['id']}")
        assert (status, refused["error"]["param"]) == (400, "after")


def test_restrictions_hold_for_both_interfaces(server: Server) -> None:
    assert call(server, ACME, "GET", "/v1/models")[0] == 401
    assert call(server, {**ACME, **ADMIN}, "GET", "/v1/models")[0] == 200
    assert call(server, ACME, "GET", "/v1%2Fmodels")[0] != 200
