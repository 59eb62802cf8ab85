"""`charonia simulate` from a recording to the comparison with a real server that was changed as the question says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from e2e_server import LEASES

from loadtest.prediction.__main__ import COMPARED, SOURCES, main

pytestmark = pytest.mark.e2e

QUESTION = "executors=+1 delay=1ms rate=x3"


@pytest.mark.long
def test_a_recording_a_question_and_what_came_true(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far the figures are apart is a matter of the machine: here only that there are some."""
    for name, value in LEASES.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "figures.json"
    assert main(["--requests", "60", "--rate", "150", "--what-if", QUESTION, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    for source in SOURCES:
        assert f"predicted from the {source}" in printed
    assert printed.count(" %)") == 16  # of two baselines and two predictions
    found = json.loads(file.read_text())
    (asked,) = found["what_ifs"]
    assert asked["what_if"] == QUESTION
    for figures in (*asked["measured"].values(), *asked["predicted"].values(), *found["recorded"].values()):
        assert all(math.isfinite(figures[name]) and figures[name] > 0 for name in COMPARED)
    for errors in asked["error_percent"].values():
        assert all(math.isfinite(errors[name]) for name in COMPARED)
