"""A process that is busy is not lost, one that has ended is at once; what a lost gateway lent does not stay.

How long silences and stalls may be is the operator's to say.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from e2e_asking import infer, until
from e2e_models import WIDTH, gated, scaling
from e2e_server import Server, serving

from charonia import keys
from charonia.eventlog.port import Entry
from charonia.facts.events import ProcessLeft, facts_of

pytestmark = pytest.mark.long

TTL_MS = 7_000
LONGER_THAN_THE_DEFAULT_MS = 2_500
GATEWAY_TTL_S = 4
HELD_S = 7.0
"""Longer than the lease of the gateway that is held up, with any heartbeat before it."""
AT_ONCE_S, TRIES = 3.5, 5
"""Milliseconds on an idle machine; much less than any lease here on a busy one, which may hold up some tries."""
LARGE = np.zeros((1, 100_000), np.int32)


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("points")


@pytest.fixture(scope="module")
def server(points: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    gated(models, "gated", "max_batch_size: 8 instance_group { kind: KIND_CPU count: 1 }")
    flags = (
        f"--heartbeat-ttl-secs={TTL_MS / 1000}",
        f"--gateway-heartbeat-ttl-secs={GATEWAY_TTL_S}",
        "--batcher=separate",
    )
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
    until("it is as long as was said", lambda: log.pttl(lease) > TTL_MS / 2)
    assert log.pttl(lease) <= TTL_MS
    silent = [executor, keeper_of(server, executor)]  # as if its machine stood still
    for pid in silent:
        os.kill(pid, signal.SIGSTOP)
    try:
        until("it was silent", lambda: log.pttl(lease) < TTL_MS - LONGER_THAN_THE_DEFAULT_MS)
    finally:
        for pid in silent:
            os.kill(pid, signal.SIGCONT)
    gate.touch()
    assert server.get(f"{job}/result?wait=60")[0] == 200
    assert json.loads(server.get(job)[1])["attempts"] == 1
    assert "is lost" not in server.log()


def keeper_of(server: Server, pid: int) -> int:
    """The process that prolongs the leases of a part."""

    def found() -> int:
        return next((p["pid"] for p in server.processes() if p["role"] == "beats" and p["parent"] == pid), 0)

    return until("its keeper is there", found)


def losses(log: Any) -> list[str]:
    """The processes that were written down as lost, in order."""
    entries = [Entry(at, [part for pair in fields.items() for part in pair]) for at, fields in log.xrange(keys.CONTROL)]
    facts = [fact for entry in entries for fact in facts_of(entry)]
    return [fact.incarnation for fact in facts if isinstance(fact, ProcessLeft) and fact.reason == "lost"]


def lease_of(log: Any, role: str, pid: int) -> bytes:
    """Its lease, once it has one."""

    def found() -> bytes:
        return next((bytes(name) for name in log.scan_iter(f"alive:{role}:*") if f"-{pid}-".encode() in name), b"")

    return until(f"{role} {pid} has a lease", found)


def held_up(points: Path, point: str, held_s: float, look: Callable[[], None]) -> None:
    """Hold a process at its next pass of a point, where its event loop stands still; look all the time."""
    hit = points / f"{point}.hit"
    until("it is held up", hit.exists)
    give_up_at = time.monotonic() + held_s
    until("it was held up for long", lambda: look() or time.monotonic() > give_up_at)
    assert hit.exists()
    hit.unlink()


def test_a_gateway_whose_loop_stands_still_is_not_lost(server: Server, log: Any, points: Path) -> None:
    """Its lease is of four seconds, it stands still for seven; the keeper is a new one."""
    (gateway,) = server.pids("gateway")
    keeper = keeper_of(server, gateway)
    os.kill(keeper, signal.SIGKILL)
    until("another keeper is there", lambda: keeper_of(server, gateway) != keeper)
    until("the new one prolongs", lambda: server.log().count(f"prolongs the leases of process {gateway}\n") == 2)
    lease = lease_of(log, "gateway", gateway)
    left_ms = log.pttl(lease)

    def prolonged() -> bool:
        nonlocal left_ms
        before_ms, left_ms = left_ms, log.pttl(lease)
        return bool(left_ms > before_ms)

    until("the lease is prolonged", prolonged)
    before = losses(log)

    def look() -> None:
        assert log.pttl(lease) > 0

    (points / "gateway.parsed.armed").touch()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(infer, server, "gated", VALUE=np.full((1, 1), 7, np.int32))
        held_up(points, "gateway.parsed", HELD_S, look)
        assert asking.result(60).as_numpy("ECHO").tolist() == [[7]]
    assert losses(log) == before
    assert server.pids("gateway") == [gateway]


def test_an_executor_whose_loop_stands_still_keeps_its_work(server: Server, log: Any, points: Path) -> None:
    (executor,) = server.pids("executor")
    before = losses(log)
    (points / "executor.executing.armed").touch()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(infer, server, "gated", VALUE=np.full((1, 1), 7, np.int32))
        lease = lease_of(log, "executor", executor)

        def look() -> None:
            assert log.pttl(lease) > 0

        held_up(points, "executor.executing", TTL_MS / 1000 + 1.5, look)
        assert asking.result(60).as_numpy("ECHO").tolist() == [[7]]
    assert losses(log) == before


def killed(server: Server, log: Any, prepared: Callable[[int], AbstractContextManager[None]] = nullcontext) -> float:
    """Kill the executor, and wait for its successor; after how many seconds it was said to be lost."""
    (executor,) = server.pids("executor")
    lease = lease_of(log, "executor", executor)
    with prepared(executor):
        began_s = time.monotonic()
        os.kill(executor, signal.SIGKILL)
        until("it is said to be lost", lambda: any(f"-{executor}-" in name for name in losses(log)))
        took_s = time.monotonic() - began_s
    print(f"lost after {took_s * 1000:.0f} ms")
    until("its lease is gone", lambda: not log.exists(lease))
    until("another executor is there", lambda: server.pids("executor") not in ([], [executor]))
    until("and serves", lambda: server.get("/v2/models/gated/ready")[0] == 200)
    return took_s


def test_a_process_that_has_ended_is_lost_at_once(server: Server, log: Any) -> None:
    """Long before its lease of seven seconds ends."""
    assert any(killed(server, log) < AT_ONCE_S for _ in range(TRIES))
    assert infer(server, "gated", VALUE=np.full((1, 1), 7, np.int32)).as_numpy("ECHO").tolist() == [[7]]


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """The process shares a processor with others that have all of it, almost."""
    processor = {min(os.sched_getaffinity(pid))}
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, processor)
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    greedy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(8)]
    try:
        for one in greedy:
            os.sched_setaffinity(one.pid, processor)
        yield
    finally:
        for one in greedy:
            one.kill()
            one.wait()


def test_a_killed_process_is_lost_at_once_however_long_it_takes_to_end(server: Server, log: Any) -> None:
    """Giving back its memory needs processor time, and until then its pidfd says nothing."""
    assert any(killed(server, log, starved) < AT_ONCE_S for _ in range(TRIES))


def test_a_loop_that_stands_still_for_too_long_is_lost(
    serve: Callable[..., Server], points: Path, tmp_path: Path
) -> None:
    """It is not busy but stuck; it joins again if it goes on all the same."""
    models = tmp_path / "models"
    scaling(models, "double", 2)
    server = serve(models, "--stall-limit-secs=1.5", f"--fail-points={points}")
    (gateway,) = server.pids("gateway")
    value = np.ones((1, WIDTH), np.float32)
    with redis.Redis.from_url(server.log_url) as log, ThreadPoolExecutor(1) as pool:
        (points / "gateway.parsed.armed").touch()
        asking = pool.submit(infer, server, "double", INPUT0=value)
        until("it is held up", (points / "gateway.parsed.hit").exists)
        until("it is taken for lost", lambda: any(f"-{gateway}-" in name for name in losses(log)))
        until("that is said", lambda: "is taken for lost: its event loop has stood still for" in server.log())
        (points / "gateway.parsed.hit").unlink()
        asking.exception(60)
        until("its lease is back", lambda: any(f"-{gateway}-".encode() in n for n in log.scan_iter("alive:gateway:*")))
    assert (infer(server, "double", INPUT0=value).as_numpy("OUTPUT0") == 2).all()
    assert server.pids("gateway") == [gateway]


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
