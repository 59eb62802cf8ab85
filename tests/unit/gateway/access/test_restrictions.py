from __future__ import annotations

import pytest

from charonia.errors import InvalidArgument, StartupError, Unavailable
from gateway.access.restrictions import GROUPS, HeaderForwarding, Restrictions


def refusal(header: str) -> Unavailable:
    return Unavailable(f"needs '{header}'")


def test_a_group_needs_its_key_and_others_do_not() -> None:
    restrictions = Restrictions(((("inference", "logging"), "Admin-Key", "secret"),), refusal)
    restrictions.check("metadata", [])
    restrictions.check("inference", [(b"admin-key", b"secret")])
    for headers in ([], [(b"admin-key", b"secre")], [(b"other", b"secret")]):
        with pytest.raises(Unavailable) as caught:
            restrictions.check("logging", headers)
        assert caught.value.message == "needs 'Admin-Key'"


def test_a_prefix_belongs_to_the_name_and_to_the_text() -> None:
    restrictions = Restrictions(((GROUPS, "Key", "v"),), refusal, header_prefix="triton-grpc-protocol-")
    for group in GROUPS:
        restrictions.check(group, [(b"other", b""), (b"triton-grpc-protocol-key", b"v")])
        with pytest.raises(Unavailable, match="needs 'triton-grpc-protocol-Key'"):
            restrictions.check(group, [(b"key", b"v")])


def test_nothing_restricted_is_false() -> None:
    assert not Restrictions((), refusal).any
    assert Restrictions(((("health",), "a", "b"),), refusal).any


def test_a_group_may_be_listed_once() -> None:
    with pytest.raises(StartupError, match="restricted api 'health' can not be specified in multiple config groups"):
        Restrictions(((("health",), "a", "b"), (("metadata", "health"), "c", "d")), refusal)
    with pytest.raises(StartupError, match="unknown restricted api 'everything'"):
        Restrictions(((("everything",), "a", "b"),), refusal)
    with pytest.raises(StartupError, match="unknown restricted protocol 'everything'"):
        Restrictions(((("everything",), "a", "b"),), refusal, word="protocol")
    with pytest.raises(StartupError, match="header 'ключ' of a restricted api must be ASCII"):
        Restrictions(((("health",), "ключ", "b"),), refusal)


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
    HeaderForwarding(pattern, "--option").forward([(name, b"v\xe9")], parameters)
    assert parameters == ({name.decode(): "vé"} if forwarded else {})


@pytest.mark.parametrize("name", ["sequence_id", "timeout", "headers", "binary_data_output", "triton_x"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        HeaderForwarding(".*", "--option").forward([(name.encode(), b"")], {})
    assert caught.value.message == f"Header '{name}' is reserved for Triton usage and cannot be forwarded."


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(StartupError, match=r"invalid --option '\(\?-i\)\('"):
        HeaderForwarding("(?-i)(", "--option")
