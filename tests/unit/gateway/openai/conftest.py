"""The OpenAI API over an in-memory handler, called as ASGI without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import text_handler

from charonia.options.settings import GatewaySettings, OpenAiSettings
from gateway.openai.openai_application import OpenAiApplication, OpenAiInterface


@pytest.fixture
def handler() -> Any:
    return text_handler.TextHandler()


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(incarnation="test", openai=OpenAiSettings())


@pytest.fixture
def interface(settings: GatewaySettings, handler: Any) -> OpenAiInterface:
    return OpenAiInterface(settings, handler)


@pytest.fixture
async def client(
    settings: GatewaySettings, handler: Any, interface: OpenAiInterface
) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=OpenAiApplication(settings, handler, interface))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
