"""A server under attack, the well-behaved neighbour who asks on meanwhile, and a raw connection to attack by."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from e2e_asking import client, inputs
from e2e_models import WIDTH, python, scaling
from e2e_server import serving

MAX_INPUT_BYTES = 1 << 20
"""What the server is started with, so that the attacks are large for it and small for the test."""

MEMORY_BOUND_BYTES = 200 << 20
"""What all attacks of a file together may add to the memory of a process: a few copies of the largest message, 16 MiB,
and what the allocator keeps. They send and unfold some gigabytes; keeping one kind of refused request would be 256 MiB
or more.
"""

ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        if any(request.inputs()[0].as_numpy()[0, 0] == b"fail" for request in requests):
            raise ValueError("as you wish")
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())]) for request in requests
        ]
"""

ECHO_CONFIG = """
max_batch_size: 1
input [ { name: "IN" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] } ]
"""


def memory(pid: int) -> int:
    """Proportional set size in bytes."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


@contextmanager
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("hostile")
    models = directory / "models"
    # a short delay makes the attacker's and the neighbour's requests meet in batches
    scaling(models, "scale", 2, config="dynamic_batching { max_queue_delay_microseconds: 2000 }")
    python(models, "echo", ECHO, ECHO_CONFIG)
    with serving(
        models,
        directory / "state",
        f"--http-max-input-size={MAX_INPUT_BYTES}",
        "--model-control-mode=explicit",
        "--load-model=*",
    ) as running:
        roles = ("gateway", "executor+batcher")
        pids = {role: running.pids(role)[0] for role in roles}
        asked(running, 50)
        before = {role: memory(pid) for role, pid in pids.items()}
        yield running
        assert {role: running.pids(role)[0] for role in roles} == pids, "a process was started again"
        for role, pid in pids.items():
            after = memory(pid)
            grown = f"{role}: {before[role] >> 20} MiB grew to {after >> 20} MiB"
            assert after - before[role] < MEMORY_BOUND_BYTES, grown
        assert "Traceback" not in running.log()


def asked(server: Any, times: int | None, stop: threading.Event | None = None) -> int:
    answered = 0
    with client("http", server) as over_http, client("grpc", server) as over_grpc:
        while (times is None or answered < times) and not (stop is not None and stop.is_set()):
            kind, asking = [("http", over_http), ("grpc", over_grpc)][answered % 2]
            value = np.arange(2 * WIDTH, dtype=np.float32).reshape(2, WIDTH) + answered
            answer = asking.infer("scale", inputs(kind, INPUT0=value)).as_numpy("OUTPUT0")
            assert (answer == 2 * value).all(), (value, answer)
            words = np.array([[b"neighbour", b"%d" % answered]], dtype=object)
            assert (asking.infer("echo", inputs(kind, IN=words)).as_numpy("OUT") == words).all()
            answered += 1
            if stop is not None:
                stop.wait(0.005)  # it is there all the time, but leaves the processors to the attack
    return answered


@contextmanager
def neighbour_asks(server: Any) -> Iterator[None]:
    """Asks all the while; at the end it must have been answered rightly throughout, and go on being answered."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        task: Future[int] = pool.submit(asked, server, None, stop)
        try:
            yield
        finally:
            stop.set()
        task.result(60)
    assert asked(server, 2) == 2
    assert server.get("/v2/health/ready")[0] == 200


class Connection:
    """A raw HTTP connection."""

    def __init__(self, server: Any) -> None:
        host, _, port = server.http.partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send what the server still takes: it may close at any time."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def answer(self) -> tuple[int, bytes]:
        """Status (0: closed without an answer) and all bytes up to the end of the body or of the connection."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while b"\r\n\r\n" not in data and (more := self.socket.recv(65536)):
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            while length is not None and len(body) < int(length[1]) and (more := self.socket.recv(65536)):
                body += more
            data = head + b"\r\n\r\n" + body
        status = re.match(rb"HTTP/1.1 (\d+)", data)
        return (int(status[1]) if status else 0), data

    def is_closed(self) -> bool:
        """Whether the server has ended the connection; waits for it."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(65536):
                pass
        return True


def exchange(server: Any, data: bytes) -> tuple[int, bytes]:
    with Connection(server) as connection:
        connection.send(data)
        return connection.answer()


def head(model: str = "scale", **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode()


def scale_body(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "shape": [1, WIDTH], "datatype": "FP32", "data": [1.0] * WIDTH, **changes}
    return {"inputs": [tensor]}
