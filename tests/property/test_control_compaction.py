"""A catalog folded from what compaction leaves is the one folded from everything, then and after whatever follows."""

from __future__ import annotations

from typing import Any

from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batcher.housekeeping.compaction import superseded
from charonia.catalog.catalog import Catalog
from charonia.facts.events import (
    ExecutorDescribed,
    ExecutorDraining,
    Fact,
    LanesWeighed,
    ModelExcluded,
    ModelRequested,
    ModelRequestFinished,
    ProcessJoined,
    ProcessLeft,
    RepositoryScanned,
    TraceSettingChanged,
    VersionAnnounced,
    VersionFailed,
    VersionHealthChanged,
    VersionHeld,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
)
from charonia.models.config_forms import parse
from charonia.releases.route_rule import RouteRule, route_fact
from executors.configuration.config import normalise

EARLY = {"e1": "default", "e2": "default", "e3": "gpu"}
EXECUTORS = {**EARLY, "late": "default"}
CONFIGS = {
    model: normalise(
        parse(
            f'name: "{model}" backend: "python" input {{ name: "x" data_type: TYPE_FP32 dims: 1 }} '
            'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
        )
    ).SerializeToString()
    for model in ("a", "b")
}

models = st.sampled_from(sorted(CONFIGS))
versions = st.just(1)


def of_executor(executor: str) -> st.SearchStrategy[Fact]:
    return st.one_of(
        st.just(ProcessJoined("executor", executor, pool=EXECUTORS[executor])),
        st.builds(lambda used: ExecutorDescribed(executor, {"device": "cpu"}, used), st.integers(0, 2)),
        st.just(ExecutorDraining(executor)),
        st.builds(lambda m, why: ModelExcluded(executor, m, why), models, st.sampled_from(["one", "two"])),
        st.builds(
            lambda m, v, h: VersionAnnounced(executor, m, v, h, CONFIGS[m]),
            models,
            versions,
            st.sampled_from(["h1", "h2"]),
        ),
        st.builds(lambda m, v, s: VersionHeld(executor, m, v, s), models, versions, st.integers(0, 2)),
        st.builds(lambda reason: ProcessLeft("executor", executor, reason), st.sampled_from(["lost", "drained"])),
        st.builds(lambda ready: RepositoryScanned(executor, ("a", "b"), "explicit", ready), st.booleans()),
        st.builds(
            lambda m, v, h, s: VersionLoaded(executor, m, v, h, s, CONFIGS[m]),
            models,
            versions,
            st.sampled_from(["h1", "h2"]),
            st.integers(1, 2),
        ),
        st.builds(lambda m, v, w: VersionHealthChanged(executor, m, v, w), models, versions, st.booleans()),
        st.builds(
            lambda m, v, s: VersionStateChanged(executor, m, v, s),
            models,
            versions,
            st.sampled_from(["LOADING", "UNLOADING"]),
        ),
        st.builds(lambda m, v: VersionFailed(executor, m, v, 1, "why"), models, versions),
        st.builds(lambda m, v: VersionUnloaded(executor, m, v), models, versions),
    )


others: st.SearchStrategy[Fact] = st.one_of(
    st.just(ProcessJoined("gateway", "g")),
    st.just(ProcessLeft("gateway", "g", "lost")),
    st.builds(lambda w: LanesWeighed({"3": w}), st.integers(1, 4)),
    st.builds(lambda m, r: TraceSettingChanged(m, {"rate": r}, ""), st.sampled_from(["", "a"]), st.integers(1, 3)),
    st.builds(lambda r, v: route_fact("a", r, RouteRule(v) if v else None), st.integers(1, 4), st.integers(0, 2)),
    st.just(ModelRequested("load", "a", "r")),
    st.just(ModelRequestFinished("e1", "r")),
)
facts = st.one_of(*[of_executor(executor) for executor in EXECUTORS], others)
histories = st.lists(facts, max_size=40).map(
    # nobody is heard before it has joined
    lambda found: [*(ProcessJoined("executor", executor, pool=pool) for executor, pool in EARLY.items()), *found]
)


def folded(facts: list[Fact]) -> Catalog:
    catalog = Catalog()
    for fact in facts:
        catalog.apply(fact)
    return catalog


def seen(catalog: Catalog) -> Any:
    """What anybody can ask it."""
    return (
        [
            (v.model, v.version, v.content_hash, v.slots, v.accepting, v.on_demand)
            for model in catalog.served_models()
            for v in catalog.held(model).values()
        ],
        catalog.index(),
        sorted(catalog.processes),
        sorted(catalog.live_executors()),
        catalog.lane_weights,
        catalog.trace_settings,
        catalog.routes,
        catalog.started(),
        catalog.all_ready(),
        catalog.started(awaited=True),
        catalog.all_ready(awaited=True),
        [(view.described, view.excluded) for _, view in sorted(catalog.executors.items())],
        sorted(catalog.answering_executors()),
        [catalog.failure(model, 1) for model in CONFIGS],
        catalog.control_modes(),
        [catalog.may_come(model) for model in CONFIGS],
    )


