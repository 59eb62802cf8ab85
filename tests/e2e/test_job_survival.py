"""Jobs survive every part of the server, and all of them at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_asking import until
from e2e_jobs import GATED, WAIT_S, EventReader, Held, output, result, submit, view
from e2e_models import gated, scaling
from e2e_server import serving, start


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    scaling(repository, "scale", 2)
    gated(repository, "gated", GATED)
    return repository


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(models, tmp_path_factory.mktemp("state")) as running:
        yield running


def _kill(server: Any, role: str) -> None:
    for pid in server.pids(role):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_jobs_survive_every_part_and_all_at_once(models: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    server = start(models, state)
    server.wait_ready()
    held = Held(server, tmp_path)
    locations = [submit(server, number) for number in range(20)]

    gateways = server.pids("gateway")
    _kill(server, "gateway")
    until("another gateway is there", lambda: set(server.pids("gateway")) - set(gateways))
    server.wait_ready()
    assert view(server, locations[-1])["state"] == "queued"

    executors = server.pids("executor+batcher")
    _kill(server, "executor+batcher")
    until("another executor is there", lambda: set(server.pids("executor+batcher")) - set(executors))
    server.wait_ready()
    assert view(server, locations[-1])["state"] in ("queued", "running")

    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    held.open()
    with serving(models, state) as again:
        answers = [result(again, location) for location in locations]
        assert [(status, output(answer, "ECHO")) for status, answer in answers] == [(200, n) for n in range(20)]
        first = view(again, held.location)
        assert (first["state"], first["attempts"] > 1) == ("succeeded", True)
    with serving(models, state) as restarted:
        assert [result(restarted, location) for location in locations] == answers
        late = EventReader(restarted, held.location)
        late.join(WAIT_S)
        assert list(late.kinds.values())[-1] == "succeeded"
