"""What is served where, from facts alone: readiness, the index (H40), E5's words, and executors that come and go."""

from __future__ import annotations

import pytest
from catalog_facts import CONFIG, catalog, joined, left, loaded, scanned

from charonia.catalog.catalog import Catalog, IndexRow, failure_of
from charonia.errors import InternalError, InvalidArgument, NotFound, Unavailable, UnknownError
from charonia.facts.events import (
    Fact,
    LanesWeighed,
    ModelRequestFinished,
    VersionFailed,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
)
from charonia.releases.route_rule import RouteRule, route_fact


def test_nothing_is_known_at_first() -> None:
    empty = catalog()
    assert (empty.index(), empty.served_models(), empty.started(), empty.control_modes()) == ([], [], False, set())
    with pytest.raises(Unavailable, match=r"^model 'm' cannot be served yet: no executor has loaded its models$"):
        empty.find("m", -1)


def test_what_is_loading_is_said_until_the_first_loads_are_over() -> None:
    found = catalog(joined(), scanned(ready=False))
    for number in range(8):
        found.apply(VersionStateChanged("e", f"n{number}", 1, "LOADING"))
    for model in ("m", "n1"):
        with pytest.raises(Unavailable) as caught:
            found.find(model, -1)
        assert caught.value.message == (
            f"model '{model}' cannot be served yet: still loading 'n0', 'n1', 'n2', 'n3', 'n4' and 3 more"
        )
    found.apply(loaded())
    assert found.find("m", -1).version == 1
    assert found.loaded_executors() == []
    found.apply(scanned())
    assert found.loaded_executors() == ["e"]
    with pytest.raises(NotFound, match=r"^Request for unknown model: 'x' is not found$"):
        found.find("x", -1)


def test_the_highest_version_is_the_one_that_is_meant() -> None:
    found = catalog(joined(), loaded(version=2), loaded(version=10), loaded(version=9), scanned())
    assert found.find("m", -1).version == 10
    assert found.find("m", 2).slots == {"e": 2}
    assert list(found.served("m")) == [2, 9, 10]
    assert found.is_ready("m", -1)
    assert not found.is_ready("m", 3)
    with pytest.raises(NotFound, match=r"^Request for unknown model: 'm' version 3 is not found$"):
        found.find("m", 3)


def test_words_for_what_is_not_served() -> None:
    unloading = catalog(joined(), scanned(), loaded(), VersionStateChanged("e", "m", 1, "UNLOADING"))
    assert list(unloading.held("m")) == [1]
    assert not unloading.served("m")
    with pytest.raises(Unavailable, match=r"^Request for unknown model: 'm' version 1 is not at ready state$"):
        unloading.find("m", 1)
    with pytest.raises(NotFound, match=r"^Request for unknown model: 'm' has no available versions$"):
        unloading.find("m", -1)
    unloading.apply(VersionUnloaded("e", "m", 1))
    assert not unloading.held("m")
    assert unloading.index() == [IndexRow("m", 1, "UNAVAILABLE", "unloaded")]
    assert unloading.all_ready(), "what a user unloaded does not count (R40)"


def test_the_index_names_what_was_never_loaded() -> None:
    found = catalog(joined(), scanned("e", "m", "b"), VersionFailed("e", "m", 1, 1, "Internal: why"))
    assert found.index() == [IndexRow("b", 0, "", ""), IndexRow("m", 1, "UNAVAILABLE", "Internal: why")]
    assert not found.all_ready()


def test_a_model_whose_configuration_cannot_be_used_does_not_count() -> None:
    found = catalog(joined(), scanned("e", "m"), VersionFailed("e", "m", 1, 3, "why", unpolled=True))
    assert found.index() == [IndexRow("m", 1, "UNAVAILABLE", "why")]
    assert found.all_ready(), "Triton does not know such a model (R40)"
    found.apply(VersionFailed("e", "m", 1, 3, "another"))
    assert not found.all_ready()


@pytest.mark.parametrize("names", ["ef", "fe"])
def test_what_one_executor_cannot_read_does_not_hide_a_failure_on_another(names: str) -> None:
    found = catalog(*(fact for name in names for fact in (joined(name), scanned(name, "m"))))
    found.apply(VersionFailed("e", "m", 1, 3, "why", unpolled=True))
    assert found.all_ready()
    found.apply(VersionFailed("f", "m", 1, 3, "broken file"))
    assert not found.all_ready()
    found.apply(VersionUnloaded("f", "m", 1, "unloaded"))
    assert found.all_ready()


