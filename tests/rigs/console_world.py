"""A server with something to see on each page of the console: load, a queue, a cold load, a poison request."""

from __future__ import annotations

import json
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

POISON, REFUSED, SLOW = 666, 5, 900

MOODY = f"""
import ctypes, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        deeds = [int(array[0, 0]) for array in arrays]
        if {POISON} in deeds:
            print("last words of a batch of", len(requests), flush=True)
            ctypes.string_at(0)
        time.sleep(1 if {SLOW} in deeds else 0.01 + 0.003 * len(requests))
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

CONFIG = """
max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 5000 }
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
    python(models, "moody", MOODY, CONFIG)
    python(models, "cold", COLD, CONFIG)
    flags = ("--max-loaded-models=2", "--journal=all", "--metrics-config=summary_latencies=true")
    with serving(models, directory / "state", *flags) as server:
        found = World(server)
        found.cold = submit(server, "cold", 1)
        ended(server, submit(server, "moody", 1))
        many = [submit(server, "moody", 10 + number) for number in range(60)]
        found.queued = many[-1]
        ended(server, found.queued)
        found.poison, found.innocent = _poison(server)
        ended(server, found.cold)
        yield found


def _poison(server: Server) -> tuple[str, str]:
    """A request that kills its instance, and one of its batch: they gather while a slow request runs."""
    submit(server, "moody", SLOW)
    jobs = [submit(server, "moody", value) for value in (1, 2, 3, POISON, 4, 6, 7, 8)]
    for job in jobs:
        ended(server, job)
    return jobs[3], jobs[2]


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
