from __future__ import annotations

import pytest

from charonia.errors import StartupError
from charonia.options.cloud_options import check_ports
from charonia.options.role_settings import gateway_settings
from charonia.options.settings import OpenAiSettings
from charonia.options.values import GATEWAY, parse


def settings_of(*argv: str) -> OpenAiSettings | None:
    return gateway_settings(parse(GATEWAY, argv, {}, {})).openai


def test_settings_of_the_openai_api() -> None:
    assert settings_of() is None
    assert settings_of("--allow-openai") == OpenAiSettings("0.0.0.0", 9000, False, ":")
    assert settings_of("--openai-on-http-port") == OpenAiSettings("0.0.0.0", -1, True, ":")
    argv = ("--allow-openai", "--openai-port=0", "--openai-address=::1", "--openai-on-http-port", "--lora-separator=")
    assert settings_of(*argv) == OpenAiSettings("::1", 0, True, "")


def test_its_port_is_its_own() -> None:
    with pytest.raises(StartupError, match="HTTP requests and OpenAI requests at the same address and port"):
        check_ports(parse(GATEWAY, ["--allow-openai", "--openai-port=8000"], {}, {}))
