"""Which executors hold, announce, cannot load or are lost with what a catalog serves."""

from __future__ import annotations

import pytest
from catalog_facts import CONFIG, catalog, joined, left, loaded, scanned

from charonia.catalog.catalog import IndexRow
from charonia.facts.events import (
    ExecutorDraining,
    Fact,
    ModelExcluded,
    ProcessJoined,
    RepositoryScanned,
    VersionAnnounced,
    VersionFailed,
    VersionHealthChanged,
    VersionHeld,
    VersionStateChanged,
    VersionUnloaded,
)


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


@pytest.mark.parametrize(
    "gone",
    [
        (left("b", "drained"),),
        (left("b"), scanned("a")),
        (ExecutorDraining("b"),),
        (VersionStateChanged("b", "m", 1, "UNLOADING"),),
        (VersionUnloaded("b", "m", 1),),
        (announced("b", content_hash="h3"), VersionFailed("b", "m", 1, 1, "why")),
    ],
)
def test_older_content_serves_again_when_the_newer_is_gone(gone: tuple[Fact, ...]) -> None:
    older = (joined("a"), loaded("a"), scanned("a"))
    found = catalog(*older, joined("b"), loaded("b", content_hash="h2"), scanned("b"))
    assert (found.find("m", 1).content_hash, found.find("m", 1).slots) == ("h2", {"b": 2})
    for fact in gone:
        found.apply(fact)
    served = found.find("m", 1)
    assert (served.content_hash, served.accepting) == ("h1", True)
    assert served.slots == {"a": 2}
    assert found.is_ready("m", 1)


def test_newer_content_serves_again_when_its_executor_had_only_stalled() -> None:
    found = catalog(joined("a"), loaded("a"), scanned("a"), joined("b"), loaded("b", content_hash="h2"), scanned("b"))
    for fact in (left("b"), joined("b")):
        found.apply(fact)
    assert found.find("m", 1).content_hash == "h2"


def test_the_newest_content_is_waited_for_when_no_executor_has_any() -> None:
    found = catalog(joined("a"), loaded("a"), joined("b"), loaded("b", content_hash="h2"), left("b"), left("a"))
    assert (found.find("m", 1).content_hash, found.find("m", 1).slots) == ("h2", {})


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
