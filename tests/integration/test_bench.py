"""The bench, the counts and the walk on a real server: answers are checked, figures are there, the base is a tree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from loadtest.bench.__main__ import checkout_of
from loadtest.bench.__main__ import main as bench
from loadtest.bench.budget import count_calls, count_log
from loadtest.bench.calls import counted
from loadtest.bench.cases import find, write_repository
from loadtest.model import LoadTestError
from loadtest.walk import main as walk

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.integration


@pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load is in Debian's package nghttp2-client")
@pytest.mark.long
def test_two_checkouts_are_loaded_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loadtest.bench.__main__.favour", lambda: True)  # the test's own process keeps its priority
    out = tmp_path / "points.jsonl"
    short = ["--models", "identity,mixed", "--in-flight", "2", "--rounds", "1", "--duration", "1.5"]
    assert bench([*short, "--base", str(ROOT), "--out", str(out)]) == 0
    points = [json.loads(line) for line in out.read_text().splitlines()]
    timed = [point for point in points if "rate" in point]
    assert {(p["case"], p["protocol"], p["server"]) for p in timed} == {
        (case, protocol, server)
        for case in ("identity", "mixed")
        for protocol in ("grpc", "http")
        for server in ("own", "base")
    }
    for point in timed:
        assert point["wrong"] == 0
        assert point["rate"] > 0
        assert point["cpu_us"]["gateway"] > 0
        assert point["log_commands"] > 0
        assert point["requests_per_entry"] >= 1
    assert all(sum(point["calls"].values()) > 0 for point in points if "calls" in point)
    assert "Medians over the rounds of figure / figure of base" in capsys.readouterr().out


def test_counts_of_a_server(tmp_path: Path) -> None:
    write_repository(tmp_path, find("identity"), ROOT / "examples" / "models")
    with counted(tmp_path, ("identity",)) as server:
        alone = count_calls(server, "identity", "http", 1)["calls"]
        together = count_calls(server, "identity", "http", 64)["calls"]
        log = count_log(server.endpoints, 0.0, "identity", "http", 1)
    assert alone > together > 1
    assert log["log_commands"] > 1
    assert log["requests_per_entry"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("kind", ["job", "stream"])
def test_jobs_and_streams_have_walks(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert walk(["--kind", kind, "--requests", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} >= {"gateway", "batcher", "executors", "charonia"}


def test_a_walk_is_printed_by_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert walk(["--requests", "50", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"gateway", "batcher", "executors"} <= {line.split()[0] for line in lines}
    assert any("gateway/http/" in line for line in lines)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_a_revision_is_checked_out_and_removed_again() -> None:
    with checkout_of("HEAD") as tree:
        assert (tree / "charonia" / "cli").exists() or (tree / "charonia" / "cli.py").exists()
    assert not tree.exists()
    with pytest.raises(LoadTestError, match="no-such-revision"), checkout_of("no-such-revision"):
        pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "nothing"], "unknown model nothing"),
        (["--in-flight", "1,x"], "--in-flight must be"),
        (["--no-own"], "nothing to measure"),
        (["--peer", "triton"], "--peer needs --peers DIR"),
    ],
)
def test_options_that_do_not_fit(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loadtest.bench.__main__.favour", lambda: True)
    monkeypatch.setattr("loadtest.bench.h2load.require", lambda: "h2load")
    assert bench(["--models", "identity", *arguments]) == 2
    assert words in capsys.readouterr().err
