"""The whole server over a replicated log whose primary is killed under load, at level replicated:1."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import e2e_models as models
import log_servers as servers
import pytest
from e2e_asking import until
from e2e_server import Server, start

pytestmark = pytest.mark.e2e


BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()


def parts_of(server: Server) -> set[int]:
    """Its parts, with the one that starts last: what else it has, as workers for large payloads, may come and go."""
    until("all parts are up", lambda: "webhooks is up" in server.log())
    return {p["pid"] for p in server.processes() if "parent" not in p}


@pytest.mark.long
def test_a_failover_loses_no_acknowledged_job_and_needs_nobody(tmp_path: Path) -> None:
    models.scaling(tmp_path / "models", "doubles", 2.0)
    acknowledged: list[str] = []
    refused: Counter[int] = Counter()
    running = True
    with ExitStack() as stack:
        cluster = servers.Cluster(stack)
        flags = (f"--log-url={cluster.url}", "--durability=replicated:1", "--journal=all")
        server = start(tmp_path / "models", tmp_path / "state", *flags)
        server.wait_ready()
        before = parts_of(server)

        def client() -> None:
            headers = {"Prefer": "respond-async", "Content-Type": "application/json"}
            while running:
                status, body = server.request("POST", "/v2/models/doubles/infer", BODY, headers)
                if status == 202:
                    answer = json.loads(body)
                    assert answer["durability"] == "replicated:1"
                    acknowledged.append(answer["id"])
                else:
                    refused[status] += 1

        threads = [threading.Thread(target=client) for _ in range(4)]
        for thread in threads:
            thread.start()
        until("jobs are taken", lambda: len(acknowledged) >= 100)
        os.kill(cluster.primary.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        until("another primary is named", lambda: cluster.named() != cluster.primary.port)
        reached = len(acknowledged) + 1
        until("jobs are taken again", lambda: len(acknowledged) >= reached)
        away_s = time.monotonic() - killed_s
        until("many are", lambda: len(acknowledged) >= reached + 100)
        running = False
        for thread in threads:
            thread.join(60)

        def succeeded(job: str) -> bool:
            status, body = server.get(f"/v2/jobs/{job}")
            assert status in (200, 503), f"job {job} was lost: {body!r}\n{server.log()}"
            return status == 200 and bool(json.loads(body)["state"] == "succeeded")

        for job in acknowledged:
            until(f"{job} succeeds", lambda job=job: succeeded(job))
        assert set(refused) <= {503}, refused
        assert parts_of(server) >= before, "nobody was restarted"
        assert server.get("/v2/health/ready")[0] == 200
        charonia = Path(sys.executable).parent / "charonia"

        def audited() -> bytes:
            done = subprocess.run([charonia, "audit", f"--log-url={cluster.url}"], capture_output=True, check=False)
            assert done.returncode == 0, done.stdout.decode()
            return done.stdout if b"0 unfinished" in done.stdout else b""

        # a job whose client was told 503 may have been taken, and runs still
        audit = until("no job is unfinished", audited)
        print(f"{len(acknowledged)} jobs acknowledged, none lost; {refused[503]} refused; none for {away_s:.1f} s")
        print(audit.decode())
        assert server.stop() == 0, server.log()
