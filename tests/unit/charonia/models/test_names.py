"""Keys of models with and without a namespace (R2), and R11."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.models.names import can_be_namespace, is_namespaced, model_key, name_of, namespace_of

names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1)


@given(names)
def test_a_name_alone_is_its_own_key(name: str) -> None:
    assert model_key("", name) == name_of(name) == name
    assert namespace_of(name) == ""
    assert not is_namespaced(name)


@given(st.lists(names, min_size=1), names)
def test_a_key_comes_apart_again(directories: list[str], name: str) -> None:
    namespace = "/" + "/".join(directories)
    key = model_key(namespace, name)
    assert is_namespaced(key)
    if can_be_namespace(namespace):
        assert (namespace_of(key), name_of(key)) == (namespace, name)


@pytest.mark.parametrize("path", ["/", "relative", "/a/b::c", "/a/b:"])
def test_what_cannot_be_a_namespace(path: str) -> None:
    assert not can_be_namespace(path)


def test_a_usual_path_can() -> None:
    assert can_be_namespace("/a::b/models")
    assert name_of("/a::b/models::m::n") == "m::n"
