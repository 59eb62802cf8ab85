"""The addresses of a running server are those of its state directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.bench.servers import Endpoints, endpoints_of


def test_endpoints_of_a_state_directory(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"endpoints\.json"):
        endpoints_of(tmp_path)
    (tmp_path / "endpoints.json").write_text(
        json.dumps({"http": "h:1", "grpc": "h:2", "log": "unix:///l", "openai": "h:3"})
    )
    assert endpoints_of(tmp_path) == Endpoints("h:1", "h:2", None, tmp_path / "processes.json", "unix:///l", "h:3")