def test_a_reload_serves_on_until_its_successor_is_ready() -> None:
    found = catalog(joined(), scanned(), loaded(), VersionStateChanged("e", "m", 1, "LOADING"))
    assert found.is_ready("m", 1)
    found.apply(VersionFailed("e", "m", 1, 1, "why"))
    assert found.find("m", 1).content_hash == "h1"
    found.apply(loaded(content_hash="h2", slots=5))
    assert (found.find("m", 1).content_hash, found.find("m", 1).slots) == ("h2", {"e": 5})


def test_batches_go_to_the_newest_incarnation_only() -> None:
    found = catalog(joined("a"), joined("b"), loaded("a"), loaded("b"), loaded("a", content_hash="h2"))
    assert found.find("m", 1).slots == {"a": 2}
    found.apply(loaded("b", content_hash="h2", slots=3))
    assert found.find("m", 1).slots == {"a": 2, "b": 3}


@pytest.mark.parametrize("reason", ["lost", "drained"])
def test_what_the_last_executor_served_is_accepted_until_a_successor_speaks(reason: str) -> None:
    found = catalog(joined(), scanned(), loaded(), left("e", reason))
    assert found.find("m", 1).slots == {}
    assert not found.is_ready("m", 1)
    assert not found.started()
    assert found.index() == [IndexRow("m", 1, "UNAVAILABLE", "executor lost")]
    found.apply(joined("f"))
    found.apply(scanned("f", ready=False))
    assert found.find("m", 1).slots == {}
    found.apply(scanned("f", "other"))
    assert not found.held("m")
    assert found.index() == [IndexRow("other", 0, "", "")]


@pytest.mark.parametrize("replaced", [False, True])
def test_an_executor_that_only_stalled_serves_on(replaced: bool) -> None:
    found = catalog(joined(), scanned(), loaded(), left())
    if replaced:
        for fact in (joined("f"), scanned("f")):
            found.apply(fact)
        assert not found.served("m")
    found.apply(joined())
    assert found.find("m", 1).slots == {"e": 2}
    assert found.is_ready("m", 1)


def test_an_unload_is_not_undone_by_an_executor_that_is_gone() -> None:
    found = catalog(joined("a"), joined("b"), scanned("a"), scanned("b"), loaded("a"), loaded("b"), left("a"))
    found.apply(VersionStateChanged("b", "m", 1, "UNLOADING"))
    assert not found.served("m")
    found.apply(VersionUnloaded("b", "m", 1))
    assert not found.held("m")
    assert found.index() == [IndexRow("m", 1, "UNAVAILABLE", "unloaded")]


def test_an_unloaded_model_stays_unloaded_when_its_executor_is_lost() -> None:
    found = catalog(joined(), scanned(), loaded(), VersionUnloaded("e", "m", 1), left())
    assert found.index() == [IndexRow("m", 1, "UNAVAILABLE", "unloaded")]
    assert found.all_ready()


def test_a_configuration_that_cannot_be_read_changes_nothing() -> None:
    found = catalog(joined(), scanned(), loaded())
    with pytest.raises(Exception, match=r"."):
        found.apply(VersionLoaded("e", "m", 1, "h2", 1, b"\xff\xff\xff"))
    assert found.find("m", 1).content_hash == "h1"
    found.apply(loaded(version=2))
    assert list(found.served("m")) == [1, 2]


def test_listeners_hear_of_models_and_processes() -> None:
    found = Catalog()
    models: list[str] = []
    facts: list[Fact] = []
    found.listeners.append(models.append)
    found.process_listeners.append(facts.append)
    for fact in (joined(), loaded(), left()):
        found.apply(fact)
    assert models == ["m", "m"]
    assert facts == [joined(), loaded(), left()]


def test_answers_to_load_requests_are_kept_and_bounded() -> None:
    found = Catalog()
    for number in range(2000):
        found.apply(ModelRequestFinished("e", f"r{number}"))
    assert len(found.finished) == 1024
    assert ("r1999", "e") in found.finished


def test_failures_of_load_requests() -> None:
    assert failure_of(ModelRequestFinished("e", "r")) is None
    assert type(failure_of(ModelRequestFinished("e", "r", 1, "why"))) is InternalError
    assert type(failure_of(ModelRequestFinished("e", "r", 99, "a newer code"))) is UnknownError


