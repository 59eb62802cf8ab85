"""The operator says how long a silence is a loss, and what a lost gateway lent does not stay."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from e2e_asking import infer, until
from e2e_models import gated
from e2e_server import Server, serving

TTL_MS = 5_000
LONGER_THAN_THE_DEFAULT_MS = 2_000
LARGE = np.zeros((1, 100_000), np.int32)


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("points")


@pytest.fixture(scope="module")
def server(points: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    gated(models, "gated", "max_batch_size: 8 instance_group { kind: KIND_CPU count: 1 }")
    flags = (f"--heartbeat-ttl-secs={TTL_MS / 1000}", "--gateway-heartbeat-ttl-secs=1", "--batcher=separate")
    state = tmp_path_factory.mktemp("state")
    with serving(models, state, *flags, "--shm-dir=/proc/none", f"--fail-points={points}") as running:
        yield running


@pytest.fixture
def log(server: Server) -> Iterator[Any]:
    with redis.Redis.from_url(server.log_url) as client:
        yield client


def test_a_silence_shorter_than_the_lease_costs_nothing(server: Server, log: Any, tmp_path: Path) -> None:
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    body = {
        "inputs": [{"name": "VALUE", "shape": [1, 1], "datatype": "INT32", "data": [7]}],
        "parameters": {"entered": str(entered), "gate": str(gate)},
    }
    status, receipt = server.request(
        "POST", "/v2/models/gated/infer", json.dumps(body).encode(), {"Prefer": "respond-async"}
    )
    assert status == 202, receipt
    job = f"/v2/jobs/{json.loads(receipt)['id']}"
    until("an instance has the job", entered.exists)
    (executor,) = server.pids("executor")
    (lease,) = log.scan_iter("alive:executor:*")
    assert TTL_MS / 2 < log.pttl(lease) <= TTL_MS
    os.kill(executor, signal.SIGSTOP)
    try:
        until("it was silent", lambda: log.pttl(lease) < TTL_MS - LONGER_THAN_THE_DEFAULT_MS)
    finally:
        os.kill(executor, signal.SIGCONT)
    gate.touch()
    assert server.get(f"{job}/result?wait=60")[0] == 200
    assert json.loads(server.get(job)[1])["attempts"] == 1
    assert "is lost" not in server.log()


def test_what_a_killed_gateway_lent_is_deleted(server: Server, log: Any, points: Path) -> None:
    """Killed between the write of a payload and the acceptance of its request."""
    (gateway,) = server.pids("gateway")
    (points / "gateway.parsed.armed").touch()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(infer, server, "gated", VALUE=LARGE)
        until("the payload is there and its request is not", (points / "gateway.parsed.hit").exists)
        assert len(list(log.scan_iter("blob:*"))) == 1
        os.kill(gateway, signal.SIGKILL)
        (points / "gateway.parsed.hit").unlink()
        assert asking.exception(60) is not None
    until("another gateway is there", lambda: server.pids("gateway") not in ([], [gateway]))
    until("its payload is gone", lambda: not list(log.scan_iter("blob:*")))
    until("so are its names", lambda: not [name for name in log.scan_iter("bl:*") if f"-{gateway}-".encode() in name])
    until("all is served again", lambda: server.get("/v2/models/gated/ready")[0] == 200)
    assert infer(server, "gated", VALUE=LARGE).as_numpy("ECHO").shape == LARGE.shape
