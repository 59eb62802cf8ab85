"""Content types that say how long the JSON part of a body is."""

from __future__ import annotations

import httpx2
import pytest
from echo_handler import EchoHandler

from charonia.options.settings import GatewaySettings, SageMakerSettings
from gateway.clouds.sagemaker import SageMakerApplication

MIME = "application/vnd.sagemaker-triton.binary+json;json-header-size="


@pytest.mark.parametrize(
    ("content_type", "text"),
    [
        ("x " + MIME + "1", f"expect MIME type for binary data starts with '{MIME}', got: x {MIME}1"),
        (MIME, "Unable to parse inference header size, got: "),
        (MIME + "ten", "Unable to parse inference header size, got: ten"),
        (MIME + "2147483648", "Unable to parse inference header size, value is out of range, got: 2147483648"),
        (MIME + "9" * 400, "Unable to parse inference header size, value is out of range, got: " + "9" * 400),
        (MIME + "-1", "inference header size should be in range (0, 2), got: -1"),
        (MIME + "3", "inference header size should be in range (0, 2), got: 3"),
    ],
)
async def test_wrong_lengths(handler: EchoHandler, content_type: str, text: str) -> None:
    application = SageMakerApplication(GatewaySettings("test"), handler, SageMakerSettings(default_model="identity"))
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(application), base_url="http://server", headers={"content-type": content_type}
    ) as client:
        reply = await client.post("/invocations", content=b"{}")
        assert (reply.status_code, reply.json()) == (400, {"error": text})
        assert handler.requests == []
