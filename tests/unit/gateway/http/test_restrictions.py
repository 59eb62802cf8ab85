from __future__ import annotations

import pytest

from charonia.errors import InvalidArgument, StartupError
from gateway.http.errors import HttpRefusal
from gateway.http.restrictions import HeaderForwarding, Restrictions


def test_a_group_needs_its_key_and_others_do_not() -> None:
    restrictions = Restrictions(((("inference", "logging"), "Admin-Key", "secret"),))
    restrictions.check("metadata", [])
    restrictions.check("inference", [(b"admin-key", b"secret")])
    for headers in ([], [(b"admin-key", b"secre")], [(b"other", b"secret")]):
        with pytest.raises(HttpRefusal) as caught:
            restrictions.check("logging", headers)
        assert caught.value.status == 403
        assert caught.value.message == "This API is restricted, expecting header 'Admin-Key'"


def test_a_group_may_be_listed_once() -> None:
    with pytest.raises(StartupError, match="api 'health' can not be specified in multiple config groups"):
        Restrictions(((("health",), "a", "b"), (("metadata", "health"), "c", "d")))
    with pytest.raises(StartupError, match="unknown restricted api 'everything'"):
        Restrictions(((("everything",), "a", "b"),))


@pytest.mark.parametrize(
    ("pattern", "name", "forwarded"),
    [
        ("my_.*", b"my_header", True),
        ("my_.*", b"MY_Header", True),
        ("(?-i)my_.*", b"MY_Header", False),
        ("(?-i)my_.*", b"my_Header", True),
        ("header", b"my_header", False),
        ("", b"anything", False),
        (".*", b"x" * 300, False),
    ],
)
def test_whole_names_are_matched(pattern: str, name: bytes, forwarded: bool) -> None:
    parameters: dict[str, str | int | bool | float] = {}
    HeaderForwarding(pattern).forward([(name, b"v\xe9")], parameters)
    assert parameters == ({name.decode(): "vé"} if forwarded else {})


@pytest.mark.parametrize("name", ["sequence_id", "timeout", "headers", "binary_data_output", "triton_x"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        HeaderForwarding(".*").forward([(name.encode(), b"")], {})
    assert caught.value.message == f"Header '{name}' is reserved for Triton usage and cannot be forwarded."


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(StartupError, match="--http-header-forward-pattern"):
        HeaderForwarding("(")
