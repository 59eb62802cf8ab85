"""A complete in-memory handler, shared by the tests of every front."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import echo_handler
import pytest
from fake_cuda import cuda
from memory_objects import objects

from charonia.options.settings import GatewaySettings

__all__ = ["cuda", "objects"]


@pytest.fixture
def handler() -> Any:
    return echo_handler.EchoHandler()


@pytest.fixture
def served(handler: Any) -> Callable[[str], Any]:
    return lambda model: handler.served_model(model, "")


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(incarnation="test")
