"""What of a configuration can be tuned, with which values, and how they are put into it."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from charonia.errors import InvalidArgument
from charonia.tuner.knobs import KNOBS, Circumstances, applied, config_of, dimensions, identity, parsed_values
from protos.model_config_pb2 import ModelConfig

AROUND = Circumstances(cores=4, in_flight=16, batch=1)
WRITTEN = 'name: "m" backend: "onnxruntime" max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 700 }'


def completed(text: str = WRITTEN, instances: int = 1) -> ModelConfig:
    config = config_of(text, "m")
    config.instance_group.add(count=instances, kind="KIND_CPU")
    return config


def by_knob(config: ModelConfig, wanted: dict[str, list[str]] | None = None) -> dict[str, tuple[tuple[str, ...], str]]:
    found, _ = dimensions("m", config, wanted or {}, AROUND)
    return {dimension.knob: (dimension.values, dimension.values[dimension.start]) for dimension in found}


def test_defaults_and_the_written_values() -> None:
    assert by_knob(completed(instances=3)) == {
        "instances": (("1", "2", "3", "4"), "3"),
        "threads": (("auto", "1", "2", "4"), "auto"),
        "max-batch": (("1", "2", "4", "8", "16"), "8"),
        "delay-us": (("0", "500", "700", "1000", "2000", "5000", "10000"), "700"),
        "preferred": (("max", "half"), "max"),
    }


def test_wanted_values_and_the_written_one() -> None:
    wanted = {"instances": ["4"], "max-batch": ["keep"], "delay-us": ["0"], "preferred": ["2+4"], "cache": ["on"]}
    found = by_knob(completed(), {**wanted, "threads": ["2", "auto"]})
    assert found == {
        "instances": (("1", "4"), "1"), "threads": (("auto", "2"), "auto"), "delay-us": (("0", "700"), "700"),
        "preferred": (("2+4", "max"), "max"), "cache": (("on", "off"), "off"),
    }  # fmt: skip


def test_knobs_that_a_model_has_not_are_said() -> None:
    config = config_of('backend: "python" sequence_batching { } model_transaction_policy { decoupled: true }', "m")
    found, notes = dimensions("m", config, {knob: parsed_values(knob, word) for knob, word in {
        "instances": "2", "threads": "2", "max-batch": "4", "delay-us": "0", "preferred": "max", "cache": "on",
    }.items()}, AROUND)  # fmt: skip
    assert not found
    assert len(notes) == len(KNOBS)
    assert "no parameter of the backend 'python'" in notes[1]


def test_a_value_changes_its_own_field_only() -> None:
    written = config_of(WRITTEN + ' parameters { key: "x" value { string_value: "y" } }', "m")
    loaded = completed()
    same = {"instances": "1", "threads": "auto", "max-batch": "8", "delay-us": "700", "preferred": "max"}
    assert identity(applied(written, loaded, same)) == identity(written)
    made = applied(written, loaded, {**same, "instances": "2", "threads": "3", "max-batch": "4", "preferred": "half"})
    assert (made.instance_group[0].count, made.instance_group[0].kind) == (2, loaded.instance_group[0].kind)
    assert made.parameters["intra_op_thread_count"].string_value == "3"
    assert made.parameters["x"].string_value == "y"
    assert list(made.dynamic_batching.preferred_batch_size) == [2, 4]
    assert made.dynamic_batching.max_queue_delay_microseconds == 700
    assert applied(written, loaded, {"cache": "on"}).response_cache.enable
    assert text_format.Parse(text_format.MessageToString(made), ModelConfig()) == made


def test_openvino_has_a_parameter_of_its_own() -> None:
    config = completed(WRITTEN.replace("onnxruntime", "openvino"))
    assert applied(config, config, {"threads": "2"}).parameters["INFERENCE_NUM_THREADS"].string_value == "2"
    with_threads = applied(config, config, {"threads": "2"})
    assert not applied(with_threads, with_threads, {"threads": "auto"}).parameters


def test_values_that_mean_the_same_are_the_same_configuration() -> None:
    loaded = completed()
    for one, other in (("max", "8"), ("2+16", "2"), ("1", "max")):
        made = [applied(loaded, loaded, {"preferred": value}) for value in (one, other)]
        assert identity(made[0]) == identity(made[1])
    off = completed('name: "m" max_batch_size: 8')
    made = [applied(off, off, {"delay-us": "off", "preferred": value}) for value in ("max", "half")]
    assert identity(made[0]) == identity(made[1])
    assert applied(off, off, {"delay-us": "5"}).dynamic_batching.max_queue_delay_microseconds == 5


@pytest.mark.parametrize(("knob", "text"), [
    ("instances", "0"), ("instances", "1,two"), ("threads", "-1"), ("max-batch", "0"), ("delay-us", "1.5"),
    ("preferred", "4+"), ("cache", "yes"), ("instances", ""), ("instances", "keep,2"),
])  # fmt: skip
def test_values_that_a_knob_cannot_have_are_refused(knob: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"--{knob}"):
        parsed_values(knob, text)


def test_keep_in_a_list_is_refused_in_words() -> None:
    with pytest.raises(InvalidArgument, match="'keep' stands alone"):
        parsed_values("max-batch", "2,8,keep")


def test_values_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="less than the batch of a request, 4"):
        dimensions("m", completed(), {"max-batch": ["2"]}, Circumstances(2, 8, 4))
    with pytest.raises(InvalidArgument, match="'off' of --delay-us"):
        dimensions("m", completed(), {"delay-us": ["off"]}, AROUND)
    for text in ("max_batch: 3", "input { data_type: 99999999999 }"):
        with pytest.raises(InvalidArgument, match="cannot be read"):
            config_of(text, "m")
