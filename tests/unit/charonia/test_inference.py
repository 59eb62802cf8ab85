"""Versions as clients write them (E6), and the outputs that they ask for."""

from __future__ import annotations

import pytest

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.inference import LATEST_VERSION, parse_version, wanted_outputs
from charonia.tensors import Tensor


@pytest.mark.parametrize(
    ("text", "version"),
    [("", LATEST_VERSION), ("1", 1), ("0010", 10), ("0", 0), (" 1", 1), ("+1", 1), ("1.0", 1), ("1x", 1)],
)
def test_versions(text: str, version: int) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["x", ".1", "x1", "٣", " ", "- 1", "9" * 40])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_version(text)
    assert caught.value.message == (
        f"failed to get model version from specified version string '{text}' (details: stol), version should be "
        "an integral value > 0"
    )


@pytest.mark.parametrize("text", ["-1", "-2", "-2x"])
def test_what_is_no_version(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_version(text)
    assert caught.value.message == (
        f"invalid model version specified '{text}' , version should be an integral value > 0"
    )


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [((), "ab"), (("b", "a"), "ab"), (("b",), "b"), (("b", "b", "none"), "b")],
)
def test_wanted_outputs_come_in_the_models_order(wanted: tuple[str, ...], expected: str) -> None:
    outputs = [Tensor(name, DataType.INT8, (1,), b"0") for name in "ab"]
    assert "".join([tensor.name for tensor in wanted_outputs(outputs, wanted)]) == expected
