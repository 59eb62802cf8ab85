"""The bench of backends runs: files are written, answers agree with the libraries', ratios come out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.backends.__main__ import main


@pytest.mark.parametrize("subject", ["onnx_quick", "litert_dense"])
def test_a_short_run(subject: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    options = ["--isolation", "none,process", "--rounds", "1", "--seconds", "0.2", "--json", str(out)]
    assert main(["--subjects", subject, *options]) == 0
    found = json.loads(out.read_text())["medians"][subject]
    assert list(found) == ["bare", "none", "process"]
    for side in ("none", "process"):
        assert found[side]["rows_per_s"] > 0
        assert found[side]["bare_of_served"] > 0
        assert found[side]["roles_us"]["gateway"] > 0
    assert "bare/served" in capsys.readouterr().out


def test_unknown_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--subjects", "nothing"]) == 2
    assert main(["--isolation", "bottle"]) == 2
    assert "unknown subject nothing" in capsys.readouterr().err
