"""How much slower this machine is than the one the budgets were measured on, as a factor for each kind of process.

A budget in microseconds of CPU is a promise about one machine. The design page's figures come with what bare tools cost
on that machine; the same bare tools, run here in the same interleaved bench, say what a microsecond there is worth
here: the echo server of a front for its gateway and the Python processes behind it, and an empty log server to which a
raw socket appends in pipelines of 100 for the log server (docs/adr/0006).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from .model import LoadTestError
from .processes import cpu_ns_by_role

REFERENCE_ECHO_US = {"http": 27.0, "grpc": 143.0}
REFERENCE_XADD_SERVER_US = 0.8

_PIPELINE = 100
_ROUNDS = 3000
_PATIENCE_S = 10.0


def measure_appends(server_pid: int) -> float:
    """CPU of a log server per appended 64 byte entry, in microseconds.

    Starts a scratch server with the program that `server_pid` runs, appends to it, and stops it. Raises LoadTestError
    when it cannot be started.
    """
    directory = Path(tempfile.mkdtemp(prefix="charonia-yardstick-"))
    path = directory / "log"
    program = os.readlink(f"/proc/{server_pid}/exe")
    process = subprocess.Popen(
        [
            program,
            "--port",
            "0",
            "--unixsocket",
            str(path),
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(directory),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with _connect(path, process) as client:
            _append(client, 20)
            server_before = cpu_ns_by_role({process.pid: "log"})["log"]
            _append(client, _ROUNDS)
            server_ns = cpu_ns_by_role({process.pid: "log"})["log"] - server_before
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)
    return server_ns / 1e3 / (_ROUNDS * _PIPELINE)


def _connect(path: Path, process: subprocess.Popen[bytes]) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    give_up_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            client.connect(str(path))
            return client
        except OSError as error:
            if process.poll() is not None or time.monotonic() > give_up_s:
                client.close()
                raise LoadTestError(f"a log server to calibrate with did not start: {error}") from None
            time.sleep(0.01)


def _append(client: socket.socket, rounds: int) -> None:
    one = b"*5\r\n$4\r\nXADD\r\n$1\r\ns\r\n$1\r\n*\r\n$1\r\nd\r\n$64\r\n" + b"x" * 64 + b"\r\n"
    command = one * _PIPELINE
    for _ in range(rounds):
        client.sendall(command)
        answered = 0
        while answered < _PIPELINE:
            data = client.recv(65536)
            if not data:
                raise LoadTestError("the log server to calibrate with closed the connection")
            answered += data.count(b"$")


def factors(protocol: str, echo_us: float | None, append_us: float | None) -> dict[str, float]:
    """Factor of each role at one front: `gateway`, `batcher`, `executor` by its echo, `redis` by appending.

    Never below 1: a machine faster than the reference is held to the budgets as they are written. Roles whose
    yardstick was not measured have 1.
    """
    python = max(1.0, echo_us / REFERENCE_ECHO_US[protocol]) if echo_us else 1.0
    log_server = max(1.0, append_us / REFERENCE_XADD_SERVER_US) if append_us else 1.0
    return {"gateway": python, "batcher": python, "executor": python, "redis": log_server}
