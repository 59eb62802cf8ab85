"""Suites of others: options of Triton's frontend as ours, names of models, and what is expected to fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.clients.outcome import Outcome
from loadtest.clients.suites import running

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
    (tmp_path / "exceptions.toml").write_text('[vllm]\n"a.py::test_two[*" = "why"\n"a.py::test_old" = "no more"\n')
    monkeypatch.setattr(running, "EXCEPTIONS", tmp_path / "exceptions.toml")
    found = running.judged(
        "vllm", [Outcome(f"a.py::{name}", state) for name, state in (("test_two[x]", "failed"), ("test_old", "ok"))]
    )
    assert [(one.state, one.reason) for one in found] == [
        ("excepted", "why"),
        ("failed", "passes, but is an exception: no more"),
    ]


@pytest.mark.parametrize("suite", ["vllm", "triton"])
def test_every_exception_has_a_reason(suite: str) -> None:
    assert all(running.exceptions(suite).values())
