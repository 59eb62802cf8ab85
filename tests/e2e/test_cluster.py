"""A whole server whose log is a Redis Cluster, under load while the slots of its model and of its facts move."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from e2e_asking import until
from e2e_models import WIDTH, scaling
from e2e_server import serving

from charonia import keys
from charonia.eventlog.redis.server.topology import slot_of

pytestmark = pytest.mark.long

CLIENTS = 6
ROUNDS = 3
INFER = "/v2/models/double/infer"


def body_of(number: int) -> bytes:
    tensor = {"name": "INPUT0", "shape": [1, WIDTH], "datatype": "FP32", "data": [number] * WIDTH}
    return json.dumps({"inputs": [tensor]}).encode()


def test_nothing_is_lost_while_slots_move(fresh_cluster_url: str, redis_cluster: Any, tmp_path: Path) -> None:
    scaling(tmp_path / "models", "double", 2.0)
    enough = Event()

    def ask(server: Any, client: int) -> list[tuple[int, str]]:
        """Every other request waits for its answer, the others are jobs whose places are returned."""
        jobs = []
        number = client
        while not enough.is_set():
            number += CLIENTS
            headers = {} if number % 2 else {"Prefer": "respond-async"}
            status, answer = server.request("POST", INFER, body_of(number), headers)
            assert status == (202 if headers else 200), answer
            if headers:
                jobs.append((number, str(json.loads(answer)["location"])))
            else:
                assert json.loads(answer)["outputs"][0]["data"] == [2 * number] * WIDTH
        return jobs

    flags = (f"--log-url={fresh_cluster_url}", "--journal=all")
    with serving(tmp_path / "models", tmp_path / "state", *flags) as server, ThreadPoolExecutor(CLIENTS) as threads:
        asking = [threads.submit(ask, server, client) for client in range(CLIENTS)]
        try:
            for _ in range(ROUNDS):
                for name in (keys.counters("double"), keys.CONTROL, keys.EPOCH, keys.JOB_MODELS):
                    slot = slot_of(name)
                    at = redis_cluster.servers.index(redis_cluster.holder(slot))
                    redis_cluster.move(slot, redis_cluster.servers[(at + 1) % len(redis_cluster.servers)])
        finally:
            enough.set()
        jobs = [job for done in asking for job in done.result()]
        assert len(jobs) > CLIENTS
        print(f"{len(jobs)} jobs, beside calls that wait, while slots moved {ROUNDS * 4} times: none failed")
        for number, place in jobs:
            status, answer = server.request("GET", f"{place}/result?wait=60")
            assert status == 200, answer
            assert json.loads(answer)["outputs"][0]["data"] == [2 * number] * WIDTH
        charonia = Path(sys.executable).parent / "charonia"

        def audited() -> bytes:
            done = subprocess.run(
                [charonia, "audit", f"--log-url={fresh_cluster_url}"], capture_output=True, check=False
            )
            assert done.returncode == 0, done.stdout.decode()
            return done.stdout if b"0 unfinished" in done.stdout else b""

        # the answer to a call may be there before its settlement, which is on another server
        print(until("nothing is unfinished", audited).decode())
