"""Syntax of `config.pbtxt`."""

from __future__ import annotations

import pytest
from google.protobuf.text_format import MessageToString

from executors.configuration.config import StructureError
from executors.repository.pbtxt import parse


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
