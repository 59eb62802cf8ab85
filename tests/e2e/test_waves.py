"""Requests in waves while models die, hang and are reloaded, parts are killed, and the log restarts or is emptied."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_asking import client, inputs, post, statistics, until
from e2e_load import Load
from e2e_models import python
from e2e_parts import GATEWAY_FLAGS, Part, parts_over_a_log
from e2e_server import Server, serving
from wave_load import DIES, ECHO, ECHO_CONFIG, HANGS, PATIENCE_S, BinaryClient, WaveLoad, is_riding, until_nothing_left

pytestmark = pytest.mark.e2e

UNKNOWN = 503


ADDS = """
import json, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.001)
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            more = json.loads(request.parameters())["more"]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array + array.dtype.type(more))]))
        return answers
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    python(tmp_path / "models", "echo", ECHO, ECHO_CONFIG)
    python(tmp_path / "models", "adds", ADDS, ECHO_CONFIG)
    return tmp_path / "models"


@pytest.fixture
def server(models: Path, tmp_path: Path) -> Iterator[Server]:
    with serving(models, tmp_path / "state", "--model-control-mode=explicit", "--load-model=*") as running:
        yield running


def riding(server: Server) -> None:
    """Returns once requests ride: a gateway gives a model that was slow of late no waves for a while."""
    with server.log_client() as log:
        until("requests ride in waves", lambda: is_riding(log, "echo"))


@pytest.mark.parametrize("deed", [DIES, HANGS], ids=["dies", "hangs"])
def test_a_poison_request_in_a_wave_harms_only_its_caller(deed: float, server: Server) -> None:
    with WaveLoad(server, "echo").running() as load:
        riding(server)
        with closing(BinaryClient(server.http, "echo", patience_s=PATIENCE_S)) as caller:
            assert caller.ask([0.0] * 16)[0] == 200
            status, _, text = caller.ask([deed] * 16)
        assert status == 500, text
        assert "is not healthy" in text
        load.until_more()
    assert load.failures == []
    until_nothing_left(lambda: server.log_url)
    with server.log_client() as log:
        assert log.xlen("dlq:{echo}") == 1


def test_a_reload_under_load_fails_nobody(server: Server) -> None:
    with WaveLoad(server, "echo").running() as load:
        riding(server)
        for _ in range(3):
            assert post(server, "/v2/repository/models/echo/load")[0] == 200
            load.until_more()
        riding(server)
    assert load.failures == []
    until_nothing_left(lambda: server.log_url)


def test_calls_that_wait_for_their_wave_at_a_reload_are_served_all_the_same(server: Server) -> None:
    """Their doors close, and each goes the full way as the message that it was."""

    @contextmanager
    def asking(_: int) -> Iterator[Callable[[int], None]]:
        with client("grpc", server) as caller:

            def ask(number: int) -> None:
                values = np.full((1, 16), number, np.float32)
                answer = caller.infer("echo", inputs("grpc", INPUT0=values))
                assert (answer.as_numpy("OUTPUT0") == values).all()

            yield ask

    with Load(asking, 12) as load:
        riding(server)
        for _ in range(10):
            assert post(server, "/v2/repository/models/echo/load")[0] == 200
    assert all(load.answered)


def test_each_request_keeps_its_parameters_in_whatever_batch(server: Server) -> None:
    def ask(more: int) -> list[tuple[int, list[float], str]]:
        with closing(BinaryClient(server.http, "adds", more=more)) as caller:
            return [caller.ask([float(number)] * 16) for number in range(300)]

    with ThreadPoolExecutor(12) as pool:
        found = [(more, pool.submit(ask, more)) for more in (1, 20, 300, 4000) * 3]
    for more, answers in found:
        assert answers.result() == [(200, [float(number + more)] * 16, "") for number in range(300)]


def test_statistics_count_what_was_answered(server: Server) -> None:
    with WaveLoad(server, "echo").running() as load:
        riding(server)
        load.until_more(500)
    assert load.failures == []
    until(
        "each answer is counted",
        lambda: int(statistics(server, "echo")["inference_stats"]["success"]["count"]) == load.answers,
    )


@pytest.mark.long
def test_a_log_that_is_killed_costs_outcomes_but_keeps_nobody_waiting(server: Server) -> None:
    with WaveLoad(server, "echo").running() as load:
        riding(server)
        killed: set[int] = set()
        for _ in range(2):
            (pid,) = until("there is a log", lambda: set(server.pids("redis")) - killed)
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            load.until_more()
    assert {status for status, _ in load.failures} <= {UNKNOWN}, load.failures
    until_nothing_left(lambda: server.log_url)


@pytest.mark.long
def test_a_log_that_is_emptied_costs_outcomes_but_keeps_nobody_waiting(server: Server) -> None:
    with WaveLoad(server, "echo").running() as load:
        riding(server)
        with server.log_client() as log:
            log.flushall()
        load.until_more(500)
        riding(server)
    # an instance that is not said anew yet is not known: its model is not either, for a moment
    assert {status for status, _ in load.failures} <= {UNKNOWN, 400, 404}, load.failures
    until_nothing_left(lambda: server.log_url)


@pytest.mark.long
def test_parts_of_their_own_take_over_waves_of_those_that_are_killed(models: Path, tmp_path: Path) -> None:
    shared = f"--shm-dir={tmp_path / 'shm'}"
    repository = f"--model-repository={models}"
    with parts_over_a_log(tmp_path) as parts:

        def start(role: str, *flags: str) -> Part:
            return parts.start(role, f"{role}{len(parts.started)}", *flags)

        gateway = start("gateway", *GATEWAY_FLAGS, shared)
        batchers = [start("batcher") for _ in range(2)]
        executors = [start("executor", repository, shared), start("executor", repository)]
        gateway.learn_addresses()
        gateway.wait_ready()
        for executor in executors:
            executor.until_says("executor is up")
        with WaveLoad(gateway, "echo").running() as load:
            _ride_on(gateway, load)
            executors.append(start("executor", repository))  # one more, under load
            executors[-1].until_says("executor is up")
            load.until_more()
            for victim in (executors[0], batchers[0], executors[1]):
                victim.process.kill()
                victim.process.wait()
                load.until_more(300)
        assert load.failures == []
        until_nothing_left(lambda: parts.log_url)


def _ride_on(gateway: Part, load: Any) -> None:
    with gateway.log_client() as log:
        until("requests ride in waves", lambda: is_riding(log, "echo"))
    load.until_more()
