"""What is served where, from facts alone: readiness, the index (H40), E5's words, and executors that come and go."""

from __future__ import annotations

import pytest

from charonia.errors import InternalError, InvalidArgument, NotFound, Unavailable, UnknownError
from charonia.events import (
    ExecutorDraining,
    Fact,
    LanesWeighed,
    ModelExcluded,
    ModelRequestFinished,
    ProcessJoined,
    ProcessLeft,
    RepositoryScanned,
    VersionAnnounced,
    VersionFailed,
    VersionHealthChanged,
    VersionHeld,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
)
from charonia.models.catalog import Catalog, IndexRow, failure_of
from charonia.models.config import normalise
from charonia.models.pbtxt import parse

CONFIG = normalise(
    parse(
        'name: "m" backend: "python" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    )
).SerializeToString()


def joined(name: str = "e") -> ProcessJoined:
    return ProcessJoined("executor", name)


def scanned(name: str = "e", *models: str, ready: bool = True) -> RepositoryScanned:
    return RepositoryScanned(name, models or ("m",), "explicit", ready)


def loaded(name: str = "e", version: int = 1, content_hash: str = "h1", slots: int = 2) -> VersionLoaded:
    return VersionLoaded(name, "m", version, content_hash, slots, CONFIG, {"y": ["cat"]})


def left(name: str = "e", reason: str = "lost") -> ProcessLeft:
    return ProcessLeft("executor", name, reason)


def catalog(*facts: Fact) -> Catalog:
    """The fold; every fact is applied twice, which must change nothing."""
    found = Catalog()
    for fact in facts:
        found.apply(fact)
        found.apply(fact)
    return found


def test_nothing_is_known_at_first() -> None:
    empty = catalog()
    assert (empty.index(), empty.served_models(), empty.started(), empty.control_modes()) == ([], [], False, set())
    with pytest.raises(NotFound, match=r"^Request for unknown model: 'm' is not found$"):
        empty.find("m", -1)


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


def test_a_cleared_catalog_knows_nothing() -> None:
    known = catalog(joined(), loaded(), scanned("e", "m"))
    known.clear()
    assert known.index() == []
    assert known.processes == {}
    assert not known.started()
    for fact in (joined(), loaded(), scanned("e", "m")):
        known.apply(fact)
    assert known.is_ready("m", 1)


# -- pools, placement, models on demand --------------------------------------------------------------------------------


def announced(name: str = "e", version: int = 1, content_hash: str = "h1") -> VersionAnnounced:
    return VersionAnnounced(name, "m", version, content_hash, CONFIG, {"y": ["cat"]})


def test_what_is_announced_is_ready_and_held_by_nobody() -> None:
    found = catalog(joined(), announced(), scanned())
    served = found.find("m", -1)
    assert (served.slots, served.on_demand, served.is_unloaded) == ({"e": 0}, frozenset({"e"}), True)
    assert found.is_ready("m", 1)
    assert found.all_ready()
    assert found.index() == [IndexRow("m", 1, "READY", "on demand")]
    found.apply(VersionHeld("e", "m", 1, 3))
    served = found.find("m", 1)
    assert (served.slots, served.on_demand, served.is_unloaded) == ({"e": 3}, frozenset(), False)
    assert found.index() == [IndexRow("m", 1, "READY", "")]
    found.apply(VersionHeld("e", "m", 1, 0))
    assert found.find("m", 1).is_unloaded


def test_one_that_holds_it_is_enough() -> None:
    found = catalog(joined("a"), joined("b"), announced("a"), announced("b"), VersionHeld("b", "m", 1, 2))
    served = found.find("m", 1)
    assert (served.slots, served.on_demand, served.is_unloaded) == ({"a": 0, "b": 2}, frozenset({"a"}), False)
    assert found.index() == [IndexRow("m", 1, "READY", "")]
    found.apply(left("b"))
    assert found.find("m", 1).is_unloaded


def test_what_cannot_be_loaded_on_demand_is_not_announced_any_more() -> None:
    found = catalog(joined("a"), joined("b"), announced("a"), announced("b"))
    found.apply(VersionFailed("a", "m", 1, 1, "Internal: why"))
    assert found.find("m", 1).on_demand == {"b"}
    assert found.failure("m", 1) == ""
    found.apply(VersionFailed("b", "m", 1, 1, "Internal: why"))
    assert found.failure("m", 1) == "Internal: why"
    assert not found.held("m")
    assert found.index() == [IndexRow("m", 1, "UNAVAILABLE", "Internal: why")]
    assert found.all_ready(), "who asks for a broken model does not end the readiness of all"
    found.apply(announced("a"))
    assert found.is_ready("m", 1)


def test_one_that_cannot_load_and_one_that_can() -> None:
    found = catalog(joined("a"), joined("b"), scanned("a"), scanned("b"))
    found.apply(VersionFailed("a", "m", 1, 1, "Unsupported: no such backend"))
    assert not found.all_ready()
    found.apply(loaded("b"))
    assert found.index() == [IndexRow("m", 1, "READY", "")]
    assert found.all_ready()
    assert found.find("m", 1).slots == {"b": 2}


def test_a_model_that_nobody_may_load_says_why() -> None:
    found = catalog(joined("a"), joined("b"), scanned("a"), scanned("b"), scanned("b", "other"))
    found.apply(ModelExcluded("a", "m", "not here"))
    assert IndexRow("m", 0, "UNAVAILABLE", "not here") in found.index(), "b has no such model"
    assert not found.all_ready()
    found.apply(scanned("b"))
    assert found.index() == [IndexRow("m", 0, "", "")], "b has not said anything of it"
    found.apply(ModelExcluded("b", "m", "nor here"))
    assert found.index() == [IndexRow("m", 0, "UNAVAILABLE", "not here; nor here")]
    found.apply(loaded("b"))
    assert found.index() == [IndexRow("m", 1, "READY", "")]
    found.apply(VersionUnloaded("b", "m", 1))
    found.apply(ModelExcluded("b", "m", "no more"))
    assert found.index() == [IndexRow("m", 0, "UNAVAILABLE", "not here; no more")]


def test_one_that_drains_takes_nothing_more_and_is_waited_for() -> None:
    found = catalog(joined(), loaded(), scanned(), ExecutorDraining("e"))
    assert found.find("m", 1).slots == {}, "what is accepted waits for its successor"
    assert not found.is_ready("m", 1)
    assert found.index() == [IndexRow("m", 1, "UNAVAILABLE", "executor drains")]
    assert (found.live_executors(), found.answering_executors()) == (["e"], [])
    assert (found.all_ready(), found.all_ready(awaited=True)) == (False, True)
    found.apply(left(reason="drained"))
    assert (found.started(), found.started(awaited=True)) == (False, True)
    assert found.index() == [IndexRow("m", 1, "UNAVAILABLE", "executor lost")]
    found.apply(joined("f"))
    found.apply(scanned("f", ready=False))
    found.apply(VersionStateChanged("f", "m", 1, "LOADING"))
    assert (found.all_ready(), found.all_ready(awaited=True)) == (False, True), "its successor loads it"
    found.apply(VersionFailed("f", "m", 1, 1, "Internal: why"))
    assert not found.all_ready(awaited=True)
    found.apply(loaded("f"))
    found.apply(scanned("f"))
    assert found.all_ready()
    assert found.find("m", 1).slots == {"f": 2}


def test_only_an_executor_of_its_pool_takes_the_place_of_another() -> None:
    gpu = ProcessJoined("executor", "g", pool="gpu")
    found = catalog(gpu, loaded("g"), scanned("g"), joined("c"), scanned("c"), left("g"))
    found.apply(scanned("c"))
    assert found.find("m", 1).slots == {}, "the pool gpu may come back"
    found.apply(ProcessJoined("executor", "g2", pool="gpu"))
    found.apply(RepositoryScanned("g2", ("m",), "none", ready=True))
    assert not found.held("m")


def test_a_version_is_ready_where_it_is_well() -> None:
    sick, well = (VersionHealthChanged("e", "m", 1, well) for well in (False, True))
    found = catalog(joined(), scanned(), loaded(), sick)
    assert not found.is_ready("m", 1)
    assert not found.is_ready("m", -1)
    assert found.find("m", 1).slots == {"e": 2}, "requests are accepted all the same"
    assert [row.state for row in found.index()] == ["READY"]
    assert catalog(joined(), scanned(), loaded(), sick, well).is_ready("m", 1)
    assert catalog(joined(), scanned(), loaded(), sick, loaded(content_hash="h2")).is_ready("m", 1)
    other = (joined("f"), scanned("f"), loaded("f"))
    assert catalog(joined(), scanned(), loaded(), *other, sick).is_ready("m", 1), "another executor is well"
    assert not catalog(joined(), scanned(), loaded(), *other, sick, left("f")).is_ready("m", 1)


def test_the_health_of_what_nobody_knows_changes_nothing() -> None:
    found = catalog(
        joined(), scanned(), VersionHealthChanged("e", "m", 1, False), VersionHealthChanged("f", "m", 1, False)
    )
    assert [(row.model, row.state) for row in found.index()] == [("m", "")]
    assert catalog(joined(), VersionHealthChanged("e", "m", 1, False), scanned(), loaded()).is_ready("m", 1)


def test_one_that_is_held_for_lost_succeeds_nobody_not_even_itself() -> None:
    """It stalled and says again what it has, while others write that it is lost."""
    found = catalog(joined(), loaded(), scanned(), left(), loaded(), scanned())
    assert found.find("m", -1).slots == {}
    other = catalog(joined(), loaded(), scanned(), joined("late"), left(), left("late"), scanned("late"))
    assert other.find("m", -1).slots == {}
    for late in (found, other):
        late.apply(joined())
        assert late.find("m", -1).slots == {"e": 2}


def test_a_successor_may_be_ready_before_the_loss_is_told() -> None:
    """Nobody waits for what the lost one served: it was silent since its successor joined."""
    gone = [joined(), loaded(), scanned()]
    there = [joined("next"), loaded("next"), scanned("next")]
    found = catalog(*gone, *there, left())
    assert set(found.executors) == {"next"}
    found.apply(VersionUnloaded("next", "m", 1, "unloaded"))
    assert found.held("m") == {}
    found.apply(joined())  # it was only stalled
    assert found.find("m", -1).slots == {"e": 2}


def test_one_that_was_there_before_succeeds_nobody() -> None:
    alive = [joined(), joined("other"), scanned("other"), loaded(), scanned()]
    assert catalog(*alive, left()).find("m", -1).slots == {}
    starting = [joined(), loaded(), scanned(), joined("next"), scanned("next", ready=False)]
    assert catalog(*starting, left()).find("m", -1).slots == {}


# -- namespaces --------------------------------------------------------------------------------------------------------


def of(model: str, version: int = 1) -> VersionLoaded:
    return VersionLoaded("e", model, version, "h1", 2, CONFIG, {})


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
