"""Where the fields of a configuration's text are."""

from __future__ import annotations

import pytest

from executors.checking.field_positions import Step, find, line_and_column, offset_of, read_fields

TEXT = """# a comment with { a brace
name: "m" max_batch_size: 4
input [
  { name: "a" data_type: TYPE_FP32 dims: [ 1, -1 ] },
  { name: 'b' "c" dims: 2 dims: 3 }
]
output < name: "o"; reshape { shape: [ ] } >
parameters { key: "charonia.x" value { string_value: "}" } }
"""


@pytest.mark.parametrize(
    ("path", "place", "dotted"),
    [
        (["name"], (2, 1), "name"),
        (["max_batch_size"], (2, 11), "max_batch_size"),
        (["input", ("name", "a"), "dims"], (4, 36), "input[0].dims"),
        (["input", ("name", "bc")], (5, 3), "input[1]"),
        (["input", 1, "dims"], (5, 19), "input[1].dims"),
        (["output", ("name", "o"), "reshape", "shape"], (7, 31), "output[0].reshape.shape"),
        (["parameters", ("key", "charonia.x"), "value"], (8, 32), 'parameters["charonia.x"].value'),
        (["input", ("name", "a"), "reshape"], (4, 3), "input[0].reshape"),
        (["input", ("name", "zz"), "dims"], (1, 1), 'input["zz"].dims'),
    ],
)
def test_a_path_leads_to_its_line(path: list[Step], place: tuple[int, int], dotted: str) -> None:
    node, words = find(read_fields(TEXT), path)
    assert (line_and_column(TEXT, node.start), words) == (place, dotted)


def test_values_keep_their_span() -> None:
    node, _ = find(read_fields(TEXT), ["input", ("name", "a"), "dims"])
    assert TEXT[node.value_start : node.value_end] == "[ 1, -1 ]"
    assert node.values == ["1", "-1"]


@pytest.mark.parametrize(
    "text", ["", "name", "input {", "input [ {", "x: }", "{{{{", 'name: "open', "a:" * 5000, "a{" * 5000]
)
def test_texts_that_cannot_be_read_give_what_came_before(text: str) -> None:
    root = read_fields("first: 1\n" + text)
    assert root.children[0].name == "first"


def test_offsets_are_the_reverse_of_lines() -> None:
    for offset in range(len(TEXT)):
        assert offset_of(TEXT, *line_and_column(TEXT, offset)) == offset
