"""What a check says of errors that no row explains."""

from __future__ import annotations

import pytest

from executors.checking.explanations import explain

TEXT = 'parameters { key: "charonia.max_execution_s" value { string_value: "soon" } }'


@pytest.mark.parametrize(
    ("problem", "expected", "instead"),
    [
        (
            "'charonia.max_execution_s' must be a number of at least 0, got 'soon'",
            "a number of at least 0",
            "such a value",
        ),
        (
            "'charonia.max_execution_s' is refused",
            'a value of parameters["charonia.max_execution_s"] that can be loaded',
            "what the message asks for",
        ),
        ("onnx runtime error: 7 : INVALID_PROTOBUF", "a model that can be loaded", "what the message asks for"),
    ],
)
def test_an_error_without_a_row_is_explained_by_its_text(problem: str, expected: str, instead: str) -> None:
    found = explain(problem, TEXT)
    assert (found.expected, found.instead) == (expected, instead)


def test_a_strategy_that_is_missing_is_explained_at_its_parameter() -> None:
    """Its text names the entry points' group, which looks like a parameter."""
    problem = (
        "there is no batch strategy 'by_length': shipped is 'volume', others are entry points of the group "
        "'charonia.batch_strategies'"
    )
    text = 'max_batch_size: 8\nparameters { key: "charonia.batch_strategy" value { string_value: "by_length" } }'
    found = explain(problem, text)
    assert (found.place.line, found.place.field) == (2, 'parameters["charonia.batch_strategy"]')
    assert found.expected == "a strategy that ships or whose package is installed"


def test_a_file_with_another_hash_is_explained_at_the_agent() -> None:
    problem = "Mismatched MD5 hash for file 1/model.onnx, expect: 2d27, got: 3aff"
    text = 'max_batch_size: 8\nmodel_repository_agents { agents { name: "checksum" } }'
    found = explain(problem, text)
    assert (found.place.line, found.place.field) == (2, "model_repository_agents")
    assert (found.expected, found.instead) == (
        "1/model.onnx with the hash that is written",
        'value: "3aff", if this is the right file',
    )
