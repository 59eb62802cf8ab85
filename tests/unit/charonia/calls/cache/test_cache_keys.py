"""Which requests may be answered from the cache, and which of their parts make the key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from charonia.calls.cache.cache_keys import cache_key, is_cachable, rules_of
from charonia.catalog.catalog import ServedVersion
from charonia.datatypes import DataType
from charonia.inference import InferenceRequest
from charonia.models.caching import CachingRules
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor

ALL = CachingRules()


def served(config: str = "", **changes: Any) -> ServedVersion:
    interface = ModelInterface("m", "python", "", 8, {}, {})
    return replace(ServedVersion("m", 1, "h", parse("name: 'm' " + config), interface, {}, {"e": 1}), **changes)


def tensor(name: str = "a", shape: tuple[int, ...] = (1, 2), data: bytes = b"12345678", **more: Any) -> Tensor:
    return Tensor(name, more.get("datatype", DataType.INT32), shape, data)


def request(*inputs: Tensor, **more: Any) -> InferenceRequest:
    return InferenceRequest("m", -1, list(inputs) or [tensor(), tensor("b")], **more)


def key(asked: InferenceRequest | None = None, of: ServedVersion | None = None, **more: Any) -> bytes:
    return cache_key(asked or request(), of or served(), more.get("rules", ALL), more.get("tenant", ""))


@pytest.mark.parametrize(
    ("more", "may"),
    [
        ({}, True),
        ({"parameters": {"p": 1}, "priority": 2, "timeout_us": 3, "deadline_ns": 4}, True),
        ({"parameters": {"charonia_receipt": True}}, False),
        ({"sequence_id": 1}, False),
        ({"sequence_id": "s"}, False),
        ({"sequence_start": True}, False),
        ({"sequence_end": True}, False),
    ],
)
def test_what_may_be_answered(more: dict[str, Any], may: bool) -> None:
    assert is_cachable(request(**more)) is may


def test_a_key_has_32_bytes() -> None:
    assert len(key()) == 32


@pytest.mark.parametrize(
    "same",
    [
        request(id="other"),
        request(priority=3, timeout_us=5, deadline_ns=7),
        request(tensor("b"), tensor()),
        request(tensor(data=memoryview(b"12345678")), tensor("b", data=bytearray(b"12345678"))),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_matter(same: InferenceRequest) -> None:
    assert key(same) == key()


def test_all_outputs_by_name_are_all_outputs() -> None:
    both = served()
    both = replace(both, interface=replace(both.interface, outputs={"c": None, "d": None}))  # type: ignore[dict-item]
    assert key(request(outputs=("c", "d")), both) == key(request(), both)
    assert key(request(outputs=("c",)), both) != key(request(), both)


def test_the_order_of_outputs_and_parameters_does_not_matter() -> None:
    assert key(request(outputs=("c", "d"))) == key(request(outputs=("d", "c")))
    assert key(request(parameters={"p": 1, "q": 2})) == key(request(parameters={"q": 2, "p": 1}))


DIFFERENT = [
    request(tensor(), tensor("c")),
    request(tensor()),
    request(tensor(), tensor("b"), tensor("c")),
    request(tensor(data=b"12345679"), tensor("b")),
    request(tensor(data=b"1234"), tensor("b", data=b"567812345678")),
    request(tensor(shape=(2, 1)), tensor("b")),
    request(tensor(shape=(1, 2, 1)), tensor("b")),
    request(tensor(datatype=DataType.FP32), tensor("b")),
    request(outputs=("c",)),
    request(outputs=("c", "d")),
    request(outputs=("cd",)),
    request(parameters={"p": "1"}),
    request(parameters={"p": 1}),
    request(parameters={"p": 1.0}),
    request(parameters={"p": True}),
    request(parameters={"p": "True"}),
    request(parameters={"c": ""}),
]


def test_what_matters() -> None:
    found = [key(), *map(key, DIFFERENT)]
    found += [key(of=served(model="n")), key(of=served(version=2)), key(of=served(content_hash="h2"))]
    found += [key(of=served(model="m1")), key(of=served(content_hash="1h"))]
    found += [key(tenant="acme"), key(tenant="="), key(rules=CachingRules(shared=True))]
    assert len(set(found)) == len(found)


def test_tenants_share_what_is_shared() -> None:
    shared = CachingRules(shared=True)
    assert key(tenant="acme", rules=shared) == key(tenant="other", rules=shared)


def test_named_inputs_alone_make_the_key() -> None:
    rules = CachingRules(inputs=frozenset({"a"}))
    assert key(rules=rules) == key(request(tensor(), tensor("b", data=b"other...")), rules=rules)
    assert key(rules=rules) == key(request(tensor()), rules=rules)
    assert key(rules=rules) != key(request(tensor(data=b"other..."), tensor("b")), rules=rules)


def test_rules_of_a_served_version() -> None:
    assert rules_of(served("response_cache { enable: true }")) == ALL
    assert rules_of(served()) is None
    words = "response_cache { enable: true } parameters { key: 'charonia.cache_ttl_s' value { string_value: 'x' } }"
    assert rules_of(served(words)) is None
