"""An executor that stands still for longer than its lease: its work runs elsewhere, and later it serves again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from e2e_asking import infer, until
from e2e_models import WIDTH, gated, scaling
from e2e_server import REPOSITORY, Server

from charonia.eventlog.embedded import PrivateServer, find_server

pytestmark = pytest.mark.long

CHARONIA = str(Path(sys.executable).parent / "charonia")


class Part(Server):
    """One role's process, its metrics on a Unix socket."""

    def __init__(self, role: str, name: str, directory: Path, log_url: str, *flags: str) -> None:
        log_file, self.socket = directory / f"{name}.log", directory / f"{name}.sock"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [CHARONIA, role, "--log-url", log_url, f"--metrics-socket={self.socket}", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=REPOSITORY,
            )
        super().__init__(process, directory, log_file)

    def read_endpoints(self) -> None:
        found = re.search(r"gateway is up, http on ([\d.:]+), grpc on ([\d.:]+)", self.log())
        if found is None:
            raise ValueError("not up yet")
        self.http, self.grpc = found[1], found[2]

    def scrape(self) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(self.socket))
            connection.sendall(b"GET /metrics HTTP/1.0\r\nHost: part\r\nConnection: close\r\n\r\n")
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log()
        return "is up" in self.log()

    def fenced(self) -> float:
        return sum(float(number) for number in re.findall(r"^charonia_fenced_total{.*} (\S+)", self.scrape(), re.M))

    def executed(self) -> float:
        found = re.findall(r"^charonia_executor_executions_total{.*} (\S+)", self.scrape(), re.M)
        return sum(float(number) for number in found)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    (tmp_path / "log").mkdir()
    log = PrivateServer(tmp_path / "log", find_server())
    log.start()
    log.wait_ready()
    with ExitStack() as stack:
        stack.callback(log.stop)
        started: list[Part] = []

        def stop_all() -> None:
            for part in started:
                if part.process.poll() is None:
                    os.kill(part.process.pid, signal.SIGCONT)
                    part.stop()
                # shown when the test fails
                sys.stderr.write(f"--- {part.log_file.name}\n{part.log()}\n")

        stack.callback(stop_all)

        def start_part(role: str, name: str, *flags: str) -> Part:
            started.append(Part(role, name, tmp_path, log.url, *flags))
            return started[-1]

        yield start_part


def holder(entered: Path, parts: list[Part]) -> Part:
    """The executor whose instance has made a file: its model process is its child."""
    for part in parts:
        children = Path(f"/proc/{part.process.pid}/task/{part.process.pid}/children").read_text().split()
        if any(Path(f"/proc/{child}").exists() and entered.read_text() == child for child in children):
            return part
    raise AssertionError("nobody's child")


def test_a_stalled_executors_work_moves_on_and_its_late_commit_is_fenced_off(start: object, tmp_path: Path) -> None:
    """Its lease moves on; what it finishes late is fenced off."""
    models = tmp_path / "models"
    gated(models, "gated", "max_batch_size: 8 instance_group { kind: KIND_CPU count: 1 }")
    code = models / "gated" / "1" / "model.py"
    # who holds a request says so with its pid
    code.write_text(code.read_text().replace('open(parameters["entered"], "w").close()', SAY_WHO))
    flags = ("--http-port=0", "--grpc-port=0", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1")
    gateway = start("gateway", "gateway", *flags)
    start("batcher", "batcher")
    executors = [start("executor", f"executor{n}", f"--model-repository={models}") for n in range(2)]
    for executor in executors:
        until("an executor is up", executor.is_up)
    gateway.wait_ready()
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    options = {"parameters": {"entered": str(entered), "gate": str(gate)}}
    value = np.full((1, 1), 7, np.int32)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(infer, gateway, "gated", options=options, VALUE=value)
        until("an instance has the request", lambda: entered.exists() or asking.done())
        assert not asking.done(), asking.result()
        stalled = holder(entered, executors)
        other = next(executor for executor in executors if executor is not stalled)
        os.kill(stalled.process.pid, signal.SIGSTOP)
        entered.unlink()
        until("the other executor's instance has it", entered.exists)
        assert holder(entered, executors) is other
        gate.touch()  # both instances go on; only one of their executors can hear of it
        assert asking.result(60).as_numpy("ECHO").tolist() == [[7]]
        os.kill(stalled.process.pid, signal.SIGCONT)
        until("its late commit was fenced off and counted", lambda: stalled.fenced() == 1)
        assert other.fenced() == 0
        # and it serves again: alone, once the other one is gone
        before = stalled.executed()
        other.stop()
        assert infer(gateway, "gated", VALUE=value).as_numpy("ECHO").tolist() == [[7]]
        until("it has counted it", lambda: stalled.executed() == before + 1)


def test_the_only_executor_of_a_server_goes_on_after_a_stall(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Its batcher stood still with it: what was accepted meanwhile waits for both."""
    models = tmp_path / "models"
    scaling(models, "double", 2)
    server = serve(models, "--heartbeat-ttl-secs=2")
    (stalled,) = server.pids("executor+batcher")
    value = np.ones((1, WIDTH), np.float32)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(infer, server, "double", INPUT0=value) for _ in range(8)]
        os.kill(stalled, signal.SIGSTOP)
        try:
            asked += [pool.submit(infer, server, "double", INPUT0=value) for _ in range(8)]
            until("it is taken for lost", lambda: server.get("/v2/models/double/ready")[0] != 200)
        finally:
            os.kill(stalled, signal.SIGCONT)
        for future in asked:
            assert (future.result(60).as_numpy("OUTPUT0") == 2).all()
    until("it is back", lambda: server.get("/v2/models/double/ready")[0] == 200)
    assert (infer(server, "double", INPUT0=value).as_numpy("OUTPUT0") == 2).all()
    assert server.pids("executor+batcher") == [stalled]


SAY_WHO = """made = parameters["entered"] + ".new"
                with open(made, "w") as file:
                    file.write(str(os.getpid()))
                os.rename(made, parameters["entered"])"""
