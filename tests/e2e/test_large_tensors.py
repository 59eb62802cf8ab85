"""Tensors over 32 KB travel beside the log: by file where the parts share a machine, else as blobs; none is left."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import e2e_models
import numpy as np
import pytest
import redis
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient

from charonia.eventlog.embedded import PrivateServer, find_server

BYTES = 4 * 1024 * 1024


def _ask(server: Any, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    tensor = httpclient.InferInput("VALUE", list(values.shape), "INT32")
    tensor.set_data_from_numpy(values)
    with httpclient.InferenceServerClient(server.http, network_timeout=60, connection_timeout=60) as client:
        answer = client.infer("gated", [tensor]).as_numpy("ECHO")
    assert answer is not None
    return np.asarray(answer)


def _received_by_log(server: Any) -> int:
    with redis.Redis.from_url(server.log_url) as client:
        return int(client.info("stats")["total_net_input_bytes"])


@pytest.fixture
def models(tmp_path: Path) -> Path:
    e2e_models.gated(tmp_path / "models", "gated", "")
    return tmp_path / "models"


@pytest.mark.parametrize(
    ("flags", "in_log"),
    [
        ((), 0),
        (("--batcher=separate",), 0),
        # no directory to share: once as a blob, and the answers in their replies
        (("--shm-dir=/proc/none",), 4),
    ],
    ids=["colocated", "separate", "blobs"],
)
def test_large_tensors_come_back_whole(flags: tuple[str, ...], in_log: int, models: Path, serve: Any) -> None:
    server = serve(models, *flags)
    values = np.arange(BYTES // 4, dtype=np.int32)
    before = _received_by_log(server)
    np.testing.assert_array_equal(_ask(server, values), values)
    assert _received_by_log(server) - before < in_log * BYTES + 200_000
    _wait_given_back(server)


def test_a_blob_server_spares_the_log(models: Path, serve: Any, tmp_path: Path) -> None:
    beside = PrivateServer(tmp_path / "beside", find_server())
    (tmp_path / "beside").mkdir()
    beside.start()
    try:
        beside.wait_ready()
        server = serve(models, "--shm-dir=/proc/none", f"--blob-url={beside.url}", "--batcher=separate")
        values = np.arange(BYTES // 4, dtype=np.int32)
        before = _received_by_log(server)
        np.testing.assert_array_equal(_ask(server, values), values)
        # the answer's three tensors come back in its reply, which is in the log
        assert _received_by_log(server) - before < 3.5 * BYTES
        with redis.Redis.from_url(beside.url) as client:
            assert client.info("stats")["total_net_input_bytes"] > BYTES
    finally:
        beside.stop()


def _wait_given_back(server: Any) -> None:
    """Until nothing that was lent is left in the directory or in the log: it follows the answer by a moment."""

    async def poll() -> None:
        with redis.Redis.from_url(server.log_url) as client:
            async with asyncio.timeout(10):
                while _lent(server) or list(client.scan_iter("blob:*")):
                    await asyncio.sleep(0.01)

    asyncio.run(poll())


def _lent(server: Any) -> list[Path]:
    """Payload files of this server, without the tokens. Its directory is the one its gateway has a part of."""
    here = f"-{server.pids('gateway')[0]}-"
    roots = {path.parent for path in Path("/dev/shm").glob("charonia-*/*") if here in path.name}
    return [path for root in roots for path in root.glob("*/*") if path.name != "token"]


def test_an_executor_killed_with_a_large_batch_costs_nobody_an_answer(models: Path, serve: Any, tmp_path: Path) -> None:
    server = serve(models, "--executors=2")
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    values = np.arange(BYTES // 4, dtype=np.int32)

    async def drive() -> None:
        async with grpcaio.InferenceServerClient(server.grpc) as client:
            tensor = grpcclient.InferInput("VALUE", list(values.shape), "INT32")
            tensor.set_data_from_numpy(values)
            parameters = {"entered": str(entered), "gate": str(gate)}
            asked = asyncio.create_task(client.infer("gated", [tensor], parameters=parameters, client_timeout=60))
            async with asyncio.timeout(30):
                while not entered.exists():
                    await asyncio.sleep(0.005)
            entered.unlink()
            for pid in server.pids("executor"):
                os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(30):
                while not entered.exists():
                    await asyncio.sleep(0.005)
            gate.touch()
            answer = (await asked).as_numpy("ECHO")
            np.testing.assert_array_equal(answer, values)

    asyncio.run(drive())
    _wait_given_back(server)
