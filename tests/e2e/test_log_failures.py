"""The log is killed, stalled, flushed and restarted under `charonia serve`: what is said meanwhile, what is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import e2e_models as models
import pytest
import redis
from e2e_asking import until
from e2e_load import Load
from e2e_server import start

from charonia.eventlog.embedded import PrivateServer

pytestmark = pytest.mark.e2e

BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()

JOB = {"Prefer": "respond-async", "Content-Type": "application/json"}
CLIENTS = 8

LEASES_OF_TWO_SECONDS = ("--heartbeat-ttl-secs=2", "--gateway-heartbeat-ttl-secs=2")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    models.scaling(path, "doubles", 2.0)
    return path


class Refused(Exception):
    """Another status than the one asked for."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, json.loads(body)["error"])
        self.status = status


def load_on(server: Any, clients: int = CLIENTS) -> Load:
    """Clients whose refusals are kept."""

    @contextmanager
    def asking(_: int) -> Iterator[Callable[[int], None]]:
        def ask(_: int) -> None:
            status, body = server.request("POST", "/v2/models/doubles/infer", BODY)
            if status != 200:
                raise Refused(status, body)
            assert json.loads(body)["outputs"][0]["data"] == [2, 4, 6, 8]

        yield ask

    return Load(asking, clients, (Refused,))


def failures(load: Load) -> list[Refused]:
    return [error for errors in load.errors for error in errors]


def statuses(load: Load) -> set[int]:
    return {error.status for error in failures(load)}


def ready(server: Any) -> bool:
    return bool(server.get("/v2/health/ready")[0] == 200)


def counted(server: Any, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in server.scrape().splitlines() if line.startswith(name))


@pytest.mark.parametrize(("flags", "parts"), [((), 2), (("--executors=2",), 4)], ids=["colocated", "separate"])
@pytest.mark.long
def test_serving_resumes_by_itself_on_a_flushed_log(
    repository: Path, tmp_path: Path, flags: tuple[str, ...], parts: int
) -> None:
    server = start(repository, tmp_path / "state", *flags)
    server.wait_ready()
    before = parts_of(server)
    assert counted(server, "charonia_log_epoch_changes_total") == 0
    lost = submit(server, "doubles", json.loads(BODY))
    until("the job ends", lambda: job_state(server, lost["id"])() == "succeeded")
    with load_on(server) as load:
        load.more(6)
        with redis.Redis.from_url(server.log_url) as client:
            for round_ in range(2):
                client.flushall()
                until(
                    "every part begins anew",
                    lambda round_=round_: counted(server, "charonia_log_epoch_changes_total") == parts * (round_ + 1),
                )
                until("readiness returns", lambda: ready(server))
                load.more(6)
    # typed all of them: 503 unknown outcome, or 400/404 for what nobody has said anew yet
    assert statuses(load) <= {404, 503}, failures(load)
    assert parts_of(server) >= before, "nobody was restarted"
    status, body = server.get(f"/v2/jobs/{lost['id']}")
    assert (status, json.loads(body)["error"]) == (404, "job not found: the log epoch changed")
    again = submit(server, "doubles", json.loads(BODY))
    until("a job of the new epoch ends", lambda: job_state(server, again["id"])() == "succeeded")
    # a replica that lagged may know nothing of who owns what
    with redis.Redis.from_url(server.log_url) as client:
        client.hdel("n:{doubles}", "owner", "token")
    again = submit(server, "doubles", json.loads(BODY))
    until("a job of a model that lost its owner ends", lambda: job_state(server, again["id"])() == "succeeded")
    assert server.stop() == 0, server.log()
    assert "Traceback" not in server.log(), server.log()


def parts_of(server: Any) -> set[int]:
    """Its parts, with the one that starts last: what else it has, as workers for large payloads, may come and go."""
    until("all parts are up", lambda: "webhooks is up" in server.log())
    return {p["pid"] for p in server.processes() if "parent" not in p}