def test_facts_of_executors_nobody_introduced_are_ignored() -> None:
    found = catalog(loaded(), scanned(), left())
    assert (found.index(), found.executors) == ([], {})


def test_the_last_weights_of_lanes_count_whole() -> None:
    catalog = Catalog()
    kept = catalog.lane_weights
    catalog.apply(LanesWeighed({"7": 3, "9": 2}))
    assert kept == {7: 3, 9: 2}
    catalog.apply(LanesWeighed({"9": 4, "x": 5, "10": 0, "11": "12"}))  # type: ignore[dict-item]
    assert kept == {9: 4}
    catalog.clear()
    assert kept == {}


def test_a_model_may_come_while_somebody_starts_loads_or_is_missing() -> None:
    assert catalog().may_come("m")
    assert catalog(joined()).may_come("m")
    assert catalog(joined(), scanned("e", "m", ready=False)).may_come("m")
    assert not catalog(joined(), scanned("e", "m")).may_come("m")
    loading = catalog(joined(), scanned("e", "m"), VersionStateChanged("e", "m", 1, "LOADING"))
    assert loading.may_come("m")
    assert not loading.may_come("n")
    assert catalog(joined(), scanned("e", "m"), left()).may_come("m")


def test_a_cleared_catalog_knows_only_routing_rules() -> None:
    known = catalog(joined(), loaded(), loaded(version=2), scanned("e", "m"), route_fact("m", 5, RouteRule(1)))
    known.clear()
    assert known.index() == []
    assert known.processes == {}
    assert not known.started()
    for fact in (joined(), loaded(), loaded(version=2), scanned("e", "m")):
        known.apply(fact)
    assert known.is_ready("m", 1)
    assert known.find("m", -1).version == 1, "so do steps of ensembles, before a gateway has written it again"
    known.apply(route_fact("m", 1, None))
    assert known.find("m", -1).version == 2


def test_the_memory_of_a_version_is_that_of_all_its_executors() -> None:
    """X7."""
    reports = {"e": {"GPU 0": 3, "CPU 0": 1}, "f": {"GPU 0": 4}}
    facts = [VersionLoaded(name, "m", 1, "h1", 2, CONFIG, memory=memory) for name, memory in reports.items()]
    found = catalog(*(joined(name) for name in reports), *facts)
    assert found.find("m", 1).memory == {"GPU 0": 7, "CPU 0": 1}


def of(model: str, version: int = 1) -> VersionLoaded:
    return VersionLoaded("e", model, version, "h1", 2, CONFIG, {})


# -- namespaces --------------------------------------------------------------------------------------------------------


def test_a_name_finds_the_one_model_that_has_it() -> None:
    """R2: `m` is what both are called."""
    found = catalog(joined(), scanned("e", "/a::m"), of("/a::m"))
    assert found.find("m", -1).model == "/a::m"
    assert found.find("m", 1).interface.name == "m"
    assert found.is_ready("m", -1)
    with pytest.raises(NotFound) as raised:
        found.find("m", 7)
    assert raised.value.message == "Request for unknown model: 'm' version 7 is not found"


def test_a_name_that_two_models_have() -> None:
    facts = (joined(), scanned("e", "/a::m", "/b::m"), of("/a::m"), of("/b::m"))
    found = catalog(*facts)
    with pytest.raises(InvalidArgument, match="There are 2 identifiers of model 'm' in global map"):
        found.find("m", -1)
    assert not found.is_ready("m", -1)
    assert found.find("/b::m", -1).model == "/b::m"
    assert found.resolve("m", near="/a") == "/a::m"
    found = catalog(*facts, VersionFailed("e", "/a::m", 1, 3, "broken"))
    assert found.resolve("m", near="/b") == "/b::m"
    found = catalog(*facts, VersionUnloaded("e", "/a::m", 1))
    assert found.find("m", -1).model == "/b::m", "what was unloaded is not meant"


def test_one_that_could_not_be_loaded_still_has_its_name() -> None:
    found = catalog(joined(), scanned("e", "/a::m", "/b::m"), of("/a::m"), VersionFailed("e", "/b::m", 1, 3, "broken"))
    with pytest.raises(InvalidArgument, match="resolve ambiguity"):
        found.find("m", -1)
