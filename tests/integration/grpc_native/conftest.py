"""A native gRPC front and connections to it; after each test another client is served by it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import http2_client as http2
import pytest
from grpc_calls import LIVE

from charonia.options.settings import GatewaySettings
from gateway.grpc.native.native_server import NativeGrpcFront


@pytest.fixture
def options() -> dict[str, Any]:
    """Of the front, beside its address."""
    return {}


@pytest.fixture
async def front(handler: Any, options: dict[str, Any]) -> AsyncIterator[NativeGrpcFront]:
    settings = GatewaySettings(incarnation="test", grpc_address="127.0.0.1", grpc_port=0)
    front = NativeGrpcFront(replace(settings, **options), handler)
    await front.start()
    yield front
    # whatever a test did, the others are served
    assert await http2.polite_call(front.port) == LIVE
    await front.close(0.0)


@pytest.fixture
async def dial(front: NativeGrpcFront) -> AsyncIterator[http2.Dial]:
    async with http2.dialling(front.port) as dial:
        yield dial


@pytest.fixture
async def wire(dial: http2.Dial) -> http2.Wire:
    return await dial()
