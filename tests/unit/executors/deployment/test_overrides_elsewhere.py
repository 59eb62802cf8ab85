"""Which overrides other executors serve that this one was not there for."""

from __future__ import annotations

from charonia.facts.events import (
    ExecutorDraining,
    ModelRequested,
    ProcessJoined,
    ProcessLeft,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
)
from executors.deployment.overrides_elsewhere import OverridesElsewhere


def loaded(executor: str = "other", override: str = "", config: str = "", content: str = "h") -> VersionLoaded:
    return VersionLoaded(executor, "m", 1, content, 1, b"", override_id=override, override_config=config)


def test_an_override_counts_unless_this_executor_carries_its_request_out() -> None:
    elsewhere = OverridesElsewhere("me")
    assert elsewhere.apply(loaded("me", "early")) == ()
    assert elsewhere.apply(loaded()) == ("m",)
    assert elsewhere.of("m") is None
    elsewhere.apply(loaded(override="early"))
    assert elsewhere.of("m") == loaded(override="early")
    elsewhere.requested(ModelRequested("load", "m", "early", "{}"))
    assert elsewhere.of("m") is None


def test_an_unload_ends_all_earlier_overrides() -> None:
    elsewhere = OverridesElsewhere("me")
    elsewhere.apply(VersionLoaded("other", "/models::m", 1, "h", 1, b"", override_id="early"))
    elsewhere.requested(ModelRequested("unload", "m", "1"))  # a name means all models of it
    assert elsewhere.of("/models::m") is None


def test_a_load_of_the_repositorys_files_ends_files_and_no_configuration() -> None:
    elsewhere = OverridesElsewhere("me")
    elsewhere.apply(loaded("one", "files"))
    elsewhere.apply(loaded("two", "config", "{}"))
    elsewhere.end_files("m")
    assert elsewhere.of("m") == loaded("two", "config", "{}")


def test_what_an_executor_no_longer_serves_does_not_count() -> None:
    ends = [
        ProcessLeft("executor", "other", "lost"),
        ExecutorDraining("other"),
        VersionUnloaded("other", "m", 1),
        VersionStateChanged("other", "m", 1, "UNLOADING"),
    ]
    for end in ends:
        elsewhere = OverridesElsewhere("me")
        elsewhere.apply(loaded(override="early"))
        elsewhere.apply(VersionStateChanged("other", "m", 1, "LOADING"))
        assert elsewhere.of("m") is not None
        assert set(elsewhere.apply(end)) == {"m"}, end
        assert elsewhere.of("m") is None
        assert not elsewhere.apply(end)


def test_an_executor_that_drains_counts_again_once_it_has_joined_again() -> None:
    elsewhere = OverridesElsewhere("me")
    elsewhere.apply(ExecutorDraining("other"))
    elsewhere.apply(loaded(override="early"))
    assert elsewhere.of("m") is None
    elsewhere.apply(ProcessJoined("executor", "other"))
    elsewhere.apply(loaded(override="early"))
    assert elsewhere.of("m") is not None


def test_a_model_has_an_override_also_where_this_executor_carries_its_request_out() -> None:
    elsewhere = OverridesElsewhere("me")
    elsewhere.requested(ModelRequested("load", "m", "late", "{}"))
    elsewhere.apply(loaded("one"))
    assert not elsewhere.has_override("m")
    elsewhere.apply(loaded(override="late"))
    assert elsewhere.has_override("m")
    elsewhere.presume_lost("other")
    assert not elsewhere.has_override("m")


def test_the_same_content_is_not_taken_for_the_repositorys() -> None:
    """Executors of older releases do not say that a request brought it."""
    elsewhere = OverridesElsewhere("me")
    elsewhere.apply(loaded(override="early"))
    assert not elsewhere.is_of_repository("m", [])
    elsewhere.apply(loaded("old release", content="brought"))
    assert not elsewhere.is_of_repository("m", ["brought"])
    elsewhere.apply(loaded("third", content="repository's"))
    assert elsewhere.is_of_repository("m", ["brought"])
