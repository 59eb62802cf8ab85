"""Tenants as their callers meet them: keys, bounds, jobs of others, a flood beside one request, keys that change."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_asking import client, inputs, until
from e2e_models import gated
from e2e_server import serving
from tritonclient.utils import InferenceServerException

INFER = "/v2/models/gated/infer"
ACME, OTHER = {"authorization": "Bearer acme-key"}, {"x-api-key": "other-key"}
ASYNC = {"prefer": "respond-async"}
_CONNECTIONS = 8
FLOOD = 10_000
KEYS = """
[tenants.acme]
keys = ["acme-key"]
[tenants.other]
keys = ["other-key"]
max_pending_requests = 2
weight = 2
"""


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS)
    return path


@pytest.fixture(scope="module")
def server(keys_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    gated(models, "gated", "max_batch_size: 1 instance_group [ { count: 1 kind: KIND_CPU } ]")
    with serving(models, tmp_path_factory.mktemp("state"), f"--api-keys={keys_file}") as running:
        yield running


def body_of(number: int, **parameters: str) -> bytes:
    tensor = {"name": "VALUE", "shape": [1, 1], "datatype": "INT32", "data": [number]}
    return json.dumps({"inputs": [tensor], **({"parameters": parameters} if parameters else {})}).encode()


def submit(server: Any, number: int, headers: dict[str, str], **parameters: str) -> str:
    status, body = server.request("POST", INFER, body_of(number, **parameters), {**headers, **ASYNC})
    assert status == 202, body
    return str(json.loads(body)["location"])


def flood(server: Any, count: int) -> None:
    """So many jobs of one tenant over a few connections."""

    def some(first: int) -> None:
        connection = http.client.HTTPConnection(server.http, timeout=60)
        with contextlib.closing(connection):
            for number in range(first, count, _CONNECTIONS):
                connection.request("POST", INFER, body_of(number), {**ACME, **ASYNC})
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 202

    with ThreadPoolExecutor(_CONNECTIONS) as threads:
        for done in [threads.submit(some, first) for first in range(_CONNECTIONS)]:
            done.result()


def listed(server: Any, headers: dict[str, str], **which: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        query = urllib.parse.urlencode({**which, "limit": 1000, **({"cursor": cursor} if cursor else {})})
        page = json.loads(server.request("GET", f"/v2/jobs?{query}", headers=headers)[1])
        found += page["jobs"]
        cursor = page["next"]
    return found


def view(server: Any, location: str, headers: dict[str, str]) -> dict[str, Any]:
    status, body = server.request("GET", location, headers=headers)
    assert status == 200, body
    return dict(json.loads(body))


def test_a_flood_of_one_tenant_and_what_another_may_do_meanwhile(server: Any, tmp_path: Path) -> None:
    gate, entered = tmp_path / "gate", tmp_path / "entered"
    submit(server, 0, ACME, gate=str(gate), entered=str(entered))
    until("the model is busy", entered.exists)
    flood(server, FLOOD)
    one = submit(server, 1000, OTHER)

    # bounds are each tenant's own
    submit(server, 1001, OTHER)
    status, body = server.request("POST", INFER, body_of(1002), {**OTHER, **ASYNC})
    assert status == 429
    assert "tenant 'other' of model 'gated' has reached its limit of 2" in json.loads(body)["error"]
    submit(server, FLOOD, ACME)

    # and so are jobs
    assert server.request("GET", one, headers=ACME) == server.request(
        "GET", "/v2/jobs/" + "0" * 32 + ".gated", headers=ACME
    )
    assert server.request("GET", one, headers=ACME)[0] == server.request("DELETE", one, headers=ACME)[0] == 404
    assert [job["tenant"] for job in listed(server, OTHER)] == ["other", "other"]

    gate.touch()
    status, _ = server.request("GET", f"{one}/result?wait=60", headers=OTHER)
    assert status == 200
    assert json.loads(server.request("DELETE", "/v2/jobs?model=gated", headers=ACME)[1])["cancelled"] > FLOOD // 2
    ended_us = view(server, one, OTHER)["timings"]["ended_us"]
    ran = listed(server, ACME, state="succeeded")
    before = sum(view(server, f"/v2/jobs/{job['id']}", ACME)["timings"]["ended_us"] <= ended_us for job in ran)
    # the one that ran, and two batches of one
    assert before <= 3, f"{before} of a flood of {FLOOD} ran before the one request of another tenant"


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_callers_without_a_known_key(server: Any, kind: str) -> None:
    with client(kind, server) as asking:
        tensors = inputs(kind, VALUE=np.array([[7]], np.int32))
        for headers in (None, {"authorization": "Bearer nobody"}):
            with pytest.raises(InferenceServerException) as caught:
                asking.infer("gated", tensors, headers=headers and {**headers})
            assert caught.value.status() in ("401", "StatusCode.UNAUTHENTICATED")
        answer = asking.infer("gated", tensors, headers={**ACME})
        assert answer.as_numpy("ECHO").item() == 7
        assert asking.is_server_ready()


def test_keys_that_change_count_without_a_restart(server: Any, keys_file: Path) -> None:
    fresh = {"x-api-key": "fresh-key"}
    assert server.request("POST", INFER, body_of(1), fresh)[0] == 401
    beside = keys_file.with_suffix(".new")
    beside.write_text(KEYS.replace("acme-key", "fresh-key"))
    os.utime(beside, ns=(time.time_ns(), time.time_ns()))
    beside.rename(keys_file)
    until("the new key counts", lambda: server.request("POST", INFER, body_of(1), fresh)[0] == 200)
    assert server.request("POST", INFER, body_of(1), ACME)[0] == 401
    assert server.request("POST", INFER, body_of(1), OTHER)[0] == 200
