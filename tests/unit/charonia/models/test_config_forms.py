"""Syntax of `config.pbtxt`, and the JSON of a configuration as clients see and send it (H6, C60, C61)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from google.protobuf.text_format import MessageToString

from charonia.models.config_forms import parse
from executors.configuration.config import StructureError, from_json, to_json


def test_enums_are_words_and_wide_integers_numbers() -> None:
    config = parse(
        "name: 'm' input { name: 'x' data_type: TYPE_STRING dims: [-1, 9007199254740993] }"
        "dynamic_batching { max_queue_delay_microseconds: 18446744073709551615"
        " priority_queue_policy { key: 18446744073709551615 value { } } }"
    )
    document = json.loads(json.dumps(to_json(config)))
    assert document["input"][0]["data_type"] == "TYPE_STRING"
    assert document["input"][0]["dims"] == [-1, 9007199254740993]
    assert document["dynamic_batching"]["max_queue_delay_microseconds"] == 18446744073709551615
    assert list(document["dynamic_batching"]["priority_queue_policy"]) == ["18446744073709551615"]


def test_every_scalar_default_is_printed_and_unset_messages_are_not() -> None:
    document = to_json(parse("dynamic_batching { }"))
    assert document["dynamic_batching"] == {
        "preferred_batch_size": [],
        "max_queue_delay_microseconds": 0,
        "preserve_ordering": False,
        "priority_levels": 0,
        "default_priority_level": 0,
        "priority_queue_policy": {},
    }
    assert document["metric_tags"] == {}
    assert document["runtime"] == ""
    assert not {"sequence_batching", "optimization", "version_policy", "response_cache"} & set(document)


def test_keys_follow_the_order_of_the_published_message() -> None:
    assert list(to_json(parse("version_policy { all { } }")))[:8] == [
        "name", "platform", "backend", "runtime", "version_policy", "max_batch_size", "input", "output",
    ]  # fmt: skip


def test_members_of_a_choice_are_printed_only_when_set() -> None:
    config = parse("model_warmup { inputs { key: 'x' value { random_data: false } } }")
    assert to_json(config)["model_warmup"][0]["inputs"]["x"] == {
        "data_type": "TYPE_INVALID",
        "dims": [],
        "random_data": False,
    }


def test_whole_floats_are_printed_as_whole_numbers() -> None:
    config = parse(
        "sequence_batching { direct { } control_input { control { kind: CONTROL_SEQUENCE_READY "
        "fp32_false_true: [ 0, 1 ] } } }"
    )
    batching = to_json(config)["sequence_batching"]
    assert json.dumps(batching["direct"]["minimum_slot_utilization"]) == "0"
    assert json.dumps(batching["control_input"][0]["control"][0]["fp32_false_true"]) == "[0, 1]"


def test_narrow_floats_are_printed_short() -> None:
    document = to_json(parse("sequence_batching { direct { minimum_slot_utilization: 0.1 } }"))
    assert json.dumps(document["sequence_batching"]["direct"]["minimum_slot_utilization"]) == "0.1"


@pytest.mark.parametrize(
    "source",
    [
        '{"max_batch_size": "16", "input": [{"name": "x", "dims": ["3", -1]}]}',
        b'{"max_batch_size": 16, "input": [{"name": "x", "dims": [3, "-1"]}]}',
        {"max_batch_size": 16, "input": [{"name": "x", "dims": [3, -1]}]},
        {"maxBatchSize": 16.0, "input": [{"name": "x", "dims": [3, -1]}]},
    ],
)
def test_integers_may_be_strings(source: Any) -> None:
    assert from_json(source) == parse("max_batch_size: 16 input { name: 'x' dims: [3, -1] }")


@pytest.mark.parametrize(
    "source",
    [
        "{max_batch_size: 16, input: [{name: 'x', dims: [3, -1,],},],}",
        '{ "max_batch_size" : 16, input\n: [{"name": "x", "dims": [3, -1]}] }',
    ],
)
def test_what_protobufs_parser_takes_is_taken(source: str) -> None:
    assert from_json(source) == parse("max_batch_size: 16 input { name: 'x' dims: [3, -1] }")


def test_quoted_text_stays_as_it_is() -> None:
    read = from_json(r"""{name: 'it\'s "x", {a: 1,}\n', platform: "a: 'b',]"}""")
    assert (read.name, read.platform) == ('it\'s "x", {a: 1,}\n', "a: 'b',]")


@pytest.mark.parametrize(
    "text", ['{"' + '\\"' * 200_000, "{'" + "\\'" * 200_000 + "\\", "{" + "a" * 500_000, "," * 500_000]
)
def test_hostile_text_is_refused_in_linear_time(text: str) -> None:
    started = time.process_time()
    with pytest.raises(StructureError):
        from_json(text)
    assert time.process_time() - started < 5, "half a minute and more if every quote were tried"


@pytest.mark.parametrize(
    "source",
    [
        "",
        "{max_batch_size 16}",
        "{'max_batch_size: 16}",
        "{",
        "[]",
        "5",
        "null",
        b"\xff",
        "[" * 100_000,
        '{"unknown": 1}',
        r'{"input": [{"\ud800": 1}]}',
        '{"max_batch_size": "x"}',
        '{"max_batch_size": 1.5}',
        '{"max_batch_size": 99999999999}',
        '{"input": 5}',
        '{"input": [5]}',
        '{"input": [{"data_type": "TYPE_NOPE"}]}',
        '{"parameters": {"a": 5}}',
        '{"dynamic_batching": {}, "sequence_batching": {}}',
    ],
)
def test_what_cannot_be_read(source: Any) -> None:
    with pytest.raises(StructureError, match="the model configuration"):
        from_json(source)


def test_all_spellings_of_the_text_format() -> None:
    config = parse(
        """
        # a comment
        name: "m"
        input [ { name: 'x' data_type: TYPE_FP32 dims: [ 1, 2 ] }, < name: 'z' dims: 3 dims: 4 > ]
        parameters: { key: "k" value: { string_value: "v" } }
        """
    )
    assert [(item.name, list(item.dims)) for item in config.input] == [("x", [1, 2]), ("z", [3, 4])]
    assert config.parameters["k"].string_value == "v"


def test_nothing_is_an_empty_configuration() -> None:
    assert parse("") == parse("  # only a comment\n")


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ('name: "m"\n  nope: 1', '2:3 : Message type "inference.ModelConfig" has no field named "nope".'),
        ("max_batch_size: many", "1:17 : "),
        ("max_batch_size: 99999999999", "1:17 : "),
        ("input { data_type: 99999999999 }", "Value out of range: 99999999999"),
        ('name: "m', "1:7 : "),
        ("input { name: 'x'", "1:"),
        ("input { data_type: FP32 }", "1:20 : "),
        ("dynamic_batching { } sequence_batching { }", "1:"),
        ('name: "\ud800"', "1:7 : "),
    ],
)
def test_errors_say_where(text: str, beginning: str) -> None:
    with pytest.raises(StructureError) as caught:
        parse(text)
    assert caught.value.message.startswith(beginning)


def test_unparse_is_read_back() -> None:
    config = parse("name: 'm' max_batch_size: 3 dynamic_batching { preferred_batch_size: [1, 2] }")
    assert parse(MessageToString(config)) == config
