"""Two requests have one key if and only if they ask the same of the same content for the same tenant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from charonia.calls.cache.cache_keys import cache_key
from charonia.catalog.catalog import ServedVersion
from charonia.datatypes import DataType
from charonia.inference import InferenceRequest
from charonia.models.caching import CachingRules
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor

# few letters and few bytes: strangers meet often, and so do texts that run into one another
NAMES = st.text("ab=", max_size=2)
TENSORS = st.builds(
    Tensor,
    NAMES,
    st.sampled_from([DataType.UINT8, DataType.INT8]),
    st.lists(st.integers(0, 2), max_size=2).map(tuple),
    st.binary(max_size=2),
)
VALUES = st.one_of(NAMES, st.integers(0, 1), st.booleans(), st.sampled_from([0.0, 1.0, -0.0]))
REQUESTS = st.builds(
    InferenceRequest,
    model=st.just("m"),
    version=st.just(-1),
    inputs=st.lists(TENSORS, max_size=3, unique_by=lambda t: t.name),
    outputs=st.lists(NAMES, max_size=2, unique=True).map(tuple),
    parameters=st.dictionaries(NAMES, VALUES, max_size=2),
    id=NAMES,
    priority=st.integers(0, 1),
)
INTERFACE = ModelInterface("m", "python", "", 0, {}, {})
SERVED = st.builds(
    lambda model, version, content: ServedVersion(model, version, content, parse(""), INTERFACE, {}, {}),
    NAMES,
    st.sampled_from([1, 11]),
    st.sampled_from(["", "1", "a"]),
)
RULES = st.builds(
    CachingRules, inputs=st.none() | st.frozensets(NAMES, max_size=2), ttl_s=st.just(1), shared=st.booleans()
)
ASKED = st.tuples(REQUESTS, SERVED, NAMES)


def meaning(asked: tuple[InferenceRequest, ServedVersion, str], rules: CachingRules) -> object:
    request, served, tenant = asked
    return (
        (served.model, served.version, served.content_hash),
        None if rules.shared else tenant,
        {
            (t.name, t.datatype, t.shape, bytes(t.data))
            for t in request.inputs
            if rules.inputs is None or t.name in rules.inputs
        },
        set(request.outputs),
        # 1, 1.0 and True are equal, and so are 0.0 and -0.0: a model sees the difference
        {(name, type(value), repr(value)) for name, value in request.parameters.items()},
    )


@given(ASKED, ASKED, RULES)
def test_keys_are_equal_when_requests_are(
    one: tuple[InferenceRequest, ServedVersion, str],
    other: tuple[InferenceRequest, ServedVersion, str],
    rules: CachingRules,
) -> None:
    keys = [cache_key(request, served, rules, tenant) for request, served, tenant in (one, other)]
    assert (keys[0] == keys[1]) == (meaning(one, rules) == meaning(other, rules))


@given(ASKED, st.randoms(use_true_random=False), RULES)
def test_the_same_in_another_order(
    asked: tuple[InferenceRequest, ServedVersion, str], random: object, rules: CachingRules
) -> None:
    request, served, tenant = asked
    again = InferenceRequest(
        request.model,
        request.version,
        request.inputs[::-1],
        outputs=request.outputs[::-1],
        parameters=dict(reversed(request.parameters.items())),
        id=request.id + "x",
        timeout_us=5,
        deadline_ns=5,
    )
    assert cache_key(request, served, rules, tenant) == cache_key(again, served, rules, tenant)
