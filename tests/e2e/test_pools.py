"""Two pools with one executor each, over one log: what runs where, and the restart of the only executor of a pool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from e2e_asking import index, infer, statistics, until
from e2e_models import WIDTH, put, scaling
from e2e_parts import log_of
from e2e_server import LEASES, REPOSITORY, Server

CHARONIA = str(Path(sys.executable).parent / "charonia")
X = np.full((1, WIDTH), 3, np.float32)


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


class Part(Server):
    def __init__(self, role: str, name: str, directory: Path, log_url: str, *flags: str) -> None:
        log_file = directory / f"{name}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [CHARONIA, role, "--log-url", log_url, "--allow-metrics=false", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=REPOSITORY,
                env={**LEASES, **os.environ},
            )
        super().__init__(process, directory, log_file)

    def read_endpoints(self) -> None:
        pass

    def learn_address(self) -> None:
        """A port of 0 is a free one, which the gateway tells."""

        def look() -> str:
            assert self.process.poll() is None, self.log()
            return self.log().partition("gateway is up, http on ")[2]

        self.http = until("it is up", look).split()[0]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Any]:
    models = tmp_path / "models"
    scaling(models, "anywhere", 2)
    scaling(models, "both", 3, config=parameter("charonia.pool", "default, far"))
    scaling(models, "far", 4, config=parameter("charonia.pool", "far"))
    scaling(models, "dented", 6, config=parameter("charonia.pool", "default, far"))
    scaling(models, "required", 5, config=parameter("charonia.require", "zone=z|y,cpus>=1,backend=onnxruntime"))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(models, elsewhere)
    put(elsewhere / "dented" / "1" / "model.onnx", b"no model at all")
    started: list[Part] = []
    with log_of(tmp_path) as log_url:

        def start(role: str, name: str, *flags: str) -> Part:
            started.append(Part(role, name, tmp_path, log_url, *flags))
            return started[-1]

        repository = f"--model-repository={models}"
        far = ("executor", "far", f"--model-repository={elsewhere}", "--pool=far", "--label=zone=z")
        far += ("--exit-on-error=false",)
        try:
            gateway = start("gateway", "gateway", "--http-port=0", "--http-address=127.0.0.1", "--allow-grpc=false")
            start("batcher", "batcher")
            near = start("executor", "near", repository)
            yield SimpleNamespace(
                gateway=gateway, near=near, far=start(*far), start_far=lambda: start(*far), log_url=log_url
            )
        except BaseException:
            for part in started:
                sys.stderr.write(f"--- {part.log_file.name}\n{part.log()}\n")
            raise
        finally:
            for part in started:
                if part.process.poll() is None:
                    part.stop()


def executors(log_url: str) -> list[dict[str, Any]]:
    found = subprocess.run(
        [CHARONIA, "executors", "ls", "--json", "--log-url", log_url], capture_output=True, check=True, timeout=60
    )
    return list(json.loads(found.stdout)["executors"])


def test_models_run_where_they_may_and_a_pool_may_restart(stack: Any) -> None:
    gateway = stack.gateway
    gateway.learn_address()
    rows = until(
        "both have loaded",
        lambda: (
            len(rows := [r for r in executors(stack.log_url) if r["state"] == "ready"]) == 2
            and {row["pool"]: row for row in rows}
        ),
    )
    assert (rows["default"]["loaded"], rows["far"]["loaded"]) == (3, 4)
    assert rows["far"]["labels"]["zone"] == "z"
    assert rows["far"]["devices"] == "cpu"
    assert set(rows["default"]["excluded"]) == {"far", "required"}
    assert rows["far"]["excluded"] == {}

    ready = {"anywhere", "both", "dented", "far", "required"}
    until(  # the gateway hears of it from the log as the command does
        "the gateway knows it",
        lambda: {name for (name, _), row in index(gateway).items() if row["state"] == "READY"} == ready,
    )
    gateway.wait_ready()
    for model, factor in (("anywhere", 2), ("both", 3), ("far", 4), ("required", 5), ("dented", 6)):
        np.testing.assert_array_equal(infer(gateway, model, INPUT0=X).as_numpy("OUTPUT0"), X * factor)

    assert "failed to load dented: " in stack.far.log(), "one says that it cannot, the other serves it"
    assert stack.far.stop() == 0
    until("its models have nobody", lambda: gateway.get("/v2/models/far/ready")[0] == 400)
    assert gateway.get("/v2/models/both/ready")[0] == 200
    np.testing.assert_array_equal(infer(gateway, "both", INPUT0=X).as_numpy("OUTPUT0"), X * 3)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(infer, gateway, "far", INPUT0=X)
        until("it is accepted", lambda: b"far" in queue(stack.log_url))
        assert not waiting.done()
        assert gateway.get("/v2/health/ready")[0] == 200, "the pool's next executor is waited for"
        stack.start_far()
        np.testing.assert_array_equal(waiting.result(60).as_numpy("OUTPUT0"), X * 4)
    until("it is counted", lambda: statistics(gateway, "far")["inference_stats"]["success"]["count"] >= 1)


def queue(log_url: str) -> bytes:
    """What waits, as an operator sees it."""
    command = [CHARONIA, "queue", "ls", "--json", "--log-url", log_url]
    rows = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=180).stdout)["models"]
    return b" ".join(row["model"].encode() for row in rows if row["requests"])
