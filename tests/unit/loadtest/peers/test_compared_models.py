"""Each compared model is a configuration that Charonia reads, and code that compiles."""

from __future__ import annotations

from pathlib import Path

from charonia.models.config_forms import parse
from executors.configuration.config import normalise
from loadtest.peers.compared_models import MODELS, write_compared_repository


def test_every_model_can_be_read(tmp_path: Path) -> None:
    write_compared_repository(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(MODELS)
    for name in MODELS:
        config = normalise(parse(f'name: "{name}" ' + (tmp_path / name / "config.pbtxt").read_text()))
        code = tmp_path / name / "1" / "model.py"
        assert code.exists() == (config.platform != "ensemble")
        if code.exists():
            compile(code.read_text(), name, "exec")
