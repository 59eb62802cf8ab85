"""A server with something to see on each page of the console: load, a queue, streams, a cold load, a poison request."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e_asking import until
from e2e_models import python
from e2e_server import Server, serving

POISON, REFUSED, HELD = 666, 5, 900

MOODY = f"""
import ctypes, faulthandler, os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        deeds = [int(array[0, 0]) for array in arrays]
        if {POISON} in deeds:
            print("last words of a batch of", len(requests), flush=True)
            faulthandler.disable()  # its lines have paths of this machine, and pictures of them are in the docs
            ctypes.string_at(0)
        if {HELD} in deeds:
            open("@here/entered", "w").close()
            give_up_at = time.monotonic() + 120
            while not os.path.exists("@here/go") and time.monotonic() < give_up_at:
                time.sleep(0.002)
        time.sleep(0.01 + 0.003 * len(requests))
        return [
            pb_utils.InferenceResponse(error=pb_utils.TritonError("the model refuses a {REFUSED}"))
            if deed == {REFUSED} else pb_utils.InferenceResponse([pb_utils.Tensor("y", array * 2)])
            for deed, array in zip(deeds, arrays)
        ]
"""

COLD = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(1)

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in inputs]
"""

TALK = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            while not request.is_cancelled():
                tensor = pb_utils.Tensor("y", np.array([[1]], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
                time.sleep(0.25)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

CONFIG = """
max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 5000 }
"""


PATIENT = CONFIG.replace("microseconds: 5000", "microseconds: 5000 priority_levels: 3 default_priority_level: 2")
TALKER = """
input { name: "x" data_type: TYPE_INT32 dims: [ 1, 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1, 1 ] }
instance_group { kind: KIND_CPU count: 2 }
model_transaction_policy { decoupled: true }
"""


@dataclass
class World:
    """The server, and the ids of jobs whose stories are known."""

    server: Server
    queued: str = ""
    cold: str = ""
    poison: str = ""
    innocent: str = ""

    def console(self, path: str = "/") -> str:
        return f"http://{self.server.metrics}/console{path}"

    def page(self, path: str) -> str:
        with urllib.request.urlopen(self.console(path), timeout=60) as answer:
            return str(answer.read().decode())


def submit(server: Server, model: str, value: int) -> str:
    """A job of a model; its id."""
    path = f"/v2/models/{model}/infer"
    status, answer = server.request("POST", path, body(value), {"Prefer": "respond-async"})
    assert status == 202, answer
    return str(json.loads(answer)["id"])


def body(value: int) -> bytes:
    tensor = {"name": "x", "shape": [1, 1], "datatype": "INT32", "data": [value]}
    return json.dumps({"inputs": [tensor]}).encode()


def ended(server: Server, job: str) -> dict[str, Any]:
    """Wait until a job has ended; its view."""

    def look() -> dict[str, Any] | None:
        view: dict[str, Any] = json.loads(server.get(f"/v2/jobs/{job}")[1])
        return view if view["state"] not in ("queued", "running") else None

    return until(f"{job} has ended", look)


@contextmanager
def world(directory: Path) -> Iterator[World]:
    """A server on which each story has happened."""
    models = directory / "models"
    python(models, "moody", MOODY.replace("@here", str(directory)), CONFIG)
    python(models, "cold", COLD, CONFIG)
    python(models, "patient", COLD.replace("time.sleep(1)", "pass"), PATIENT)
    python(models, "talk", TALK, TALKER)
    flags = (
        "--max-loaded-models=4",
        "--journal=all",
        "--metrics-config=summary_latencies=true",
        "--console-actions",
    )
    with serving(models, directory / "state", *flags) as server:
        found = World(server)
        found.cold = submit(server, "cold", 1)
        with held(server, directory):
            many = [submit(server, "moody", 10 + number) for number in range(60)]
        found.queued = many[-1]
        ended(server, found.queued)
        with held(server, directory):
            jobs = [submit(server, "moody", value) for value in (1, 2, 3, POISON, 4, 6, 7, 8)]
        for job in jobs:
            ended(server, job)
        found.poison, found.innocent = jobs[3], jobs[2]
        ended(server, found.cold)
        yield found


@contextmanager
def held(server: Server, directory: Path) -> Iterator[None]:
    """What is submitted to `moody` within the block waits for its instance, and is queued at its end."""
    entered, go = directory / "entered", directory / "go"
    job = submit(server, "moody", HELD)
    until("the instance is held", entered.exists)
    yield
    go.touch()
    ended(server, job)
    entered.unlink()
    go.unlink()


@contextmanager
def streams(server: Server, count: int = 2) -> Iterator[None]:
    """Open streams of the model `talk`, whose responses do not end by themselves, for the length of a block."""
    host, _, port = server.http.rpartition(":")
    connections = [http.client.HTTPConnection(host, int(port), timeout=120) for _ in range(count)]
    readers: list[threading.Thread] = []
    try:
        for number, connection in enumerate(connections):
            sent = json.dumps({"id": f"conversation {number + 1}", "x": [[1]]})
            connection.request("POST", "/v2/models/talk/generate_stream", sent, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            readers.append(threading.Thread(target=_read_all, args=(answer,)))
            readers[-1].start()
        yield
    finally:
        for connection in connections:
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
        for reader in readers:
            reader.join()
        for connection in connections:
            connection.close()


def _read_all(answer: http.client.HTTPResponse) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        while answer.read1(65_536):
            pass


@contextmanager
def load(server: Server, workers: int = 6) -> Iterator[None]:
    """Calls of the model `moody`, a few of which fail, for the length of a block."""
    stop = threading.Event()

    def call(first: int) -> None:
        number = first
        while not stop.is_set():
            number += workers
            value = REFUSED if number % 40 == 0 else number % 500 + 10
            request = urllib.request.Request(f"http://{server.http}/v2/models/moody/infer", body(value))
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    answer.read()
            except urllib.error.HTTPError as error:
                error.close()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