@pytest.mark.long
def test_a_stalled_log_is_waited_for_and_one_that_writes_nothing_is_said(repository: Path, tmp_path: Path) -> None:
    server = start(repository, tmp_path / "state", "--executors=2", *LEASES_OF_TWO_SECONDS)
    server.wait_ready()
    (log_pid,) = server.pids("redis")
    with load_on(server) as load:
        load.more(6)
        os.kill(log_pid, signal.SIGSTOP)
        time.sleep(3.0)  # the length of the stall is what is tested
        stalled = sum(load.answered)
        os.kill(log_pid, signal.SIGCONT)
        load.more(6)
        assert sum(load.answered) > stalled
    assert failures(load) == [], "slow is not down"
    until("it is ready", lambda: ready(server))

    # it answers, but refuses to write: a full disk, too few replicas
    with redis.Redis.from_url(server.log_url) as client:
        client.config_set("min-replicas-to-write", 1)
        until("readiness says so", lambda: not ready(server))
        status, body = server.request("POST", "/v2/models/doubles/infer", BODY)
        assert (status, b"NOREPLICAS" in body) == (503, True)
        client.config_set("min-replicas-to-write", 0)
    until("readiness returns", lambda: ready(server))
    assert server.request("POST", "/v2/models/doubles/infer", BODY)[0] == 200
    assert server.stop() == 0, server.log()
    assert "is lost: its heartbeat ended" not in server.log()
    assert "lost the event log" not in server.log()


@contextmanager
def own_log() -> Iterator[PrivateServer]:
    """A log of the test's own, which nobody restarts behind its back."""
    state_dir = Path(tempfile.mkdtemp(prefix="charonia-test-"))
    log = PrivateServer(state_dir)
    log.start()
    log.wait_ready()
    try:
        yield log
    finally:
        log.stop()
        shutil.rmtree(state_dir)


@pytest.mark.long
def test_a_dead_log_is_said_at_once_and_accepts_nothing(repository: Path, tmp_path: Path) -> None:
    with own_log() as log:
        server = start(repository, tmp_path / "state", f"--log-url={log.url}")
        server.wait_ready()
        with load_on(server, 4) as load:
            load.more(6)
            log.kill()
            died_at = time.monotonic()
            until("readiness is false", lambda: not ready(server))
            assert time.monotonic() - died_at < 14.0, "a command that is not answered has 15 s"
            assert server.request("POST", "/v2/models/doubles/infer", BODY, JOB)[0] == 503
            log.start()
            log.wait_ready()
            until("readiness returns", lambda: ready(server))
            assert counted(server, "charonia_log_epoch_changes_total") == 0
            load.more(6)
        assert statuses(load) <= {503}, failures(load)
        assert server.stop() == 0, server.log()