SCANNED = RepositoryScanned("e2", ("a", "b"), "explicit", ready=True)
LOST, BACK = ProcessLeft("executor", "e1", "lost"), ProcessJoined("executor", "e1", pool="default")
JOINED = [ProcessJoined("executor", executor, pool=pool) for executor, pool in EARLY.items()]


@settings(max_examples=examples(500))
# said by one that is thought to be gone, and that comes back
@example([*JOINED, LOST, SCANNED, ExecutorDraining("e1"), BACK, SCANNED], [])
@example([*JOINED, LOST, SCANNED, RepositoryScanned("e1", (), "none", ready=True), BACK, SCANNED], [])
# a scan of one that was lost itself replaces nobody
@example([*JOINED, LOST, SCANNED, ProcessLeft("executor", "e2", "lost"), SCANNED], [])
# what is unloaded after another took its place is still what it serves when it is back
@example(
    [
        *(*JOINED, VersionLoaded("e1", "a", 1, "h", 1, CONFIGS["a"]), LOST, SCANNED),
        *(VersionUnloaded("e2", "a", 1), BACK, SCANNED),
    ],
    [],
)
@given(histories, st.lists(facts, max_size=10))
def test_nothing_that_is_needed_goes(history: list[Fact], later: list[Fact]) -> None:
    needless = set(superseded(history))
    kept = [fact for at, fact in enumerate(history) if at not in needless]
    assert seen(folded(kept)) == seen(folded(history))
    # one that is gone and comes back says everything again, which is another history
    known = set(folded(history).live_executors())
    later = [f for f in later if getattr(f, "role", "executor") != "executor" or getattr(f, "incarnation", "") in known]
    assert seen(folded(kept + later)) == seen(folded(history + later))
    again = set(superseded(kept))
    assert seen(folded([f for at, f in enumerate(kept) if at not in again])) == seen(folded(history))


@settings(max_examples=examples(500))
@given(histories)
def test_a_version_that_the_index_says_is_ready_has_an_executor(history: list[Fact]) -> None:
    catalog = folded(history)
    for row in catalog.index():
        if row.state == "READY":
            served = catalog.find(row.model, row.version)
            assert served.slots
            assert all(catalog.executors[executor].versions.get(row.model, 1) for executor in served.slots)


attempts = st.one_of(
    st.builds(lambda e: VersionStateChanged(e, "a", 1, "LOADING"), st.sampled_from(["e1", "e2"])),
    st.builds(
        lambda e, why: VersionFailed(e, "a", 1, 1, why), st.sampled_from(["e1", "e2"]), st.sampled_from(["one", "two"])
    ),
)
between = facts.filter(lambda fact: not isinstance(fact, VersionHealthChanged | ExecutorDescribed))
"""What may change a version or its executor."""


@settings(max_examples=examples(500))
@given(st.lists(attempts | attempts | between, max_size=30), st.lists(between, max_size=5))
def test_no_attempt_at_a_load_that_is_needed_goes(history: list[Fact], later: list[Fact]) -> None:
    test_nothing_that_is_needed_goes.hypothesis.inner_test([*JOINED, *history], later)  # type: ignore[attr-defined]


def test_attempts_at_a_load_that_fails_again_and_again_leave_the_first_and_the_last() -> None:
    failing: list[list[Fact]] = [
        [VersionStateChanged("e1", "a", 1, "LOADING"), VersionFailed("e1", "a", 1, 1, "no memory")],
        [VersionFailed("e1", "a", -1, 1, "no object store")],
    ]
    for attempt in failing:
        for before in ([], [VersionLoaded("e1", "a", 1, "h", 1, CONFIGS["a"])]):
            history = [*JOINED, *before, *attempt * 50]
            assert len(history) - len(superseded(history)) <= len(JOINED) + len(before) + 2 * len(attempt)


def test_what_came_and_went_leaves_nothing() -> None:
    history: list[Fact] = []
    for number in range(50):
        name = f"e{number}"
        history += [
            ProcessJoined("executor", name),
            RepositoryScanned(name, ("a",), "none", ready=False),
            VersionStateChanged(name, "a", 1, "LOADING"),
            VersionLoaded(name, "a", 1, "h", 1, CONFIGS["a"]),
            RepositoryScanned(name, ("a",), "none", ready=True),
            ProcessJoined("gateway", f"g{number}"),
            ProcessLeft("gateway", f"g{number}", "drained"),
            ModelRequested("load", "a", f"r{number}"),
            ModelRequestFinished(name, f"r{number}"),
        ]
        if number < 49:
            history.append(ProcessLeft("executor", name, "lost"))
    needless = set(superseded(history))
    assert len(history) - len(needless) <= 6
