"""`charonia tune` with real servers: a small model, two configurations, and a second run that measures nothing; two
models together; an ensemble. Winning configurations are served.

The models of the latter sleep, so that which configuration is the best one does not depend on the machine.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_asking import infer
from e2e_models import put, python

from charonia import cli

pytestmark = pytest.mark.e2e

SLEEPER = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            time.sleep({seconds})
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value + 1)]))
        return responses
"""
IN_AND_OUT = """
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
STEP = """step {
  model_name: "%s" model_version: -1 input_map { key: "IN" value: "%s" } output_map { key: "OUT" value: "%s" }
}
"""
INSTANCES = ["--instances", "1,2", "--concurrency", "4", "-p", "2000", "-r", "1", "--rounds", "0", "--min-gain", "10"]


def sleepers(repository: Path, **seconds: float) -> Path:
    """Models that take so long for a request, one after the other."""
    for name, value in seconds.items():
        python(repository, name, SLEEPER.format(seconds=value), IN_AND_OUT)
    return repository


def tuned(repository: Path, output: Path, *words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The only group of the report."""
    line = ["tune", *words, "--model-repository", str(repository), "--output", str(output), "--json", *INSTANCES]
    code = cli.main(line)
    said = capsys.readouterr()
    assert code == 0, said.err
    (group,) = json.loads(said.out)["groups"]
    assert not [trial for trial in group["trials"] if trial["observation"]["failed"]], said.err
    return dict(group)


def counts(server: Any, *models: str) -> list[int]:
    configs = [json.loads(server.get(f"/v2/models/{model}/config")[1]) for model in models]
    return [config["instance_group"][0]["count"] for config in configs]


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


@pytest.mark.long
def test_two_models_are_tuned_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], serve: Callable[..., Any]
) -> None:
    repository, output = sleepers(tmp_path / "models", left=0.1, right=0.08), tmp_path / "out"
    words = ["left", "right", "--together", "--max-configurations", "3"]
    group = tuned(repository, output, *words, capsys=capsys)
    assert group["changed"] == dict.fromkeys(("left", "right"), "instances from 1 to 2")
    for trial in group["trials"]:  # each model has its own load and its own figures
        levels = {name: found for name, (found,) in trial["observation"]["targets"].items()}
        assert set(levels) == {"left", "right"}
        for name, level in levels.items():
            instances = int(trial["settings"][f"{name} instances"])
            assert 0 < level["rate"] <= instances / {"left": 0.1, "right": 0.08}[name] * 2
            assert level["server"][name]["executions"] > 0
    front = [trial for trial in group["trials"] if trial["name"] in group["front"]]
    assert group["winner"] in [trial["name"] for trial in front]

    page = (output / "report.html").read_text()
    for title in ("Latency over throughput", "left: latency over throughput", "right: latency over throughput"):
        assert f"<h2>{title}</h2><svg" in page
    for heading in ("left infer/s", "left p99 ms", "right infer/s", "right p99 ms"):
        assert f"<th>{heading}</th>" in page
    with (output / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["Model"] for row in rows] == ["left", "right"] * len(group["trials"])
    assert {row["Model"]: row["Front"] for row in rows if row["Winner"] == "1"} == {"left": "1", "right": "1"}

    for name in ("left", "right"):
        shutil.copy(output / name / "config.pbtxt", repository / name / "config.pbtxt")
    server = serve(repository)
    assert counts(server, "left", "right") == [2, 2]
    for name in ("left", "right"):
        found = infer(server, name, IN=np.zeros(4, np.float32)).as_numpy("OUT")
        assert found.tolist() == [1, 1, 1, 1]


@pytest.mark.long
def test_the_steps_of_an_ensemble_are_tuned_under_its_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], serve: Callable[..., Any]
) -> None:
    repository, output = sleepers(tmp_path / "models", first=0.1, second=0.005), tmp_path / "out"
    steps = STEP % ("first", "IN", "between") + STEP % ("second", "between", "OUT")
    (repository / "whole" / "1").mkdir(parents=True)
    config = f'platform: "ensemble"\n{IN_AND_OUT}\nensemble_scheduling {{ {steps} }}\n'
    put(repository / "whole" / "config.pbtxt", config)
    group = tuned(repository, output, "whole", "--max-configurations", "2", capsys=capsys)
    assert (group["models"], group["tuned"]) == (["whole"], ["first", "second"])
    assert group["changed"] == {"first": "instances from 1 to 2"}
    for trial in group["trials"]:
        (level,) = trial["observation"]["targets"]["whole"]
        assert set(level["server"]) == {"whole", "first", "second"}
        assert level["server"]["first"]["requests"] > 0 < level["server"]["second"]["requests"]
    page = (output / "report.html").read_text()
    assert "<h2>Latency over throughput</h2><svg" in page
    for name in ("first", "second"):
        assert f"<h2>{name}/config.pbtxt</h2>" in page

    assert sorted(path.name for path in output.iterdir() if path.is_dir()) == ["first", "second"]
    for name in ("first", "second"):
        shutil.copy(output / name / "config.pbtxt", repository / name / "config.pbtxt")
    server = serve(repository)
    assert counts(server, "first", "second") == [2, 1]
    assert infer(server, "whole", IN=np.zeros(4, np.float32)).as_numpy("OUT").tolist() == [2, 2, 2, 2]
