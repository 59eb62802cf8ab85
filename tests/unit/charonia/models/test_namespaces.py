"""Which model a name means (R2)."""

from __future__ import annotations

import pytest

from charonia.errors import InvalidArgument
from charonia.models.names import Namespaces


def known(*keys: str) -> tuple[Namespaces, set[str]]:
    there = set(keys)
    namespaces = Namespaces(there.__contains__)
    for key in keys:
        namespaces.heard_of(key)
    return namespaces, there


def test_without_namespaces_a_name_is_a_key() -> None:
    namespaces, _ = known("m", "a::b")
    assert [namespaces.resolve(name) for name in ("m", "a::b", "unknown")] == ["m", "a::b", "unknown"]


def test_a_name_means_the_only_model_that_has_it() -> None:
    namespaces, _ = known("/a::m", "/b::n")
    assert namespaces.resolve("m") == "/a::m"
    assert namespaces.resolve("m", near="/b") == "/a::m"
    assert namespaces.resolve("/b::n") == "/b::n"
    assert namespaces.resolve("unknown") == "unknown"


def test_of_several_it_means_the_nearest_or_none() -> None:
    namespaces, there = known("/a::m", "/b::m")
    assert namespaces.resolve("m", near="/b") == "/b::m"
    for near in ("", "/c"):
        with pytest.raises(InvalidArgument) as raised:
            namespaces.resolve("m", near)
        assert raised.value.message == (
            "There are 2 identifiers of model 'm' in global map, model namespace must be provided to resolve ambiguity."
        )
    there.remove("/a::m")
    namespaces.changed()
    assert namespaces.resolve("m") == "/b::m"


def test_a_model_without_a_namespace_is_one_of_them() -> None:
    namespaces, there = known("/a::m")
    there.add("m")
    with pytest.raises(InvalidArgument, match="There are 2 identifiers"):
        namespaces.resolve("m")
    assert namespaces.resolve("m", near="/a") == "/a::m"


def test_what_was_resolved_is_forgotten_when_something_changes() -> None:
    namespaces, there = known("/a::m")
    assert namespaces.resolve("m") == "/a::m"
    there.clear()
    assert namespaces.resolve("m") == "/a::m"
    namespaces.changed()
    assert namespaces.resolve("m") == "m"
    namespaces.clear()
    there.add("/a::m")
    assert namespaces.resolve("m") == "m"
