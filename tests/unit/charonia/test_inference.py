"""Versions as clients write them (E6), the outputs that they ask for, and what holds for any request."""

from __future__ import annotations

import pytest

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.inference import (
    LATEST_VERSION,
    MAX_CLIENT_ID_BYTES,
    MAX_DIMENSIONS,
    check_dimensions,
    check_parameter_name,
    check_request_id,
    earlier,
    parse_version,
    wanted_outputs,
)
from charonia.tensors import Tensor


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("", LATEST_VERSION),
        ("1", 1),
        ("0010", 10),
        ("0", 0),
        (" 1", 1),
        ("+1", 1),
        ("1.0", 1),
        ("1x", 1),
        ("9223372036854775807", 2**63 - 1),
        ("+" + "0" * 5000 + "7", 7),
    ],
)
def test_versions(text: str, version: int) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    "text", ["x", ".1", "x1", "٣", " ", "- 1", "9223372036854775808", "-9223372036854775809", "9" * 40]
)
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_version(text)
    assert caught.value.message == (
        f"failed to get model version from specified version string '{text}' (details: stol), version should be "
        "an integral value > 0"
    )


@pytest.mark.parametrize("text", ["-1", "-2", "-2x", "-9223372036854775808"])
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


def test_the_earlier_deadline_counts() -> None:
    assert (earlier(0, 0), earlier(0, 5), earlier(5, 0), earlier(4, 5)) == (0, 5, 5, 4)


def test_ids_are_measured_in_bytes() -> None:
    check_request_id("")
    check_request_id("x" * MAX_CLIENT_ID_BYTES)
    check_request_id("\U0001f41a" * (MAX_CLIENT_ID_BYTES // 4))
    for text, size in (
        ("x" * (MAX_CLIENT_ID_BYTES + 1), MAX_CLIENT_ID_BYTES + 1),
        ("\U0001f41a" * (MAX_CLIENT_ID_BYTES // 4 + 1), MAX_CLIENT_ID_BYTES // 4 * 4 + 4),
    ):
        with pytest.raises(InvalidArgument) as caught:
            check_request_id(text)
        expected = f"request id of {size} bytes exceeds the maximum of {MAX_CLIENT_ID_BYTES} bytes"
        assert caught.value.message == expected


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "triton_x",
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
        ("charonia_x", "unknown parameter 'charonia_x': names starting with 'charonia_' are reserved"),
    ],
)
def test_reserved_parameters(key: str, message: str) -> None:
    check_parameter_name("Triton_x")
    check_parameter_name("headers")
    with pytest.raises(InvalidArgument) as caught:
        check_parameter_name(key)
    assert caught.value.message == message


def test_dimensions() -> None:
    check_dimensions("I", MAX_DIMENSIONS)
    with pytest.raises(InvalidArgument, match="invalid shape for input 'I': 65 dimensions, at most 64 are supported"):
        check_dimensions("I", MAX_DIMENSIONS + 1)
