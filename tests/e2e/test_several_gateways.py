"""`serve --gateways N`: gateways on the same ports, of which each may end without the others noticing."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from e2e_asking import Gate, inputs, pending, until
from e2e_load import Load, ask_scaled
from e2e_models import WIDTH, gated, scaling
from e2e_server import serving
from tritonclient.utils import InferenceServerException

import charonia
from charonia.eventlog.embedded import short_directory
from charonia.metrics.endpoint import scrape

pytestmark = pytest.mark.e2e

CHARONIA = str(Path(sys.executable).parent / "charonia")
CONNECTIONS = 24
"""So many of each protocol that each of two gateways has some: by chance one has none in 1 of 8 million runs."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    scaling(repository, "double", 2, config="dynamic_batching { }")
    gated(repository, "gated", "max_batch_size: 1 instance_group [ { count: 1 kind: KIND_CPU } ]")
    return repository


@pytest.fixture(scope="module")
def two(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of two gateways, shared by tests that end nothing."""
    with serving(models, tmp_path_factory.mktemp("two"), "--gateways=2") as running:
        yield running


def connect(kind: str, server: Any) -> Any:
    """A stock client on a connection of its own: gRPC's clients of one process would share theirs."""
    if kind == "http":
        return httpclient.InferenceServerClient(server.http)
    return grpcclient.InferenceServerClient(server.grpc, channel_args=[("grpc.use_local_subchannel_pool", 1)])


def ask_over_many_connections(server: Any) -> int:
    """How many requests were asked, half of them by each protocol, each over a connection of its own."""
    for number in range(CONNECTIONS):
        for kind in ("http", "grpc"):
            with connect(kind, server) as asking:
                ask_scaled(asking, kind, "double", 2, number)
    return 2 * CONNECTIONS


_SUCCESSES = re.compile(r'^nv_inference_request_success{model="double",version="1"} (\S+)', re.M)


def successes(page: str) -> int:
    return sum(int(float(count)) for count in _SUCCESSES.findall(page))


def by_gateway(server: Any) -> list[int]:
    """The answered requests of each gateway, by its own page."""

    async def look() -> list[str]:
        sockets = sorted(short_directory(server.state_dir).glob("gateway-*.metrics"))
        return list(await asyncio.gather(*map(scrape, sockets)))

    return [successes(page) for page in asyncio.run(look())]


def connections_of(pid: int, server: Any) -> int:
    """How many connections of clients a gateway has, on either port."""
    ports = {f"{int(where.rpartition(':')[2]):04X}" for where in (server.http, server.grpc)}
    inodes = set()
    for table in ("tcp", "tcp6"):  # grpcio's sockets are of both families
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "01" and words[1].rpartition(":")[2] in ports:  # established
                inodes.add(f"socket:[{words[9]}]")
    held = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held += os.readlink(descriptor) in inodes
        except FileNotFoundError:  # closed meanwhile
            continue
    return held


def test_both_gateways_serve_and_are_counted_together(two: Any) -> None:
    assert len(set(two.pids("gateway"))) == 2
    until("it says that it is ready", lambda: "\nready: Ctrl-C stops the server\n" in two.log())
    assert two.log().count(f"gateway is up, http on {two.http}, grpc on {two.grpc}") == 2
    for name, where in (("http", two.http), ("grpc", two.grpc)):
        assert len(re.findall(rf"^{name} +(?:http://)?{re.escape(where)}$", two.log(), re.M)) == 1
    before = by_gateway(two)
    sent = ask_over_many_connections(two)
    until("every answer is counted", lambda: sum(by_gateway(two)) == sum(before) + sent)
    served = [now - then for now, then in zip(by_gateway(two), before, strict=True)]
    assert len(served) == 2
    assert min(served) > 0, served
    page = two.scrape()
    assert successes(page) == sum(by_gateway(two))
    families = re.findall(r"^# TYPE (\S+)", page, re.M)
    assert len(set(families)) == len(families)
    series = [line.rpartition(" ")[0] for line in page.splitlines() if line and not line.startswith("#")]
    assert len(set(series)) == len(series)
    assert re.search(r"^charonia_gateway_pending_requests 0$", page, re.M)
    assert re.search(r"^charonia_log_requests_appended_total [1-9]", page, re.M)


def test_a_job_and_its_key_are_known_at_any_gateway(two: Any) -> None:
    tensor = {"name": "INPUT0", "shape": [1, WIDTH], "datatype": "FP32", "data": [1.0] * WIDTH}
    body = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Prefer": "respond-async", "Idempotency-Key": "one order"}
    served_before = by_gateway(two)

    def once(_: int) -> str:
        status, answer = two.request("POST", "/v2/models/double/infer", body, headers)  # a connection of its own
        assert status == 202, answer
        return str(json.loads(answer)["id"])

    with ThreadPoolExecutor(8) as pool:
        (job,) = set(pool.map(once, range(CONNECTIONS)))
    for _ in range(CONNECTIONS):
        status, answer = two.get(f"/v2/jobs/{job}/result?wait=30")
        assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [2.0] * WIDTH)
        status, events = two.get(f"/v2/jobs/{job}/events")
        assert status == 200
        assert b"event: succeeded" in events
        status, answer = two.request("POST", "/v2/models/double/infer", body, {"Idempotency-Key": "one order"})
        assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [2.0] * WIDTH)
    until("it ran once", lambda: sum(by_gateway(two)) >= sum(served_before) + 1)
    found = re.findall(r'^charonia_jobs_accepted_total{model="double"} (\S+)', two.scrape(), re.M)
    assert [float(count) for count in found] == [1.0]


