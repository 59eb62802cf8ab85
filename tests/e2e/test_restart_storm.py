"""Executors are killed again and again, with the batcher in them or apart: healthy work ends well, nobody is blamed."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from e2e_asking import until
from e2e_models import python
from e2e_server import Server, serving

from charonia import keys

SOURCE = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        while not os.path.exists("{go}"):
            time.sleep(0.01)
        time.sleep(0.3)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy() * 2)])
            for r in requests
        ]
"""

CONFIG = """
max_batch_size: 4
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
dynamic_batching { }
"""

JOBS, KILLS = 60, 4


def submit(server: Server, value: int) -> str:
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "INT32", "data": [value]}]}
    headers = {"Prefer": "respond-async", "Content-Type": "application/json"}
    status, answer = server.request("POST", "/v2/models/slow/infer", json.dumps(body).encode(), headers)
    assert status == 202, answer
    return str(json.loads(answer)["id"])


@pytest.mark.parametrize(
    ("role", "flags"),
    [("executor+batcher", ()), ("executor", ("--batcher=separate", "--executors=2"))],
    ids=["together", "apart"],
)
@pytest.mark.long
def test_healthy_work_survives_executors_killed_again_and_again(
    role: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    python(tmp_path / "models", "slow", SOURCE.replace("{go}", str(go)), CONFIG)
    with serving(tmp_path / "models", tmp_path / "state", *flags) as server:
        jobs = [submit(server, value) for value in range(JOBS)]

        def jobs_by_id() -> dict[str, str]:
            page = json.loads(server.get(f"/v2/jobs?model=slow&limit={JOBS}")[1])
            return {job["id"]: job["state"] for job in page["jobs"]}

        def states() -> list[str]:
            return list(jobs_by_id().values())

        assert len(jobs) == len(states()) == JOBS
        go.touch()

        killed, aboard = 0, set[str]()

        def can_go_on(done: int) -> bool:
            """Progress between two kills: the work is shorter than the time between them. A job that was aboard a kill
            runs alone then, and one that is killed alone twice is blamed (ADR 0082): these must have ended.
            """
            seen = jobs_by_id()
            ended = {job for job, state in seen.items() if state not in ("queued", "running")}
            return len(ended) > min(done, JOBS - 1) and aboard <= ended

        while killed < KILLS and {"queued", "running"} & set(states()):
            done = states().count("succeeded")
            until("some more are done, and those that were killed", lambda done=done: can_go_on(done))
            aboard = {job for job, state in jobs_by_id().items() if state == "running"}
            for pid in server.pids(role):
                with suppress(ProcessLookupError):  # one that was killed before is listed for a moment longer
                    os.kill(pid, signal.SIGKILL)
            killed += 1
        assert killed > 1
        until("all have ended", lambda: not {"queued", "running"} & set(states()))
        failed = [job for job, state in jobs_by_id().items() if state != "succeeded"]
        assert not failed, [server.get(f"/v2/jobs/{job}")[1] for job in failed]
        with server.log_client() as log:
            assert log.xlen(keys.dead_letters("slow")) == 0
