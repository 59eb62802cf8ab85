"""Which servers a gateway starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from grpc_fronts import FRONTS

from charonia.options.settings import GatewaySettings
from gateway.app import _fronts
from gateway.http.server import HttpFront


@pytest.mark.parametrize("name", FRONTS)
def test_what_is_on(settings: GatewaySettings, handler: Any, name: str) -> None:
    wanted = replace(settings, http_address="a", http_port=0, grpc_address="b", grpc_port=0, grpc_front=name)
    fronts = {kind: (address, type(front)) for kind, (address, front) in _fronts(wanted, handler, str).items()}
    assert fronts == {"http": ("a", HttpFront), "grpc": ("b", FRONTS[name])}
    assert list(_fronts(replace(wanted, grpc_port=-1), handler, str)) == ["http"]
    assert list(_fronts(replace(wanted, http_port=-1), handler, str)) == ["grpc"]
