"""`charonia trace summary`: files in, a table or a document out; it needs no log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from charonia.cli import main


def trace(model: str, number: int, begin: int, parent: int = 0) -> list[dict[str, object]]:
    stamps = {
        "REQUEST_START": 0, "QUEUE_START": 0, "COMPUTE_START": 1_200, "COMPUTE_INPUT_END": 2_000,
        "COMPUTE_OUTPUT_START": 9_000, "COMPUTE_END": 9_500, "REQUEST_END": 20_000,
    }  # fmt: skip
    return [
        {"id": number, "model_name": model, "model_version": 1, "request_id": ""}
        | ({"parent_id": parent} if parent else {}),
        {"id": number, "timestamps": [{"name": name, "ns": begin + ns} for name, ns in stamps.items()]},
    ]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "t.0", tmp_path / "t.1"]
    paths[0].write_text(json.dumps([*trace("outer", 1, 0), *trace("inner", 2, 100, parent=1)]))
    paths[1].write_text(json.dumps(trace("other", 3, 0)))
    return [str(path) for path in paths]


def test_a_table(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "summary", *files]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "MODEL    COUNT  REQUEST  P99  QUEUE  COMPUTE  INPUT  INFER  OUTPUT  OVERHEAD  SHARE",
        "outer        1       20   20      1        8      1      7       0        10  100%",
        "  inner      1       20   20      1        8      1      7       0        10  100%",
        "other        1       20   20      1        8      1      7       0        10  100%",
        "2 traces; means in microseconds",
    ]


def test_a_document(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "summary", "--json", "--model", "other", *files]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["traces"], [row["path"] for row in document["models"]]) == (1, [["other"]])
    assert document["models"][0]["queue_us"] == 1.2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is not JSON"),
        ("{}", "is no trace file: it must be a JSON array"),
        ("[1]", "is no trace file: it must be a JSON array of objects with an 'id'"),
    ],
)
def test_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str) -> None:
    path = tmp_path / "t"
    if content is not None:
        path.write_text(content)
    assert main(["trace", "summary", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"charonia: '{path}' {said}")
