"""What tests of the gRPC interface share: each runs on every server of it."""

from __future__ import annotations

import pytest
from grpc_fronts import FRONTS, MakeFront
from memory_objects import objects

__all__ = ["objects"]


@pytest.fixture(params=FRONTS)
def make_front(request: pytest.FixtureRequest) -> MakeFront:
    return FRONTS[request.param]
