"""The lines of a batch are read strictly, and processes are killed when so many are done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.generation import beside
from loadtest.model import LoadTestError

BATCH = {"status": "completed", "error_file_id": None, "output_file_id": "file-1", "request_counts": {}}


def test_lines_have_prompts_of_their_own() -> None:
    lines = [json.loads(line) for line in beside.batch_file(5).splitlines()]
    assert [line["custom_id"] for line in lines] == [f"line-{number}" for number in range(5)]
    assert len({tuple(line["body"]["prompt"]) for line in lines}) == 5
    assert all(8 <= line["body"]["max_tokens"] <= 24 for line in lines)


def _results(*names: str) -> bytes:
    body = {"choices": [{"text": "said"}]}
    return b"\n".join(json.dumps({"custom_id": name, "response": {"body": body}}).encode() for name in names)


@pytest.mark.parametrize(
    ("batch", "content", "reason"),
    [
        (BATCH, _results("a", "a"), "a has two results"),
        (BATCH, _results("a"), "1 of 2 lines have a result"),
        ({**BATCH, "status": "failed"}, b"", "the batch is failed"),
        ({**BATCH, "error_file_id": "file-2"}, b"", "the batch is completed"),
    ],
)
def test_each_line_has_one_result(
    monkeypatch: pytest.MonkeyPatch, batch: dict[str, Any], content: bytes, reason: str
) -> None:
    monkeypatch.setattr(beside, "_ask", lambda *given: content)
    with pytest.raises(LoadTestError, match=reason):
        beside.texts_of("address", batch, 2)


def test_results_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_ask", lambda *given: _results("a", "b"))
    assert beside.texts_of("address", BATCH, 2) == {"a": "said", "b": "said"}


def test_processes_are_killed_in_turns(tmp_path: Path) -> None:
    sleeping = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    try:
        listed = tmp_path / "processes.json"
        roles = ("instance:smollm2", "executor+batcher")
        listed.write_text(
            json.dumps([{"role": role, "pid": one.pid} for role, one in zip(roles, sleeping, strict=True)])
        )
        kills = beside.Kills(listed, 2, 9)
        kills(2)
        assert kills.killed == []
        kills(3)
        assert (kills.killed, sleeping[0].wait(30), sleeping[1].poll()) == (["instance"], -9, None)
        kills(5)
        kills(7)
        assert (kills.killed, sleeping[1].wait(30)) == (["instance", "executor"], -9)
        kills(9)
        assert len(kills.killed) == 2
    finally:
        for one in sleeping:
            one.kill()
            one.communicate()