def submit(server: Any, model: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = server.request("POST", f"/v2/models/{model}/infer", json.dumps(body).encode(), JOB)
    assert status == 202, answer
    return dict(json.loads(answer))


def kill_everything(server: Any) -> None:
    pids = [p["pid"] for p in server.processes()]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: nobody restarts anybody
        for pid in pids:
            with suppress(ProcessLookupError):  # what has just ended may still be listed
                os.kill(pid, number)
    server.process.wait()


def job_state(server: Any, job: str) -> Callable[[], str]:
    def look() -> str:
        status, body = server.get(f"/v2/jobs/{job}")
        return str(json.loads(body)["state"]) if status == 200 else f"{status}"

    return look


@pytest.mark.long
def test_jobs_survive_the_end_of_everything(tmp_path: Path) -> None:
    """SIGKILL of every process at once, the log server included, at level fsync."""
    repository = tmp_path / "models"
    models.gated(repository, "gated", "max_batch_size: 1")
    gate, entered = tmp_path / "gate", tmp_path / "entered"

    def value(number: int, **parameters: str) -> dict[str, Any]:
        tensor = {"name": "VALUE", "shape": [1, 1], "datatype": "INT32", "data": [number]}
        return {"inputs": [tensor], "parameters": parameters}

    server = start(repository, tmp_path / "state", "--durability=fsync")
    server.wait_ready()
    done = submit(server, "gated", value(1))
    assert done["durability"] == "fsync"
    until("the first job ends", lambda: job_state(server, done["id"])() == "succeeded")
    running = submit(server, "gated", value(2, gate=str(gate), entered=str(entered)))
    until("the second job runs", entered.exists)
    queued = [submit(server, "gated", value(number, gate=str(gate))) for number in range(3, 8)]
    kill_everything(server)

    again = start(repository, tmp_path / "state", "--durability=fsync")
    again.wait_ready()
    status, body = again.get(f"/v2/jobs/{done['id']}/result")
    assert (status, json.loads(body)["outputs"][2]["data"]) == (200, [1])
    gate.touch()
    for number, job in zip(range(2, 8), [running, *queued], strict=True):
        until(f"job {number} ends", lambda job=job: job_state(again, job["id"])() == "succeeded")
        status, body = again.get(f"/v2/jobs/{job['id']}/result")
        assert (status, json.loads(body)["outputs"][2]["data"]) == (200, [number])
    with redis.Redis.from_url(again.log_url, decode_responses=True) as client:
        until(
            "what dead processes would have read is gone",
            lambda: not [key for key in client.scan_iter("[xr]:*") if client.xlen(key)],
        )
    assert again.stop() == 0, again.log()


@pytest.mark.parametrize("flags", [(), ("--executors=2",)], ids=["colocated", "separate"])
@pytest.mark.long
def test_a_full_log_finishes_what_it_has_and_takes_nothing_new(tmp_path: Path, flags: tuple[str, ...]) -> None:
    repository = tmp_path / "models"
    models.gated(repository, "gated", "max_batch_size: 1")
    gate, entered = tmp_path / "gate", tmp_path / "entered"

    def value(number: int, **parameters: str) -> dict[str, Any]:
        tensor = {"name": "VALUE", "shape": [1, 1], "datatype": "INT32", "data": [number]}
        return {"inputs": [tensor], "parameters": parameters}

    server = start(repository, tmp_path / "state", *flags, *LEASES_OF_TWO_SECONDS)
    server.wait_ready()
    jobs = [submit(server, "gated", value(0, gate=str(gate), entered=str(entered)))]
    until("the first job runs", entered.exists)
    jobs += [submit(server, "gated", value(number, gate=str(gate))) for number in range(1, 5)]
    with redis.Redis.from_url(server.log_url) as client:
        client.config_set("maxmemory", 1)
        status, body = server.request("POST", "/v2/models/gated/infer", json.dumps(value(9)).encode())
        assert status == 503
        assert "the event log is full" in json.loads(body)["error"]
        time.sleep(2.5)  # longer than any lease of a process that could not beat
        gate.touch()
        for number, job in enumerate(jobs):
            until(f"job {number} ends", lambda job=job: job_state(server, job["id"])() == "succeeded")
        assert ready(server)
        client.config_set("maxmemory", 0)
    status, body = server.request("POST", "/v2/models/gated/infer", json.dumps(value(9)).encode())
    assert (status, json.loads(body)["outputs"][2]["data"]) == (200, [9])
    assert server.stop() == 0, server.log()
    assert "is lost: its heartbeat ended" not in server.log()


@pytest.mark.long
def test_no_acknowledged_job_is_lost_when_the_log_is_killed(repository: Path, tmp_path: Path) -> None:
    """At level fsync, twice, under load: what was answered 202 succeeds, what could not be promised was not."""
    server = start(repository, tmp_path / "state", "--durability=fsync")
    server.wait_ready()
    acknowledged: list[str] = []

    @contextmanager
    def asking(_: int) -> Iterator[Callable[[int], None]]:
        def ask(_: int) -> None:
            status, body = server.request("POST", "/v2/models/doubles/infer", BODY, JOB)
            if status != 202:
                raise Refused(status, body)
            acknowledged.append(json.loads(body)["id"])

        yield ask

    with Load(asking, CLIENTS, (Refused,)) as load:
        for _ in range(2):
            load.more(12)
            (log_pid,) = server.pids("redis")
            os.kill(log_pid, signal.SIGKILL)
            until("the log is back", lambda pid=log_pid: server.pids("redis") not in ([], [pid]))
        load.more(12)
    assert statuses(load) <= {503}, failures(load)
    for job in acknowledged:
        until(f"{job} ends", lambda job=job: job_state(server, job)() == "succeeded")
    assert server.stop() == 0, server.log()


def test_a_level_the_log_cannot_promise_ends_the_start(repository: Path, tmp_path: Path) -> None:
    with own_log() as log:
        server = start(repository, tmp_path / "state", f"--log-url={log.url}", "--durability=fsync")
        assert server.process.wait(180) == 1
        assert "must run with 'appendfsync always', not 'everysec'" in server.log()
    server = start(repository, tmp_path / "state", "--durability=replicated:1")
    assert server.process.wait(180) == 1
    assert "--durability=replicated:1 needs replicas" in server.log()
