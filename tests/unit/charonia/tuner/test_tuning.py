"""The run around the search: what is measured, kept, resumed, confirmed and written. Measurements are made up here;
`tests/e2e/test_tuner.py` makes real ones."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from charonia.errors import InvalidArgument, NotFound, Unavailable
from charonia.tuner import tuning
from charonia.tuner.knobs import config_of
from charonia.tuner.trial_server import ModelCopies
from charonia.tuner.tune_options import TuneOptions
from protos.model_config_pb2 import ModelConfig

CONFIG = '# of its user\nname: "{name}"\nbackend: "onnxruntime"\nmax_batch_size: 4\ndynamic_batching {{ }}\n'
ENSEMBLE = (
    'name: "whole" platform: "ensemble" ensemble_scheduling { step { model_name: "a" } step { model_name: "b" } }'
)


class Machine:
    """Makes up observations: the rate is the sum over models of what `rate` says of their configurations."""

    def __init__(self, rate: Callable[[ModelConfig], float]) -> None:
        self.rate, self.configs, self.targets = rate, list[dict[str, str]](), list[tuple[str, ...]]()
        self.interrupt_at, self.starts, self.opened = 0, 0, 0

    def measure(
        self, options: TuneOptions, _copies: ModelCopies, targets: Sequence[str], _loaded: Sequence[str],
        configs: Mapping[str, str],
    ) -> dict[str, Any]:  # fmt: skip
        if len(self.configs) + 1 == self.interrupt_at:
            raise KeyboardInterrupt
        self.configs.append(dict(configs))
        self.targets.append(tuple(targets))
        rate = sum(self.rate(config_of(text, name)) for name, text in configs.items())
        server = {
            "inferences": 10,
            "executions": 5,
            "requests": 10,
            "queue_us": 1,
            "compute_infer_us": 2,
            "cache_hits": 0,
        }
        level = {
            "level": options.levels[0], "rate": rate, "requests": 10, "stable": True, "errors": {},
            "latency_us": dict.fromkeys(("mean", "judged", "p50", "p90", "p95", "p99"), 1e6 / rate),
        }  # fmt: skip
        found = {target: [{**level, "server": {target: server}}] for target in targets}
        failed = "" if rate > 0.5 else "the server ended with 1"
        return {
            "targets": {} if failed else found,
            "memory": {} if failed else {"bytes": 1 << 20, "processes": {"serve": 1 << 20}},
            "failed": failed, "began": "", "seconds": 1.0, "load_average": [0, 0],
        }  # fmt: skip

    @contextmanager
    def running(self, *words: Any) -> Iterator[Callable[[], dict[str, Any]]]:
        self.opened += 1
        yield lambda: self.measure(*words)

    def loaded(self, _options: TuneOptions, copies: ModelCopies, models: Sequence[str]) -> dict[str, ModelConfig]:
        self.starts += 1
        found = {}
        for model in models:
            found[model] = copies.written(model)
            found[model].instance_group.add(count=1, kind="KIND_CPU")
        return found


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    for name in ("a", "b"):
        (models / name / "1").mkdir(parents=True)
        (models / name / "1" / "model.onnx").write_bytes(name.encode())
        (models / name / "config.pbtxt").write_text(CONFIG.format(name=name))
    (models / "whole" / "1").mkdir(parents=True)
    (models / "whole" / "config.pbtxt").write_text(ENSEMBLE)
    return models


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(lambda config: 10 * (config.instance_group[0].count if config.instance_group else 1))
    monkeypatch.setattr(tuning, "measure", made.measure)
    monkeypatch.setattr(tuning, "running", made.running)
    monkeypatch.setattr(tuning, "loaded_configs", made.loaded)
    return made


KEPT = ["--threads", "keep", "--max-batch", "keep", "--delay-us", "keep"]
KNOBS = ["--instances", "1,2,3", "--preferred", "max,half", *KEPT]


def tune(repository: Path, *names: str, words: Sequence[str] = KNOBS) -> int:
    places = ["--model-repository", str(repository), "--output", str(repository.parent / "out")]
    return tuning.run(["tune", *names, *words, *places], {})


def report(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repository.parent / "out" / "report.json").read_text())
    return found


def test_the_winner_is_found_confirmed_and_written(
    repository: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (repository / "a" / "config.pbtxt").read_text()
    assert tune(repository, "a", "--rounds", "2", "--write") == 0
    (group,) = report(repository)["groups"]
    settings = {trial["name"]: trial["settings"] for trial in group["trials"]}
    assert settings[group["winner"]] == {"a instances": "3", "a preferred": "max"}
    assert len(settings) == 4
    assert len(machine.configs) == 4 + 2 * 3
    first = [list(turn) for turn in group["turns"]]
    assert first[0] == list(reversed(first[1]))  # none is always the first
    output = repository.parent / "out"
    for place in (output / "a", repository / "a"):
        text = (place / "config.pbtxt").read_text()
        assert "instances from 1 to 3" in text
        assert config_of(text, "a").instance_group[0].count == 3
    assert (repository / "a" / "config.pbtxt~").read_text() == before
    said = capsys.readouterr()
    assert "Rate +200 %" in said.out
    assert "[1; 2 more planned, about" in said.err
    assert "few requests" in said.out
    rows = list(csv.DictReader(io.StringIO((output / "report.csv").read_text())))
    assert [(row["a instances"], row["Winner"]) for row in rows][:3] == [("1", "0"), ("2", "0"), ("3", "1")]
    page = (output / "report.html").read_text()
    assert page.count("<svg") >= 4
    assert "Why this configuration" in page
    assert "<script" not in page


def test_a_second_run_measures_nothing_again(repository: Path, machine: Machine) -> None:
    assert tune(repository, "a", "--rounds", "1") == 0
    before, number = report(repository), len(machine.configs)
    assert tune(repository, "a", "--rounds", "1") == 0
    assert (len(machine.configs), machine.starts) == (number, 1)
    assert report(repository)["groups"] == before["groups"]
    # another search uses what is there, another load does not, nor does --fresh
    assert tune(repository, "a", "--rounds", "0", "--search", "brute") == 0
    assert len(machine.configs) == number + 2
    assert tune(repository, "a", "--rounds", "0", "-b", "2") == 0
    assert len(machine.configs) == number + 2 + 4
    assert tune(repository, "a", "--rounds", "0", "--fresh") == 0
    assert len(machine.configs) == number + 2 + 4 + 4


@pytest.mark.parametrize(("at", "number"), [(2, 4 + 3), (3, 4 + 3), (6, 4 + 1 + 3)])
def test_an_interrupted_run_goes_on(repository: Path, machine: Machine, at: int, number: int) -> None:
    machine.interrupt_at = at
    with pytest.raises(KeyboardInterrupt):
        tune(repository, "a", "--rounds", "1")
    assert report(repository)["groups"][0]["interrupted"]
    assert not (repository.parent / "out" / "a").exists()
    machine.interrupt_at = 0
    assert tune(repository, "a", "--rounds", "1") == 0
    assert len(machine.configs) == number  # a round that was begun is measured again as a whole
    assert not report(repository)["groups"][0]["interrupted"]


def test_brute_search_and_a_bound(repository: Path, machine: Machine) -> None:
    assert tune(repository, "a", "--search", "brute", "--rounds", "0") == 0
    assert len({json.dumps(config) for config in machine.configs}) == len(machine.configs) == 6
    machine.configs.clear()
    assert tune(repository, "b", "--max-configurations", "2", "--rounds", "0") == 0
    assert len(machine.configs) == 2
    assert report(repository)["groups"][0]["winner"]


def test_models_one_after_the_other_and_together(repository: Path, machine: Machine) -> None:
    assert tune(repository, "a", "b", "--rounds", "0") == 0
    assert [group["models"] for group in report(repository)["groups"]] == [["a"], ["b"]]
    assert set(machine.targets) == {("a",), ("b",)}
    assert tune(repository, "a", "b", "--rounds", "0", "--together") == 0
    (group,) = report(repository)["groups"]
    assert machine.targets[-1] == ("a", "b")
    winner = next(trial for trial in group["trials"] if trial["name"] == group["winner"])
    assert (winner["settings"]["a instances"], winner["settings"]["b instances"]) == ("3", "3")
    page = (repository.parent / "out" / "report.html").read_text()
    for model in ("a", "b"):
        assert f"<h2>{model}: latency over throughput</h2><svg" in page
        assert f"<th>{model} infer/s</th><th>{model} p99 ms</th>" in page


def test_of_an_ensemble_its_steps_are_tuned(repository: Path, machine: Machine) -> None:
    assert tune(repository, "whole", "--rounds", "0") == 0
    (group,) = report(repository)["groups"]
    assert (group["models"], group["tuned"]) == (["whole"], ["a", "b"])
    assert set(machine.targets) == {("whole",)}
    assert set(group["changed"]) == {"a", "b"}


def test_what_fails_or_is_beyond_a_limit_does_not_win(repository: Path, machine: Machine) -> None:
    machine.rate = lambda config: {1: 10, 2: 20, 3: 0.1}[config.instance_group[0].count if config.instance_group else 1]
    assert tune(repository, "a", "--rounds", "1") == 0
    (group,) = report(repository)["groups"]
    assert group["changed"] == {"a": "instances from 1 to 2"}
    assert "the server ended with 1" in (repository.parent / "out" / "report.html").read_text()
    assert tune(repository, "a", "--rounds", "1", "--latency-limit", "80") == 0
    (group,) = report(repository)["groups"]
    why = "The configuration as written cannot stay: it is beyond a limit, at 125 % of it."
    assert group["reasons"][:2] == ["Changed: instances from 1 to 2.", why]
    assert tune(repository, "a", "--rounds", "1", "--latency-limit", "1") == 1
    (group,) = report(repository)["groups"]
    assert (group["winner"], group["configs"]) == ("", {})
    assert group["reasons"] == ["No measured configuration keeps to the limits."]


def test_a_configuration_that_was_lucky_once_does_not_win(repository: Path, machine: Machine) -> None:
    seen: list[int] = []

    def rate(config: ModelConfig) -> float:
        seen.append(1)
        return 30 if config.instance_group and len(seen) <= 4 else 10

    machine.rate = rate
    before = (repository / "a" / "config.pbtxt").read_text()
    assert tune(repository, "a", "--write") == 0
    (group,) = report(repository)["groups"]
    assert group["winner"] == group["base"]
    assert "Measured in turns, none" in group["reasons"][0]
    assert (repository.parent / "out" / "a" / "config.pbtxt").read_text() == before
    assert not (repository / "a" / "config.pbtxt~").exists()


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_written_one_that_fails_in_turns_stays_and_gets_another_server(
    repository: Path, machine: Machine, lost: int
) -> None:
    good, seen = machine.rate, list[int]()

    def rate(config: ModelConfig) -> float:
        if config.instance_group:
            return good(config)
        seen.append(1)  # its trial is the first
        return 0.1 if 1 < len(seen) <= 1 + lost else good(config)

    machine.rate = rate
    before = (repository / "a" / "config.pbtxt").read_text()
    assert tune(repository, "a", "--write") == 0
    (group,) = report(repository)["groups"]
    assert group["winner"] == group["base"]
    assert group["reasons"] == [
        f"The configuration as written stays: it kept to the limits alone, and failed in {lost} "
        "of 3 rounds of the turns. The same command measures these rounds again."
    ]
    assert (repository / "a" / "config.pbtxt").read_text() == before
    assert machine.opened == 3 + min(lost, 2)  # after the last turn there is no next one
    assert tune(repository, "a") == 0  # the rounds that failed are measured again
    assert report(repository)["groups"][0]["changed"] == {"a": "instances from 1 to 3"}


def test_what_failed_is_measured_again(repository: Path, machine: Machine) -> None:
    good, machine.rate = machine.rate, lambda _: 0.1
    assert tune(repository, "a", "--rounds", "0") == 1
    assert report(repository)["groups"][0]["reasons"] == [
        "Every measured configuration failed; as written: the server ended with 1"
    ]
    failed = len(machine.configs)
    machine.rate = good
    assert tune(repository, "a", "--rounds", "0") == 0
    assert len(machine.configs) == failed + 4


def test_options_that_cannot_be_are_wrong_usage(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(repository, "a", words=["--instances", "1,keep"]) == 2
    assert capsys.readouterr().err.startswith("charonia tune: --instances '1,keep': 'keep' stands alone.")


def test_without_space_for_turns_there_is_a_report(
    repository: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuning, "running", full)
    assert tune(repository, "a") == 0
    (group,) = report(repository)["groups"]
    assert group["turns"] == []
    assert "No space left" in group["notes"][-1]
    assert group["changed"] == {"a": "instances from 1 to 3"}


def test_what_makes_a_run_impossible_is_said(
    repository: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFound, match="model 'c' is in none"):
        tune(repository, "c")
    with pytest.raises(InvalidArgument, match="no name of a model"):
        tune(repository, "../models/a")
    with pytest.raises(InvalidArgument, match="nothing to tune"):
        tune(repository, "a", words=["--instances", "keep", "--preferred", "keep", *KEPT])
    (repository / "b" / "config.pbtxt").write_text("what: is this")
    with pytest.raises(InvalidArgument, match=r"config\.pbtxt of 'b' cannot be read"):
        tune(repository, "b")

    def refused(*_: Any) -> Any:
        raise Unavailable("as they are written the models do not load: no")

    monkeypatch.setattr(tuning, "loaded_configs", refused)
    with pytest.raises(Unavailable):
        tune(repository, "a", "--fresh")
    assert not machine.configs
