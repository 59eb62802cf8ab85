"""A rolling upgrade with one replica of each part: executor, batcher, gateway, in this order, while clients ask.

As Kubernetes does it with the chart: a successor starts, its metrics endpoint is asked whether it is ready, and only
when it is, its predecessor gets SIGTERM. A gateway leaves the Service before (preStop). No call fails.
"""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_asking import Gate, client, infer, pending, statistics, until
from e2e_load import Load, ask_scaled
from e2e_models import GATED_IO, python, scaling
from e2e_parts import GATEWAY_FLAGS, Part, parts_over_a_log

from charonia.metrics.endpoint import scrape, unready

pytestmark = pytest.mark.e2e

CLIENTS = 4
WAITING = 4

HELD = '''
import json, os, time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """As `e2e_models.GATED`, and its load waits for a file as well."""

    def initialize(self, args):
        wait_for(json.loads(args["model_config"])["parameters"]["loads"]["string_value"])

    def execute(self, requests):
        responses = []
        for request in requests:
            given = json.loads(request.parameters())
            if "entered" in given:
                open(given["entered"], "w").close()
            if "gate" in given:
                wait_for(given["gate"])
            value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()
            names = ("EXECUTION", "REQUESTS", "ECHO")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name in names]))
        return responses


def wait_for(path):
    give_up_at = time.monotonic() + 100
    while not os.path.exists(path) and time.monotonic() < give_up_at:
        time.sleep(0.002)
'''


class Replica(Part):
    """A part whose metrics endpoint is a unix socket."""

    def __init__(self, role: str, name: str, directory: Path, sockets: Path, log_url: str, *flags: str) -> None:
        self._socket = sockets / name
        super().__init__(role, name, directory, log_url, f"--metrics-socket={self._socket}", *flags)
        if role == "gateway":
            self.learn_addresses()

    def scrape(self) -> str:
        return asyncio.run(scrape(self._socket))

    def unready(self) -> str:
        assert self.process.poll() is None, self.log()
        return asyncio.run(unready(self._socket))

    def until_ready(self) -> None:
        until(f"{self.name} is ready", lambda: not self.unready())

    def accepted(self) -> int:
        """How many requests a gateway has written to the log. A page that did not come in time is asked for again."""
        counter = re.compile(r"^charonia_log_requests_appended_total (\S+)", re.M)
        return int(float(until(f"{self.name} counts requests", lambda: counter.search(self.scrape()))[1]))

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def ends(self) -> None:
        assert self.process.wait(60) == 0, self.log()


class Service(Load):
    """Clients that ask the present gateway all the time; an error of one of them fails the test."""

    def __init__(self, gateway: Replica) -> None:
        super().__init__(self._client, CLIENTS)
        self.gateway = gateway

    @contextmanager
    def _client(self, number: int) -> Iterator[Callable[[int], None]]:
        kind = ("http", "grpc")[number % 2]
        connected: dict[str, Any] = {}
        with ExitStack() as stack:

            def ask(value: int) -> None:
                gateway = self.gateway
                if gateway.name not in connected:
                    connected[gateway.name] = stack.enter_context(client(kind, gateway))
                ask_scaled(connected[gateway.name], kind, "double", 2, value)

            yield ask


class Held:
    """A call that an instance of `held` executes, and calls that wait behind it."""

    def __init__(self, gate: Gate, waiting: list[Future[Any]]) -> None:
        self.waiting = waiting
        self._gate = gate

    def end(self) -> None:
        """Let it go on: every one of the calls is answered."""
        self._gate.open()
        for call in (self._gate.request, *self.waiting):
            assert call.result(60) is not None


@contextmanager
def held(gateway: Replica, batcher: Replica, directory: Path, first: Replica | None = None) -> Iterator[Held]:
    """Calls at `gateway`, which wait in the queue of `batcher` behind one at `first`, or at the same gateway."""
    value = np.full((1, 1), 7, np.int32)
    with ThreadPoolExecutor(WAITING + 1) as pool, Gate(first or gateway, "held", directory, pool) as gate:
        kinds = [("http", "grpc")[number % 2] for number in range(WAITING)]
        waiting = [pool.submit(infer, gateway, "held", kind, VALUE=value) for kind in kinds]
        # the instance has one of them beside the one that it executes
        until("calls wait", lambda: pending(batcher, "held") >= WAITING - 1)
        yield Held(gate, waiting)


def is_closed(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.long
def test_parts_are_replaced_in_order_and_no_call_fails(tmp_path: Path) -> None:
    models, loads = tmp_path / "models", tmp_path / "loads"
    scaling(models, "double", 2, config="dynamic_batching { }")
    parameters = f'parameters {{ key: "loads" value {{ string_value: "{loads}" }} }}'
    python(models, "held", HELD, f"max_batch_size: 1 {GATED_IO} {parameters} instance_group [ {{ kind: KIND_CPU }} ]")
    loads.touch()
    with tempfile.TemporaryDirectory() as sockets, parts_over_a_log(tmp_path) as parts:

        def start(role: str, *flags: str) -> Replica:
            name = f"{role}{len(parts.started)}"
            # none of them is lost here, and one that stalls for a moment must not count as lost
            lease = "--gateway-heartbeat-ttl-secs=30" if role == "gateway" else "--heartbeat-ttl-secs=30"
            flags = ("--exit-timeout-secs=100", lease, *flags)
            return parts.add(Replica(role, name, tmp_path, Path(sockets), parts.log_url, *flags))

        repository = f"--model-repository={models}"
        batcher, executor = start("batcher"), start("executor", repository)
        gateway = start("gateway", *GATEWAY_FLAGS)
        for part in (batcher, executor, gateway):
            part.until_ready()
        with Service(gateway) as service:
            service.more(2)

            # the executor: its successor is not ready before its loads are over
            with held(gateway, batcher, tmp_path) as calls:
                loads.unlink()
                successor = start("executor", repository)
                until("it loads", lambda: successor.unready() == "its first loads are not over")
                service.more(2)
                loads.touch()
                successor.until_ready()
                executor.terminate()
                until("it drains", lambda: executor.unready() == "it drains")
                # what it had not begun goes to the successor while it executes the rest
                for call in calls.waiting:
                    assert call.result(60) is not None
                service.more(2)
                calls.end()
            executor.ends()

            # the batcher: accepted calls wait in the log for the successor
            successor = start("batcher")
            successor.until_ready()
            with held(gateway, batcher, tmp_path) as calls:
                batcher.terminate()
                batcher.ends()
                service.more(2)
                calls.end()
            batcher = successor

            # the gateway: it leaves the Service, then finishes what it has and accepts nothing more
            successor = start("gateway", *GATEWAY_FLAGS)
            successor.until_ready()
            service.gateway = successor
            service.more(2)
            accepted = gateway.accepted()
            with held(gateway, batcher, tmp_path, first=successor) as calls:
                until("it has accepted all of them", lambda: gateway.accepted() == accepted + WAITING)
                gateway.terminate()
                until("it drains", lambda: gateway.unready())
                until("it takes no connection", lambda: is_closed(gateway.http))
                calls.end()
            gateway.ends()
            service.more(2)
        for model in ("double", "held"):
            assert statistics(successor, model)["inference_stats"]["fail"]["count"] == 0
