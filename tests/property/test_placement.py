"""Where models may be loaded: what is understood is written back as it was, and decided as a plain reading decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.errors import InvalidArgument
from charonia.models.placement import POOL, REQUIRE, Placement, Term, check_pool, label_of, placement_of
from protos.model_config_pb2 import ModelConfig

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,6}", fullmatch=True)
numbers = st.integers(-5, 5).map(str) | st.sampled_from(["0.5", "8", "1e3"])
terms = st.one_of(
    st.builds(Term, names),
    st.builds(Term, names, st.just("!")),
    st.builds(Term, names, st.sampled_from(["=", "!="]), st.lists(names, min_size=1, max_size=3).map(tuple)),
    st.builds(Term, names, st.sampled_from([">", ">=", "<", "<="]), numbers.map(lambda n: (n,))),
)


def config(**parameters: str) -> ModelConfig:
    found = ModelConfig(name="m")
    for key, value in parameters.items():
        found.parameters[{"pool": POOL, "require": REQUIRE}[key]].string_value = value
    return found


@given(st.lists(names, min_size=1, max_size=3, unique=True), st.lists(terms, min_size=1, max_size=4))
def test_what_was_written_is_what_is_meant(pools: list[str], wanted: list[Term]) -> None:
    placement = Placement(tuple(pools), tuple(wanted))
    assert placement_of(config(pool=" , ".join(pools), require=str(placement))) == placement
    assert placement_of(config(require=str(placement).replace(",", " , "))).terms == placement.terms


@given(st.lists(terms, min_size=1, max_size=4), st.dictionaries(names, numbers | names, max_size=4), names)
def test_a_model_is_placed_where_every_term_holds(wanted: list[Term], labels: dict[str, str], pool: str) -> None:
    reason = Placement((), tuple(wanted)).why_not(pool, labels)
    assert (reason == "") is all(term.holds(labels) for term in wanted)
    failing = next((term for term in wanted if not term.holds(labels)), None)
    assert failing is None or str(failing) in reason


@given(st.lists(terms, min_size=1, max_size=1), st.dictionaries(names, numbers | names, max_size=4))
def test_a_condition_or_its_opposite_holds(wanted: list[Term], labels: dict[str, str]) -> None:
    (term,) = wanted
    opposite = {"": "!", "!": "", "=": "!=", "!=": "=", ">": "<=", "<=": ">", "<": ">=", ">=": "<"}
    other = Term(term.label, opposite[term.operator], term.values)
    if term.operator in (">", ">=", "<", "<="):  # of what is no number neither holds
        assert not (term.holds(labels) and other.holds(labels))
        labels = {**labels, term.label: "3"}
    assert term.holds(labels) is not other.holds(labels)


@given(st.text(max_size=20))
def test_what_is_not_understood_is_refused(text: str) -> None:
    try:
        found = placement_of(config(require=text))
    except InvalidArgument as error:
        assert REQUIRE in error.message
    else:
        assert placement_of(config(require=str(found))) == found


def test_pools_and_labels() -> None:
    labels = {"device": "cpu,gpu", "memory_gib": "7.66", "zone": "a"}
    assert placement_of(config()).why_not("anywhere", {}) == ""
    assert placement_of(config(pool="cpu, gpu")).why_not("gpu", labels) == ""
    assert (
        placement_of(config(pool="cpu,gpu")).why_not("tpu", labels)
        == "'charonia.pool' is 'cpu,gpu', and this executor is in the pool 'tpu'"
    )
    for holds in ("device=gpu", "device=tpu|cpu", "memory_gib>=7.5,memory_gib<8", "zone", "!rack", "zone!=b|c"):
        assert placement_of(config(require=holds)).why_not("p", labels) == "", holds
    for fails in ("device=tpu", "device!=gpu", "memory_gib>8", "!zone", "rack", "zone>1", "rack<=9"):
        assert placement_of(config(require=fails)).why_not("p", labels), fails
    assert (
        placement_of(config(require="memory_gib>=8")).why_not("p", labels)
        == "'charonia.require' has 'memory_gib>=8', and an executor of the pool 'p' has memory_gib=7.66"
    )


@pytest.mark.parametrize("text", ["", "a,,b", "a==b", "a>=x", "a>=1|2", "a=", "=a", "!a=b", "a b", "a>=nan", "a<inf"])
def test_malformed_terms(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^'charonia.require' "):
        placement_of(config(require=text))


@pytest.mark.parametrize("text", ["", "a,", "a b", "-a"])
def test_malformed_pools(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^'charonia.pool' must be names"):
        placement_of(config(pool=text))
    with pytest.raises(InvalidArgument, match=r"^--pool must be"):
        check_pool(text)


@pytest.mark.parametrize("text", ["", "a", "a=", "=b", "a=b,c", "a=b c"])
def test_malformed_labels(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^--label must be"):
        label_of(text)


def test_a_label() -> None:
    assert label_of("zone=eu-1.a") == ("zone", "eu-1.a")
