from __future__ import annotations

from urllib.parse import quote

import pytest

from charonia.errors import ErrorCode, NotFound, ResourceExhausted
from gateway.grpc.statuses import STATUS, details, refusal


def test_every_code_has_the_status_of_the_interface() -> None:
    assert {code.name: STATUS[code].value for code in ErrorCode} == {
        "UNKNOWN": 2, "INTERNAL": 13, "NOT_FOUND": 5, "INVALID_ARG": 3, "UNAVAILABLE": 14, "UNSUPPORTED": 12,
        "ALREADY_EXISTS": 6, "CANCELLED": 1, "RESOURCE_EXHAUSTED": 8, "DEADLINE_EXCEEDED": 4, "UNAUTHENTICATED": 16,
        "PERMISSION_DENIED": 7, "KEY_REUSED": 9,
    }  # fmt: skip


def test_a_refusal_that_is_over_soon_says_when() -> None:
    full = ResourceExhausted("full")
    full.retry_after_s = 3
    assert refusal(full) == (STATUS[ErrorCode.RESOURCE_EXHAUSTED], "full", (("retry-after-ms", "3000"),))
    assert refusal(NotFound("no")) == (STATUS[ErrorCode.NOT_FOUND], "no", ())


@pytest.mark.parametrize("message", ["", "short", "x" * 6144, "ü" * 1024, "line\nline"])
def test_a_message_that_fits_is_as_it_was(message: str) -> None:
    assert details(message) == message


@pytest.mark.parametrize("unit", ["x", "ü", "%", "\U0001f41a", "\n"])
def test_a_longer_one_is_cut_to_what_trailers_take(unit: str) -> None:
    cut = details(unit * 10_000)
    assert cut.endswith("...")
    assert 6000 < len(quote(cut, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")) <= 6147
    assert cut[:-3] == unit * (len(cut) - 3)
