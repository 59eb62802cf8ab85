"""The load test of durable tokens counts every token of an engine that computes nothing, in each of its forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.bench.servers import Charonia
from loadtest.generation import durable
from loadtest.generation.token_source import install, write_model

pytestmark = pytest.mark.integration


async def test_every_form_gives_all_of_its_tokens(tmp_path: Path) -> None:
    installed = install(tmp_path / "installed")
    for name, parameters in durable.MODELS.items():
        write_model(tmp_path / "models", name, **parameters)
    with Charonia(tmp_path / "models", checkout=durable.ROOT, environment={"PYTHONPATH": str(installed)}) as server:
        found = await durable.measure(server, 4, 20, 1)
    assert found.keys() == durable.MODELS.keys()
    for rounds in found.values():
        (figures,) = rounds
        assert figures["tokens/s"] > 0
        assert 0 < figures["entries"] <= 80
    assert found["durable"][0]["scripts"] > 0
