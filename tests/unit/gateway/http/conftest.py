"""The HTTP application over an in-memory handler, called as ASGI without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from charonia.options.settings import GatewaySettings
from gateway.http.http_application import HttpApplication


@pytest.fixture
def application(settings: GatewaySettings, handler: Any) -> HttpApplication:
    return HttpApplication(settings, handler)


@pytest.fixture
async def client(application: HttpApplication) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=application)
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://gateway", headers={"accept-encoding": "identity"}
    ) as client:
        yield client
