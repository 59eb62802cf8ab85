"""A complete in-memory handler, shared by the tests of every front."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia.settings import GatewaySettings


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


echo_handler = _load("gateway_echo_handler", Path(__file__).with_name("echo_handler.py"))


@pytest.fixture
def handler() -> Any:
    return echo_handler.EchoHandler()


@pytest.fixture
def served(handler: Any) -> Callable[[str], Any]:
    return lambda model: handler.served_model(model, "")


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(incarnation="test")
