"""What to load and unload, and the state of every version, without a repository or a log."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from charonia.errors import InternalError, InvalidArgument, StartupError, Unavailable
from charonia.facts.events import ModelRequested, VersionLoaded
from executors.deployment.lifecycle import (
    NO_VERSION,
    Lifecycle,
    LoadModel,
    Override,
    Refuse,
    UnloadModel,
    load_failure,
    poll_failure,
    retry_delay_s,
)


@dataclass(frozen=True)
class Stamp:
    config: str = "c"
    shared: str = "s"
    versions: dict[int, str] = field(default_factory=lambda: {1: "a"})


@dataclass(frozen=True)
class Model:
    key: str
    fingerprint: Stamp = field(default_factory=Stamp)


def ready(lifecycle: Lifecycle, model: Model, *versions: int) -> None:
    lifecycle.plan(model, versions)
    for version in versions:
        lifecycle.loading(model.key, version)
        lifecycle.loaded(VersionLoaded("e", model.key, version, "h", 1, b""), model.fingerprint)


FOUND = {"a": Model("a"), "b": Model("b")}


@pytest.mark.parametrize(
    ("mode", "names", "loaded"),
    [
        ("none", (), ["a", "b"]),
        ("poll", (), ["a", "b"]),
        ("explicit", (), []),
        ("explicit", ("b", "b", "unknown"), ["b", "unknown"]),
        ("explicit", ("*",), ["a", "b"]),
    ],
)
def test_start_up_by_control_mode(mode: str, names: tuple[str, ...], loaded: list[str]) -> None:
    """R8."""
    assert [decision.model for decision in Lifecycle("e", mode).start(FOUND, names)] == loaded


def test_the_wildcard_stands_alone() -> None:
    with pytest.raises(StartupError, match="must be the ONLY startup model"):
        Lifecycle("e", "explicit").start(FOUND, ("*", "a"))


def test_requests_are_only_for_explicit_mode() -> None:
    """R9, H42, R25."""
    load, unload = ModelRequested("load", "a", "1"), ModelRequested("unload", "a", "2")
    for mode in ("none", "poll"):
        for request in (load, unload):
            refused = Lifecycle("e", mode).requested(request)
            assert isinstance(refused, Refuse)
            assert isinstance(refused.error, Unavailable)
    explicit = Lifecycle("e", "explicit")
    assert explicit.requested(load) == LoadModel("a", load)
    assert explicit.requested(unload) == UnloadModel("a", unload)
    for bad in (ModelRequested("load", "a", "3", files={"1/x": "blob"}), ModelRequested("frobnicate", "a", "4")):
        refused = explicit.requested(bad)
        assert isinstance(refused, Refuse)
        assert isinstance(refused.error, InvalidArgument)


def test_a_plan_touches_only_what_differs() -> None:
    """R10, R22."""
    lifecycle = Lifecycle("e", "explicit")
    both = Model("a", Stamp(versions={1: "a", 2: "b"}))
    assert lifecycle.plan(both, [2, 1]).load == (1, 2)
    ready(lifecycle, both, 1, 2)
    again = lifecycle.plan(both, [1, 2])
    assert (again.load, again.keep, again.unload) == ((), (1, 2), ())
    one_changed = lifecycle.plan(Model("a", Stamp(versions={1: "a", 2: "changed"})), [1, 2])
    assert (one_changed.load, one_changed.keep) == ((2,), (1,))
    for stamp in (Stamp(config="x", versions={1: "a", 2: "b"}), Stamp(shared="x", versions={1: "a", 2: "b"})):
        assert lifecycle.plan(Model("a", stamp), [1, 2]).load == (1, 2)
    newest = lifecycle.plan(Model("a", Stamp(versions={1: "a", 2: "b", 3: "c"})), [3])
    assert (newest.load, newest.unload) == ((3,), (1, 2))


def test_a_version_that_failed_is_loaded_again_when_asked_but_polled_only_when_changed() -> None:
    lifecycle = Lifecycle("e", "poll")
    model = Model("a")
    lifecycle.plan(model, [1])
    lifecycle.loading("a", 1)
    failed = lifecycle.failed("a", 1, InvalidArgument("no good"))
    assert failed.message == "Invalid argument: no good"
    assert lifecycle.polled({"a": model}) == []
    assert lifecycle.plan(model, [1]).load == (1,)
    assert lifecycle.polled({"a": Model("a", Stamp(config="new"))}) == [LoadModel("a")]


def test_a_failed_reload_keeps_the_old_version_ready() -> None:
    """R21."""
    lifecycle = Lifecycle("e", "explicit")
    ready(lifecycle, Model("a"), 1)
    lifecycle.loading("a", 1)
    lifecycle.failed("a", 1, InvalidArgument("no good"))
    assert lifecycle.ready_versions("a") == [1]
    assert lifecycle.plan(Model("a", Stamp(config="new")), [1]).load == (1,)


def test_polling_finds_new_removed_and_changed_models() -> None:
    """R10."""
    lifecycle = Lifecycle("e", "poll")
    for model in FOUND.values():
        ready(lifecycle, model, 1)
    assert lifecycle.polled(FOUND) == []
    changed = Model("b", Stamp(versions={1: "b"}))
    assert lifecycle.polled({"b": changed, "c": Model("c")}) == [LoadModel("b"), LoadModel("c"), UnloadModel("a")]
    lifecycle.unloading("a", 1)
    lifecycle.forget("a")
    assert UnloadModel("a") not in lifecycle.polled({"b": changed})
    assert LoadModel("a") in lifecycle.polled(FOUND)


def test_an_override_lasts_until_the_model_is_unloaded() -> None:
    """R24."""
    lifecycle = Lifecycle("e", "explicit")
    assert lifecycle.override("a") is None
    lifecycle.set_override("a", Override("{1}"))
    lifecycle.set_override("a", Override("{2}"))
    assert lifecycle.override("a") == Override("{2}")
    assert lifecycle.forget("a") == Override("{2}")
    assert lifecycle.override("a") is None
    lifecycle.set_override("a", Override("{3}"))
    lifecycle.set_override("a", None)
    assert lifecycle.override("a") is None
    assert lifecycle.forget("never heard of") is None


def test_the_end_of_an_unloaded_version_is_not_told_once_it_is_loaded_again() -> None:
    lifecycle = Lifecycle("e", "explicit")
    ready(lifecycle, Model("a"), 1)
    assert lifecycle.unloading("a", 1).state == "UNLOADING"
    assert lifecycle.ready_versions("a") == []
    gone = lifecycle.unloaded("a", 1)
    assert gone is not None
    assert gone.reason == "unloaded"
    ready(lifecycle, Model("a"), 1)
    lifecycle.unloading("a", 1)
    lifecycle.loading("a", 1)
    assert lifecycle.unloaded("a", 1) is None
    ready(lifecycle, Model("a"), 1)
    assert lifecycle.unloaded("a", 1) is None
    assert lifecycle.ready_versions("a") == [1]


def test_texts_of_failed_loads() -> None:
    """R20, R21."""
    assert poll_failure("m").message == "failed to load 'm', failed to poll from model repository"
    error = load_failure("m", {2: Unavailable("later"), 1: InvalidArgument("bad")})
    assert error.message == (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: bad;"
        "version 2 is at UNAVAILABLE state: Unavailable: later;\n"
    )
    assert load_failure("m", {NO_VERSION: InvalidArgument("none")}).message == "load failed for model 'm': none\n"


def test_a_version_is_given_up_with_its_load() -> None:
    """R21: unless it is served from before."""
    lifecycle = Lifecycle("e", "explicit")
    lifecycle.loading("a", 1)
    ready(lifecycle, Model("a"), 2)
    lifecycle.loading("a", 2)
    given_up = lifecycle.abandoned("a", 1)
    assert given_up is not None
    assert (given_up.version, given_up.reason) == (1, "unloaded")
    assert lifecycle.abandoned("a", 2) is None
    assert lifecycle.abandoned("a", 3) is None
    assert lifecycle.ready_versions("a") == [2]


def test_failed_versions_are_given_up_when_nobody_wants_them() -> None:
    lifecycle = Lifecycle("e", "explicit")
    for version in (1, 2):
        lifecycle.loading("a", version)
        lifecycle.failed("a", version, InternalError("broken"))
    assert [(f.version, f.reason) for f in lifecycle.drop_failed("a", {1})] == [(2, "unloaded")]
    assert [f.version for f in lifecycle.drop_failed("a")] == [1]
    assert lifecycle.drop_failed("a") == []
    assert lifecycle.drop_failed("unknown") == []


def test_a_name_at_start_up_means_every_model_that_has_it() -> None:
    """R2, R8."""
    found = {key: Model(key) for key in ("/a::m", "/b::m", "/b::n")}
    lifecycle = Lifecycle("e", "explicit")
    assert [d.model for d in lifecycle.start(found, ("m", "unknown"))] == ["/a::m", "/b::m", "unknown"]
    for key in found:
        lifecycle.loading(key, 1)
    assert lifecycle.keys("m") == ["/a::m", "/b::m"]
    assert poll_failure("/a::m").message == "failed to load 'm', failed to poll from model repository"


def test_a_failed_load_is_tried_again_at_growing_intervals() -> None:
    assert [retry_delay_s(failures) for failures in (1, 2, 3, 6, 7)] == [5, 10, 20, 160, 300]
    assert retry_delay_s(10_000) == 300, "a load that has failed for days is tried as well"
