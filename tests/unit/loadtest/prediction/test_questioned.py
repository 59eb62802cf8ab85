"""What a question changes of a configuration, of options and of arrivals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from charonia.simulation.what_if import what_if
from loadtest.model import LoadTestError
from loadtest.prediction.__main__ import QUESTIONS
from loadtest.prediction.questioned import MODELS, arrivals_us, faster, question, write_model
from protos.model_config_pb2 import ModelConfig


def changed(text: str, before: str = "") -> Any:
    config: Any = text_format.Parse(before, ModelConfig())
    question(text).change(config)
    return config


def test_the_usual_questions_are_those_of_simulate() -> None:
    for text in QUESTIONS:
        assert what_if(text).text == question(text).text


def test_a_configuration_is_changed() -> None:
    config = changed("instances=+1 delay=500us max-batch=4 preferred=2,4", "instance_group { count: 2 }")
    assert config.instance_group[0].count == 3
    assert config.max_batch_size == 4
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    assert list(config.dynamic_batching.preferred_batch_size) == [2, 4]
    assert changed("instances=2").instance_group[0].count == 2
    assert not changed("rate=x3 executors=+2").ListFields()


def test_executors_are_an_option_and_the_rate_a_factor() -> None:
    asked = question("rate=x1.5 executors=+2")
    assert (asked.flags, asked.rate) == (("--executors=3",), 1.5)
    assert question("executors=2").flags == ("--executors=2",)


@pytest.mark.parametrize("text", ["policy=none", "rate", "delay=soon", "instances=many", "rate=xx"])
def test_what_cannot_be_measured_is_refused(text: str) -> None:
    with pytest.raises(LoadTestError, match="cannot be measured"):
        question(text)


def test_cores_are_told_with_something_else_that_changes() -> None:
    assert question("executors=+2 cores=2").flags == ("--executors=3",)
    with pytest.raises(LoadTestError, match="changes nothing"):
        question("cores=2")


def test_a_faster_pattern_keeps_its_end() -> None:
    intervals = arrivals_us(1000, 200.0, 3)
    assert intervals == arrivals_us(1000, 200.0, 3)
    assert sum(intervals) == pytest.approx(5e6, rel=0.2)
    assert sum(faster(intervals, 3)) == round(sum(intervals) / 3)
    assert min(faster(intervals, 3)) >= 0


def test_models_of_here_and_of_a_folder_are_written(tmp_path: Path) -> None:
    for name in MODELS:
        assert write_model(tmp_path / "first", name, question("delay=5ms")) == name
        compile((tmp_path / "first" / name / "1" / "model.py").read_text(), name, "exec")
    again = tmp_path / "first" / "device"
    assert write_model(tmp_path / "second", str(again), question("instances=2")) == "device"
    config: Any = text_format.Parse((tmp_path / "second" / "device" / "config.pbtxt").read_text(), ModelConfig())
    assert config.dynamic_batching.max_queue_delay_microseconds == 5000
    assert [group.count for group in config.instance_group] == [2]
    with pytest.raises(LoadTestError, match="nor a model's folder"):
        write_model(tmp_path / "third", str(tmp_path / "nothing"), question("instances=2"))