@pytest.mark.parametrize("gateways", [1, 2])
@pytest.mark.parametrize("front", ["http", "grpc"])
def test_another_server_on_the_port_is_refused(
    two: Any, front: str, gateways: int, models: Path, tmp_path: Path
) -> None:
    port = int(getattr(two, front).rpartition(":")[2])
    ports = {"http": 0, "grpc": 0, front: port}
    text = _fails(models, tmp_path, f"--gateways={gateways}", *(f"--{name}-port={n}" for name, n in ports.items()))
    service = {"http": "HTTP", "grpc": "GRPC"}[front]
    sentence = f"failed to start {service} service: Unavailable - Socket '127.0.0.1:{port}' already in use"
    assert text.count(f"charonia: {sentence}\n") == 1, text
    assert len(two.pids("gateway")) == 2


def test_a_port_of_another_program_is_refused(models: Path, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        text = _fails(models, tmp_path, "--gateways=2", f"--http-port={port}", "--grpc-port=0")
    sentence = f"failed to start HTTP service: Unavailable - Socket '127.0.0.1:{port}' already in use"
    assert f"charonia: {sentence}\n" in text


def test_what_no_gateway_can_start_with_is_said_once(models: Path, tmp_path: Path) -> None:
    flags = ("--gateways=3", "--http-port=0", "--grpc-port=0")
    text = _fails(models, tmp_path, *flags, "--log-url=redis://127.0.0.1:1")
    assert sum(line.startswith("charonia: ") for line in text.splitlines()) == 1, text
    assert "127.0.0.1:1/0 cannot be reached" in text
    assert "--gateways must be between 1 and 64, got '65'" in _fails(models, tmp_path, "--gateways=65")


def test_bound_functions_may_have_several_gateways(tmp_path: Path) -> None:
    def times(tensors: dict[str, np.ndarray]) -> np.ndarray:
        return 2 * tensors["INPUT0"]

    specs = {name: [charonia.TensorSpec(name, np.float32, [WIDTH])] for name in ("INPUT0", "OUTPUT0")}
    double = charonia.bind(
        times, name="double", max_batch_size=8, style="dict", inputs=specs["INPUT0"], outputs=specs["OUTPUT0"]
    )
    ports: Any = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    with charonia.Server(double, gateways=2, state_dir=tmp_path / "state", **ports) as server:
        server.state_dir = tmp_path / "state"  # type: ignore[attr-defined]
        sent = ask_over_many_connections(server)
        until("every answer is counted", lambda: sum(by_gateway(server)) == sent)
        assert min(by_gateway(server)) > 0


def _fails(models: Path, directory: Path, *flags: str) -> str:
    """What is said on stderr by a server that cannot start."""
    words = [CHARONIA, "serve", f"--model-repository={models}", f"--state-dir={directory / 'state'}"]
    words += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-port=0", *flags]
    result = subprocess.run(
        words, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL, cwd=directory, check=False
    )
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def load_on(server: Any) -> Load:
    """Stock clients, each over a connection of its own; their errors are kept."""

    @contextmanager
    def asking(number: int) -> Iterator[Callable[[int], None]]:
        kind = ("http", "grpc")[number % 2]
        with connect(kind, server) as made:
            yield partial(ask_scaled, made, kind, "double", 2)

    return Load(asking, 16, (InferenceServerException, OSError, http.client.HTTPException))


@pytest.mark.parametrize("front", ["native", "grpcio"])
@pytest.mark.long
def test_a_gateway_that_is_killed_disturbs_its_own_clients_alone(
    front: str, models: Path, serve: Callable[..., Any]
) -> None:
    server = serve(models, "--gateways=2", f"--grpc-front={front}")
    others = {role: server.pids(role) for role in ("redis", "executor+batcher")}
    with load_on(server) as load:
        load.more(5)
        shares = {pid: connections_of(pid, server) for pid in server.pids("gateway")}
        assert sum(shares.values()) == len(load.answered)
        victim, survivor = sorted(shares, key=lambda pid: -shares[pid])
        counted = successes(server.scrape())
        os.kill(victim, signal.SIGKILL)
        load.more(5)
        until("it is started again", lambda: {victim} != set(server.pids("gateway")) - {survivor} != set())
        (successor,) = set(server.pids("gateway")) - {survivor}
        until("it serves", lambda: server.log().count("gateway is up, ") == 3)
        disturbed = [errors for errors in load.errors if errors]
        assert len(disturbed) <= shares[victim], disturbed
        if front == "native":  # a listener of grpcio may take new connections with it, and gRPC clients then hesitate
            # one error, or a few until gRPC has noticed; a client whose new connection is reset has hundreds
            assert all(len(errors) < 10 for errors in disturbed), [(len(e), e[-1]) for e in disturbed]

        def reaches_both() -> bool:
            with ExitStack() as stack:
                for _ in range(CONNECTIONS):
                    asking = stack.enter_context(connect("http", server))
                    ask_scaled(asking, "http", "double", 2, 1)
                return all(connections_of(pid, server) > shares.get(pid, 0) for pid in (survivor, successor))

        until("new connections go to both", reaches_both)
        load.more(5)
        assert [errors for errors in load.errors if errors] == disturbed
        assert successes(server.scrape()) > counted, "the joint counter never goes back"
    assert {role: server.pids(role) for role in others} == others
    assert f"gateway (pid {victim}) ended with status -9; starting it again" in server.log()
    assert set(server.pids("gateway")) == {survivor, successor}
    assert server.stop() == 0, server.log()
    assert "Traceback" not in server.log()


@pytest.mark.long
def test_a_drain_answers_what_every_gateway_has(models: Path, tmp_path: Path, serve: Callable[..., Any]) -> None:
    server = serve(models, "--gateways=2")
    gateways = server.pids("gateway")
    value = np.full((1, 1), 7, np.int32)
    with ThreadPoolExecutor(CONNECTIONS + 1) as pool:

        def wait(kind: str) -> bool:
            with connect(kind, server) as asking:
                answer = asking.infer("gated", inputs(kind, VALUE=value))
                return bool((answer.as_numpy("ECHO") == value).all())

        with Gate(server, "gated", tmp_path, pool) as gate:
            waiting = [pool.submit(wait, ("http", "grpc")[number % 2]) for number in range(CONNECTIONS)]
            # all but the one inside and the one that was handed to the instance after it
            until("they wait", lambda: pending(server, "gated") >= CONNECTIONS - 1)
            assert all(connections_of(pid, server) > 0 for pid in gateways)
            server.process.send_signal(signal.SIGTERM)

            def is_closed() -> bool:
                try:
                    socket.create_connection(tuple(server.http.split(":"))).close()  # type: ignore[arg-type]
                except ConnectionRefusedError:
                    return True
                return False

            until("neither takes connections", is_closed)
            gate.open()
            assert all(task.result(60) for task in waiting)
            gate.request.result(60)
    assert server.process.wait(180) == 0, server.log()
