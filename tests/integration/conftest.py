"""What tests of several parts share: both fronts' doubles, a log server to be killed, batchers over two logs.

`front` and `channel` are of the gRPC interface, whose tests run on every server of it. Modules about other fronts have
a `front` of their own, and those of response senders a `load`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from asking_cluster import clustered
from batching_cluster import Cluster
from echo_handler import EchoHandler
from grpc_fronts import FRONTS, MakeFront
from memory_objects import objects
from own_server import log_on, own_server
from python_instances import Load, loading

from charonia.eventlog.embedded import PrivateServer
from charonia.eventlog.redis import RedisLog
from charonia.options.settings import GatewaySettings
from gateway.app import Front

__all__ = ["objects"]


@pytest.fixture(params=FRONTS)
def make_front(request: pytest.FixtureRequest) -> MakeFront:
    return FRONTS[request.param]


@pytest.fixture
def handler() -> Any:
    return EchoHandler()


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(incarnation="test", grpc_address="127.0.0.1", grpc_port=0)


@pytest.fixture
async def front(settings: GatewaySettings, handler: Any, make_front: MakeFront) -> AsyncIterator[Front]:
    front = make_front(settings, handler)
    await front.start()
    yield front
    await front.close(1.0)


@pytest.fixture
async def channel(front: Front) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        yield channel


@pytest.fixture
def server() -> Iterator[PrivateServer]:
    with own_server() as server:
        yield server


@pytest.fixture
async def log(server: PrivateServer) -> AsyncIterator[RedisLog]:
    async with log_on(server) as log:
        yield log


@pytest.fixture(params=["memory", "redis"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with clustered(request) as cluster:
        yield cluster


@pytest.fixture
async def load(tmp_path: Path) -> AsyncIterator[Load]:
    async with loading(tmp_path) as load:
        yield load
