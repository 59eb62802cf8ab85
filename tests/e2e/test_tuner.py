"""`charonia tune` with real servers: a small model, two configurations, and a second run that measures nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from charonia import cli

pytestmark = pytest.mark.e2e


def children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= set((task / "children").read_text().split())
    return found


def test_a_model_is_tuned(
    example_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CHARONIA_LOG_URL", "redis://127.0.0.1:1"
    )  # of a deployment: the servers have a log of their own
    before = children()
    words = ["tune", "identity", "--model-repository", str(example_models), "--output", str(tmp_path / "out"), "--json"]
    knobs = ["--instances", "keep", "--threads", "keep", "--max-batch", "keep", "--preferred", "keep"]
    load = ["--delay-us", "0,3000", "--concurrency", "2", "-p", "2000", "-r", "1", "--rounds", "0", "--min-gain", "0"]
    found = []
    for _ in range(2):
        assert cli.main([*words, *knobs, *load]) == 0, capsys.readouterr().err
        found.append(json.loads(capsys.readouterr().out)["groups"])
    assert found[0] == found[1]
    (group,) = found[0]
    assert [trial["settings"] for trial in group["trials"]] == [
        {"identity delay-us": "0"}, {"identity delay-us": "3000"},
    ]  # fmt: skip
    for trial in group["trials"]:
        (level,) = trial["observation"]["targets"]["identity"]
        assert level["requests"] > 0
        assert not level["errors"]
        assert level["server"]["identity"]["executions"] > 0
        assert trial["observation"]["memory"]["bytes"] > 10 << 20
    text = (tmp_path / "out" / "identity" / "config.pbtxt").read_text()
    assert "identity" in text
    assert (tmp_path / "out" / "report.html").read_text().count("<svg") >= 2
    assert children() <= before  # no server is left
    assert not [name for name in os.listdir(tmp_path) if name != "out"]
