"""Answers given again: a python model that counts its executions, by both protocols, over a reload, by two gateways."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_asking import Gate, client, infer, post, statistics, until
from e2e_models import gated, put, python
from e2e_server import LEASES, REPOSITORY, Server
from log_servers import LogServer
from tritonclient.utils import InferenceServerException

from charonia.eventlog.embedded import PrivateServer, find_server

CHARONIA = str(Path(sys.executable).parent / "charonia")
CACHE = "--cache-config=local,size=1000000"

COUNTING = '''
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """VALUE -> VALUE * FACTOR, and a line in a file for each request executed."""

    def execute(self, requests):
        responses = []
        for request in requests:
            with open(FILE, "a") as file:
                file.write("executed\\n")
            value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SCALED", value * FACTOR)]))
        return responses
'''

COUNTING_IO = """
max_batch_size: 4
input [
  { name: "VALUE" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "TRACE" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [ { name: "SCALED" data_type: TYPE_INT32 dims: [ -1 ] } ]
response_cache { enable: true }
parameters { key: "charonia.cache_inputs" value { string_value: "VALUE" } }
"""

ITSELF = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        value = pb_utils.get_input_tensor_by_name(request, "VALUE")
        call = pb_utils.InferenceRequest(model_name="itself", requested_output_names=["SCALED"], inputs=[value])
        return [pb_utils.InferenceResponse(error=call.exec().error())]
"""

AROUND = """
platform: "ensemble"
input [ { name: "VALUE" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "SCALED" data_type: TYPE_INT32 dims: [ -1 ] } ]
ensemble_scheduling { step {
  model_name: "through" model_version: -1
  input_map { key: "VALUE" value: "VALUE" } output_map { key: "SCALED" value: "SCALED" }
} }
"""

ROW = np.arange(6, dtype=np.int32).reshape(1, 6)


class Counting:
    """The model `counting` in a repository, and how often it was executed."""

    def __init__(self, directory: Path) -> None:
        self.models = directory / "models"
        self._file = directory / "executions"
        self._file.touch()
        self.write(2)

    def write(self, factor: int) -> None:
        source = f"FILE = {str(self._file)!r}\nFACTOR = {factor}\n" + COUNTING
        python(self.models, "counting", source, COUNTING_IO)

    @property
    def executions(self) -> int:
        return len(self._file.read_text().splitlines())


@pytest.fixture
def counting(tmp_path: Path) -> Counting:
    return Counting(tmp_path)


def scaled(server: Any, kind: str, value: np.ndarray = ROW, **more: np.ndarray) -> np.ndarray:
    return np.asarray(infer(server, "counting", kind, VALUE=value, **more).as_numpy("SCALED"))


def metric(page: str, name: str, model: str) -> float:
    found = re.findall(rf'^{name}{{[^}}]*model="{model}"[^}}]*}} (\S+)', page, re.M)
    return sum(float(number) for number in found)


def test_what_was_asked_before_is_not_executed_again(counting: Counting, serve: Callable[..., Any]) -> None:
    server = serve(counting.models, CACHE, "--model-control-mode=explicit", "--load-model=*")
    for kind in ("http", "grpc", "http", "grpc"):
        assert (scaled(server, kind) == 2 * ROW).all()
    assert counting.executions == 1
    # an input that is not part of the key changes nothing, another value and another shape do
    trace = np.array([[b"abc"]], np.object_)
    assert (scaled(server, "http", TRACE=trace) == 2 * ROW).all()
    assert counting.executions == 1
    assert (scaled(server, "grpc", ROW + 1) == 2 * (ROW + 1)).all()
    assert scaled(server, "http", np.repeat(ROW, 2, 0)).shape == (2, 6)
    assert counting.executions == 3

    expected = {
        "success": 7,
        "fail": 0,
        "queue": 7,
        "cache_hit": 4,
        "cache_miss": 3,
        "compute_input": 3,
        "compute_infer": 3,
        "compute_output": 3,
    }

    def counted() -> bool:
        counts = statistics(server, "counting")["inference_stats"]
        return {name: int(value["count"]) for name, value in counts.items()} == expected

    until(f"these are counted: {expected}", counted)
    stats = statistics(server, "counting")
    assert (int(stats["execution_count"]), int(stats["inference_count"])) == (3, 4)
    assert int(stats["inference_stats"]["cache_hit"]["ns"]) > 0
    with client("grpc", server) as asking:
        grpc_stats = asking.get_inference_statistics("counting").model_stats[0].inference_stats
    assert (grpc_stats.cache_hit.count, grpc_stats.cache_miss.count) == (4, 3)
    whole = {
        "nv_inference_exec_count": 3,
        "nv_inference_request_success": 7,
        "nv_cache_num_hits_per_model": 4,
        "nv_cache_num_misses_per_model": 3,
    }
    page = until(
        "all is on one page",
        lambda: (
            (page := server.scrape()) and {name: metric(page, name, "counting") for name in whole} == whole and page
        ),
    )
    assert metric(page, "nv_cache_hit_duration_per_model", "counting") > 0
    assert metric(page, "nv_cache_miss_duration_per_model", "counting") > 0

    # what asks itself the same is told so, and does not wait for itself
    python(
        counting.models, "itself", ITSELF, COUNTING_IO.replace("4", "0") + "instance_group { count: 2 kind: KIND_CPU }"
    )
    assert post(server, "/v2/repository/models/itself/load") == (200, None)
    with pytest.raises(InferenceServerException, match="deadlock: itself -> itself -> itself: every instance"):
        infer(server, "itself", "grpc", VALUE=ROW[0])
    python(counting.models, "through", ITSELF.replace('"itself"', '"around"'), COUNTING_IO.replace("4", "0"))
    put(counting.models / "around" / "config.pbtxt", AROUND)
    (counting.models / "around" / "1").mkdir()
    assert post(server, "/v2/repository/models/through/load") == (200, None)
    assert post(server, "/v2/repository/models/around/load") == (200, None)
    with pytest.raises(InferenceServerException, match="deadlock: through -> around -> through: every instance"):
        infer(server, "around", "grpc", VALUE=ROW[0])

    # a reload starts anew
    counting.write(3)
    assert post(server, "/v2/repository/models/counting/load") == (200, None)
    assert (scaled(server, "http") == 3 * ROW).all()
    assert (scaled(server, "grpc") == 3 * ROW).all()
    assert counting.executions == 4


def test_what_is_asked_at_once_is_executed_once(tmp_path: Path, serve: Callable[..., Any]) -> None:
    models = tmp_path / "models"
    gated(models, "gated", "max_batch_size: 1 response_cache { enable: true }")
    server = serve(models, CACHE)
    value = np.ones((1, 3), np.int32)
    with ThreadPoolExecutor(8) as pool:
        with Gate(server, "gated", tmp_path, pool):
            # the only instance is busy: these come while the first of them waits in the queue
            asked = [pool.submit(infer, server, "gated", ["http", "grpc"][n % 2], VALUE=value) for n in range(6)]
        assert {int(task.result(60).as_numpy("EXECUTION")[0, 0]) for task in asked} == {2}
    assert int(statistics(server, "gated")["execution_count"]) == 2


def test_a_cache_of_its_own_may_go(counting: Counting, serve: Callable[..., Any]) -> None:
    place = LogServer()
    place.start()
    try:
        server = serve(counting.models, f"--cache-config=redis,host=127.0.0.1,port={place.port}")
        for kind in ("http", "grpc"):
            assert (scaled(server, kind) == 2 * ROW).all()
        assert counting.executions == 1
    finally:
        place.stop()
    # what the gateway has itself it still has; the rest is executed
    assert (scaled(server, "http") == 2 * ROW).all()
    for kind in ("http", "grpc"):
        assert (scaled(server, kind, ROW + 5) == 2 * (ROW + 5)).all()
    assert counting.executions == 2
    assert server.get("/v2/health/ready")[0] == 200


class Part(Server):
    """One gateway or another role over a shared log."""

    def __init__(self, role: str, name: str, directory: Path, log_url: str, *flags: str) -> None:
        log_file = directory / f"{name}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [CHARONIA, role, "--log-url", log_url, "--metrics-port=0", "--metrics-address=127.0.0.1", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=REPOSITORY,
                env={**LEASES, **os.environ},
            )
        super().__init__(process, directory, log_file)

    def read_endpoints(self) -> None:
        said = re.search(r"gateway is up, http on ([\d.:]+), grpc on ([\d.:]+)", self.log())
        if said is None:
            raise KeyError("gateway is not up")
        self.http, self.grpc = said[1], said[2]


@pytest.fixture
def gateways(counting: Counting, tmp_path: Path) -> Iterator[list[Part]]:
    log = PrivateServer(tmp_path / "log", find_server())
    (tmp_path / "log").mkdir()
    log.start()
    log.wait_ready()
    with ExitStack() as stack:
        stack.callback(log.stop)

        def start(role: str, name: str, *flags: str) -> Part:
            part = Part(role, name, tmp_path, log.url, *flags)
            stack.callback(part.stop)
            return part

        ports = ("--http-port=0", "--grpc-port=0", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1")
        started = [start("gateway", f"gateway{n}", CACHE, *ports) for n in range(2)]
        start("batcher", "batcher")
        start("executor", "executor", f"--model-repository={counting.models}")
        for gateway in started:
            gateway.wait_ready()
        yield started


def test_gateways_share_what_was_answered(counting: Counting, gateways: list[Part]) -> None:
    one, other = gateways
    assert (scaled(one, "http") == 2 * ROW).all()
    until(
        "the answer is stored",
        lambda: int(statistics(one, "counting")["inference_stats"]["cache_miss"]["count"]) == 1,
    )
    for kind in ("http", "grpc"):
        assert (scaled(other, kind) == 2 * ROW).all()
    assert counting.executions == 1
    for gateway in gateways:
        until(
            "hits are counted for all",
            lambda gateway=gateway: int(statistics(gateway, "counting")["inference_stats"]["cache_hit"]["count"]) == 2,
        )
