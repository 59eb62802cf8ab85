"""Both fronts on Unix sockets beside their ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import echo_handler as echo
import grpc.aio
import numpy as np
import pytest
from grpc_calls import LIMIT_S, infer_stub
from grpc_calls import request as grpc_request
from grpc_fronts import FRONTS
from http_calls import read_reply, request

from charonia.client import AsyncClient, Client, NotConnected, RetryPolicy
from charonia.errors import StartupError
from charonia.options.settings import GatewaySettings
from gateway.app import Front
from gateway.http.server import HttpFront

SETTINGS = GatewaySettings(
    incarnation="test", http_address="127.0.0.1", http_port=0, grpc_address="127.0.0.1", grpc_port=0
)
MAKE: dict[str, Callable[[GatewaySettings, Any], Any]] = {"http": HttpFront, **FRONTS}


async def started(name: str, path: Path) -> Front:
    field = "http_socket" if name == "http" else "grpc_socket"
    front: Front = MAKE[name](replace(SETTINGS, **{field: str(path)}), echo.EchoHandler())  # type: ignore[arg-type]
    await front.start()
    return front


async def asked(name: str, path: Path) -> None:
    """A small request, some of which ride in the lane, and a large one."""
    if name != "http":
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            for size in (64, 64, 1_600_000):
                assert (await infer_stub(channel)(grpc_request("r", size=size), timeout=LIMIT_S)).id == "r"
        return
    reader, writer = await asyncio.open_unix_connection(str(path))
    for size in (64, 64, 1_600_000):
        writer.write(request(size=size))
        status, _, answer = await read_reply(reader)
        assert status == 200, answer[:200]
    writer.close()


@pytest.mark.parametrize("name", MAKE)
async def test_calls_over_a_unix_socket_and_the_port(name: str, tmp_path: Path) -> None:
    path = tmp_path / "front.sock"
    front = await started(name, path)
    await asked(name, path)
    assert front.port > 0
    with socket.create_connection(("127.0.0.1", front.port)):
        pass
    await front.close(1.0)
    assert not path.exists()


@pytest.mark.parametrize("name", MAKE)
async def test_our_clients_ask_over_a_unix_socket(name: str, tmp_path: Path) -> None:
    path = tmp_path / "50% of a front.sock"
    front = await started(name, path)
    url = f"{'http' if name == 'http' else 'grpc'}+unix://{path}".replace("%", "%25").replace(" ", "%20")
    array = np.arange(400_000, dtype=np.float32).reshape(-1, 2)

    def blocking() -> list[int]:
        with Client(url) as client:
            assert client.live()
            return [client.infer("wide", {"INPUT0": array[:rows]})["OUTPUT0"].size for rows in (8, 8, 200_000)]

    try:
        assert await asyncio.wait_for(asyncio.to_thread(blocking), LIMIT_S) == [16, 16, 400_000]
        async with asyncio.timeout(LIMIT_S), AsyncClient(url) as client:
            assert await client.live()
            result = await client.infer("wide", {"INPUT0": array})
            np.testing.assert_array_equal(result["OUTPUT0"], array)
    finally:
        await front.close(1.0)
    async with AsyncClient(url, retry=RetryPolicy(attempts=1)) as client:
        with pytest.raises(NotConnected):
            await client.live(timeout_s=LIMIT_S)


@pytest.mark.parametrize("name", MAKE)
async def test_a_file_that_was_left_is_replaced_and_one_in_use_is_not(name: str, tmp_path: Path) -> None:
    path = tmp_path / "front.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(str(path))
    front = await started(name, path)
    await asked(name, path)
    with pytest.raises(StartupError, match="already in use"):
        await started(name, path)
    await asked(name, path)
    await front.close(1.0)


@pytest.mark.parametrize("name", MAKE)
async def test_a_path_that_cannot_be_had_ends_the_start(name: str, tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "front.sock", tmp_path / ("x" * 200)):
        with pytest.raises(StartupError, match="cannot listen on"):
            await started(name, path)
    file = tmp_path / "precious"
    file.write_text("not a socket")
    with pytest.raises(StartupError):
        await started(name, file)
    assert file.read_text() == "not a socket"
