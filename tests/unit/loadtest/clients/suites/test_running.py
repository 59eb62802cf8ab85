"""Suites of others: options of Triton's frontend as ours, names of models, and what is expected to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.clients.outcome import Outcome
from loadtest.clients.suites import running

ROOT = Path(__file__).resolve().parents[5]
SERVED = """
import json, sys
from loadtest.bench import servers

class Started:
    def __init__(self, repository, options):
        self.options = list(options)
        self.endpoints = servers.Endpoints()

    def __enter__(self):
        print(json.dumps(self.options))

servers.Charonia = Started
from loadtest.clients.suites.triton_tests import Served
Served("models", ["--load-model=a"])
"""
REPORT = """<testsuites><testsuite>
<testcase file="tests/test_a.py" name="test_one" time="1.5"/>
<testcase file="tests/test_a.py" name="test_two[x]"><failure message="assert  1 == 2"/></testcase>
<testcase classname="tests.test_a" name="test_three"><skipped message="needs vllm"/></testcase>
</testsuite></testsuites>"""


def test_options_of_the_frontend() -> None:
    given = ["--model-repository", "models", "--tokenizer", "t", "--enable-kserve-frontends", "--load-model", "*"]
    given += ["--openai-restricted-api", "inference,model-repository", "key", "value", "--lora-separator", "_"]
    repository, options = running.options_of(given)
    assert repository == "models"
    restricted = "--http-restricted-api=inference,model-repository,metadata:key=value"
    assert options == ["--load-model=*", restricted, "--lora-separator=_"]


def test_names_of_models() -> None:
    text = 'MODEL_NAME = "some/model"\n[MODEL_NAME, "some/model", "some/model-lora"]\n'
    assert running.renamed(text) == 'MODEL_NAME = "smollm2"\n[MODEL_NAME, "smollm2", "some/model-lora"]\n'


def test_report(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert running.read_report(tmp_path / "report.xml") == [
        Outcome("test_a.py::test_one", "ok", 1.5),
        Outcome("test_a.py::test_two[x]", "failed", 0.0, "assert 1 == 2"),
        Outcome("tests.test_a::test_three", "not run", 0.0, "needs vllm"),
    ]


def test_exceptions_are_those_that_fail(tmp_path: Path, monkeypatch: Any) -> None:
    known = ({"reason": "why", "tests": ["a.py::test_two[*"]}, {"reason": "no more", "tests": ["a.py::test_old"]})
    luck = {"reason": "at times: by luck", "failure": "assert [] != *", "tests": ["a.py::test_luck"]}
    written = ["\n".join(f"{name} = {json.dumps(value)}" for name, value in one.items()) for one in (*known, luck)]
    (tmp_path / "exceptions.toml").write_text("".join(f"[[vllm]]\n{one}\n" for one in written))
    monkeypatch.setattr(running, "EXCEPTIONS", tmp_path / "exceptions.toml")
    runs = [Outcome("a.py::test_two[x]", "failed", reason="whatever"), Outcome("a.py::test_old", "ok")]
    runs += [Outcome("a.py::test_luck", "ok"), Outcome("a.py::test_luck", "failed", reason="E: assert [] != []")]
    runs.append(Outcome("a.py::test_luck", "failed", reason="assert 500 == 200 " + "x" * 300))
    found = list(running.judged("vllm", runs))
    assert [(one.state, one.reason) for one in found[:-1]] == [
        ("excepted", "why"),
        ("failed", "passes, but is an exception: no more"),
        ("ok", ""),
        ("excepted", "at times: by luck"),
    ]
    assert (found[-1].state, len(found[-1].reason)) == ("failed", running.SHOWN)


def test_further_options_come_to_the_servers_of_tritons_tests(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").touch()
    given: dict[str, str] = {}
    monkeypatch.setattr(running, "write_models", lambda folder, *_: folder)
    monkeypatch.setattr(running, "converted", lambda *_: None)
    monkeypatch.setattr(running, "tested", lambda _folder, _plugin, _files, own, *_: [given.update(own)][:0])
    options = ["--log-verbose=1", "--http-header-forward-pattern=a b"]
    assert list(running.triton(tmp_path, tmp_path, options)) == []
    printed = subprocess.run(
        [sys.executable, "-c", SERVED], cwd=ROOT, env={**os.environ, **given}, stdout=subprocess.PIPE, check=True
    ).stdout
    assert json.loads(printed)[-3:] == ["--load-model=a", *options]


@pytest.mark.parametrize("suite", ["vllm", "triton"])
def test_every_exception_has_a_reason_and_those_at_times_a_failure(suite: str) -> None:
    known = running.exceptions(suite)
    assert all(one.reason for one in known)
    assert all(one.failure for one in known if one.reason.startswith(running.AT_TIMES))
