"""What a configuration may say about caching, and that wrong words keep a model from loading."""

from __future__ import annotations

import pytest

from charonia.models.caching import LONGEST_TTL_S, CachingRules, caching_rules
from charonia.models.config_forms import parse
from executors.configuration.config import InstanceError, validate_instances

IO = "".join(
    f"{kind} {{ name: '{name}' data_type: TYPE_FP32 dims: [3] }} "
    for kind, name in (("input", "a"), ("input", "b"), ("output", "c"))
)
CACHED = "name: 'm' backend: 'python' response_cache { enable: true } " + IO


def parameter(name: str, value: str) -> str:
    return f"parameters {{ key: 'charonia.{name}' value {{ string_value: '{value}' }} }} "


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", CachingRules(None, LONGEST_TTL_S, False)),
        (parameter("cache_inputs", "a"), CachingRules(inputs=frozenset({"a"}))),
        (parameter("cache_inputs", " b , a"), CachingRules(inputs=frozenset({"a", "b"}))),
        (parameter("cache_ttl_s", "1"), CachingRules(ttl_s=1)),
        (parameter("cache_ttl_s", "86400"), CachingRules(ttl_s=86_400)),
        (parameter("cache_share_tenants", "True"), CachingRules(shared=True)),
        (parameter("cache_share_tenants", "false"), CachingRules()),
    ],
)
def test_rules(text: str, rules: CachingRules) -> None:
    assert caching_rules(parse(CACHED + text)) == rules


def test_a_model_that_does_not_want_it_has_none() -> None:
    for text in ("", "response_cache { enable: false } ", parameter("cache_ttl_s", "never")):
        assert caching_rules(parse("name: 'm' " + text + IO)) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            parameter("cache_inputs", "a,z"),
            "parameter 'charonia.cache_inputs' names 'z', which is no input of the model",
        ),
        (parameter("cache_inputs", ""), "parameter 'charonia.cache_inputs' names '', which is no input of the model"),
        *(
            (
                parameter("cache_ttl_s", wrong),
                f"parameter 'charonia.cache_ttl_s' must be a whole number between 1 and 86400, got '{wrong}'",
            )
            for wrong in ("", "0", "-1", "1.5", "86401", "9" * 30, "٣")
        ),
        (
            parameter("cache_share_tenants", "maybe"),
            "parameter 'charonia.cache_share_tenants' must be true or false, got 'maybe'",
        ),
    ],
)
def test_wrong_words(text: str, sentence: str) -> None:
    with pytest.raises(InstanceError) as caught:
        validate_instances(parse(CACHED + "instance_group { name: 'm' count: 1 kind: KIND_CPU } " + text))
    assert caught.value.message == sentence
