"""Many clients at once, and processes killed under them: every accepted request gets its one right answer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import redis
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient


def _left_in_log(url: str) -> dict[str, int]:
    """What the log still holds of requests: entries of work and reply streams, unsettled ids, blobs."""
    left: dict[str, int] = {}
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(count=1000):
            name = key.decode()
            if name.split(":")[0] in ("q", "sq", "x", "r", "f"):
                if length := client.xlen(key):
                    left[name] = length
            elif name.startswith("u:"):
                left[name] = client.hlen(key)
            elif name.startswith("blob:"):
                left[name] = 1
    return left


def _settled(url: str, deadline_s: float = 60.0) -> dict[str, int]:
    """`_left_in_log` once it is empty or the time is up: deleting trails the last answer by a moment."""

    async def poll() -> dict[str, int]:
        async with asyncio.timeout(deadline_s):
            while left := _left_in_log(url):
                await asyncio.sleep(0.01)
            return left

    try:
        return asyncio.run(poll())
    except TimeoutError:
        return _left_in_log(url)


def test_64_clients_share_batches_and_leave_nothing_behind(few_models: Path, serve: Any, examples: ModuleType) -> None:
    server = serve(few_models)
    tensors = examples.REQUESTS["magika"]()
    rounds = 5

    def request() -> list[Any]:
        array = tensors["bytes"]
        tensor = httpclient.InferInput("bytes", list(array.shape), "INT32")
        tensor.set_data_from_numpy(array)
        return [tensor]

    def client_loop(client: Any) -> list[str]:
        labels = []
        for _ in range(rounds):
            wanted = [httpclient.InferRequestedOutput("target_label", class_count=1)]
            label = client.infer("magika", request(), outputs=wanted).as_numpy("target_label")[0, 0]
            labels.append(label.decode().split(":")[2])
        return labels

    async def all_clients() -> list[list[str]]:
        from concurrent.futures import ThreadPoolExecutor

        def one() -> list[str]:
            with httpclient.InferenceServerClient(server.http) as client:
                return client_loop(client)

        with ThreadPoolExecutor(64) as pool:
            loop = asyncio.get_running_loop()
            return list(await asyncio.gather(*(loop.run_in_executor(pool, one) for _ in range(64))))

    answers = asyncio.run(all_clients())
    assert [label for labels in answers for label in labels] == ["python"] * 64 * rounds
    with httpclient.InferenceServerClient(server.http) as client:
        stats = client.get_inference_statistics("magika")["model_stats"][0]
    assert stats["inference_count"] == 64 * rounds
    assert stats["inference_count"] / stats["execution_count"] > 4
    assert _settled(server.log_url) == {}


async def _keep_asking(url: str, stop: asyncio.Event, killed: asyncio.Event, index: int) -> tuple[int, int]:
    """One client: distinct values, each answer compared with its own; (answered, answered after the kill)."""
    answered = after = 0
    async with grpcaio.InferenceServerClient(url) as client:
        count = 0
        while not stop.is_set():
            count += 1
            values = np.arange(16, dtype=np.float32).reshape(1, 16) + index * 1_000_003 + count
            tensor = grpcclient.InferInput("INPUT0", [1, 16], "FP32")
            tensor.set_data_from_numpy(values)
            began_after_kill = killed.is_set()
            result = await client.infer("identity", [tensor], client_timeout=60)
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), values)
            answered += 1
            after += began_after_kill
    return answered, after


@pytest.mark.parametrize(
    ("role", "flags"),
    [
        ("executor+batcher", ()),
        ("executor", ("--executors=2",)),
        ("batcher", ("--executors=2",)),
        ("redis", ()),
    ],
)
@pytest.mark.long
def test_kill_under_load(role: str, flags: tuple[str, ...], few_models: Path, serve: Any) -> None:
    server = serve(few_models, *flags)

    async def drive() -> list[tuple[int, int]]:
        stop, killed = asyncio.Event(), asyncio.Event()
        clients = [asyncio.create_task(_keep_asking(server.grpc, stop, killed, i)) for i in range(16)]

        async def execution_count() -> int:
            async with grpcaio.InferenceServerClient(server.grpc) as client:
                stats = await client.get_inference_statistics("identity")
                return int(stats.model_stats[0].execution_count)

        async def until(more: int) -> None:
            wanted = await execution_count() + more
            while await execution_count() < wanted:
                done = [c for c in clients if c.done()]
                if done:
                    await asyncio.gather(*done)
                await asyncio.sleep(0.01)

        await until(20)
        os.kill(server.pids(role)[0], signal.SIGKILL)
        killed.set()
        if role == "redis":
            stop.set()
            return await asyncio.gather(*clients, return_exceptions=True)  # type: ignore[return-value]
        await until(20)
        stop.set()
        return await asyncio.gather(*clients)

    results = asyncio.run(drive())
    if role == "redis":
        # the log server itself: a call may fail as UNAVAILABLE with an unknown outcome, none may be wrong or hang
        for result in results:
            if isinstance(result, BaseException):
                assert isinstance(result, grpcclient.InferenceServerException), result
                assert "UNAVAILABLE" in str(result), result
        server.wait_ready()
        return
    assert all(answered > 0 for answered, _ in results)
    assert sum(after for _, after in results) > 0
    assert _settled(server.log_url) == {}
