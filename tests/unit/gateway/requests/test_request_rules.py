from __future__ import annotations

import pytest

from charonia.errors import InvalidArgument
from charonia.wire import MAX_CLIENT_ID_BYTES
from gateway.requests.request_rules import MAX_DIMENSIONS, check_dimensions, check_parameter_name, check_request_id


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
