"""`charonia check` as a command: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from charonia.cli import main

BROKEN = """name: "other"
backend: "python"
max_batchsize: 4
input [ { name: "a" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "c" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
CODE = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models/m/config.pbtxt").write_text(BROKEN)
    (tmp_path / "models/m/1/model.py").write_text(CODE)
    return tmp_path / "models"


def test_faults_are_lines_and_exit_code_1(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(repository)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("m/config.pbtxt:3:1: max_batchsize: ")
    assert lines[1:3] == ["    expected: a field of ModelConfig", "    write: max_batch_size (--fix does)"]
    assert lines[3].startswith("m/config.pbtxt:1:1: name: unexpected directory name 'm'")
    assert lines[-1] == "1 model, 2 faults in 1 of them"


def test_json_is_one_document(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", str(repository)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["repository"], document["models"]) == (str(repository), 1)
    assert document["faults"][0] == {
        "model": "m",
        "file": "m/config.pbtxt",
        "line": 3,
        "column": 1,
        "field": "max_batchsize",
        "problem": 'config.pbtxt:3:1 : Message type "inference.ModelConfig" has no field named "max_batchsize".',
        "expected": "a field of ModelConfig",
        "instead": "max_batch_size",
        "fixable": True,
    }


def test_fix_shows_the_difference_and_ends_well(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--fix", str(repository)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"-max_batchsize: 4", "+max_batch_size: 4"} <= set(lines)
    assert "fixed: corrected m/config.pbtxt; as it was: m/config.pbtxt~" in lines
    assert lines[-1] == "1 model, no fault"
    assert main(["check", str(repository)]) == 0


def test_no_repository_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "nowhere")]) == 1
    assert "does not exist or is not a directory" in capsys.readouterr().err
