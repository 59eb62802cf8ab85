"""A gateway's readiness while executors come and go."""

from __future__ import annotations

import pytest

from charonia.catalog.catalog import Catalog
from charonia.facts.events import (
    ExecutorDraining,
    Fact,
    ProcessJoined,
    ProcessLeft,
    RepositoryScanned,
    VersionFailed,
    VersionLoaded,
    VersionStateChanged,
)
from gateway.reports import readiness
from gateway.reports.readiness import Readiness
from protos.model_config_pb2 import ModelConfig

CONFIG = ModelConfig(name="m").SerializeToString()
GRACE_S = 10


def executor(name: str, pool: str = "default", model: str = "m") -> list[Fact]:
    return [
        ProcessJoined("executor", name, pool=pool),
        VersionLoaded(name, model, 1, "h", 1, CONFIG),
        RepositoryScanned(name, (model,), "none", ready=True),
    ]


class Gateway:
    """A catalog, its readiness and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, strict: bool = True, grace_s: float = GRACE_S) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(readiness, "monotonic_ns", lambda: int(self.now_s * 1e9))
        self.catalog = Catalog()
        self.readiness = Readiness(self.catalog, strict=strict, grace_s=grace_s)

    def hears(self, *facts: Fact) -> bool:
        for fact in facts:
            self.catalog.apply(fact)
        return self.readiness.ready()


@pytest.fixture(params=[True, False], ids=["strict", "not strict"])
def gateway(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    found = Gateway(monkeypatch, strict=request.param)
    found.readiness.watch()
    return found


def test_the_restart_of_the_only_executor(gateway: Gateway) -> None:
    assert not gateway.hears()
    assert gateway.hears(*executor("e1"))
    gateway.now_s += 100
    assert gateway.hears(ExecutorDraining("e1"))
    gateway.now_s += GRACE_S - 1
    assert gateway.hears(ProcessLeft("executor", "e1", "drained"))
    gateway.now_s += GRACE_S - 1
    joined, loaded, scanned = executor("e2")
    assert gateway.hears(joined, VersionStateChanged("e2", "m", 1, "LOADING")), "its successor loads"
    assert gateway.hears(loaded, scanned)
    gateway.now_s += 100
    assert gateway.hears()


def test_nobody_comes_back(gateway: Gateway) -> None:
    gateway.hears(*executor("e1"))
    assert gateway.hears(ProcessLeft("executor", "e1", "lost"))
    gateway.now_s += GRACE_S
    assert not gateway.hears()
    assert gateway.hears(*executor("e2"))


def test_what_is_only_read_of_is_not_waited_for(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    later = Gateway(monkeypatch)
    for fact in (*executor("e1"), ProcessLeft("executor", "e1", "lost")):
        later.catalog.apply(fact)  # before it began to watch
    later.readiness.watch()
    assert not later.hears()


def test_another_log_knows_nobody(gateway: Gateway) -> None:
    gateway.hears(*executor("e1"))
    gateway.catalog.clear()
    gateway.readiness.forget()
    assert not gateway.hears(ProcessLeft("executor", "e1", "lost"))


def test_without_grace_the_last_executor_takes_readiness_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway(monkeypatch, grace_s=0)
    gateway.readiness.watch()
    assert gateway.hears(*executor("e1"))
    assert not gateway.hears(ExecutorDraining("e1"))


def test_strictness_is_for_what_failed_and_for_other_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway(monkeypatch)
    gateway.readiness.watch()
    assert gateway.hears(*executor("e1"), *executor("g1", "gpu", "n"))
    assert gateway.hears(ProcessLeft("executor", "g1", "lost")), "the pool gpu restarts"
    gateway.now_s += GRACE_S
    assert not gateway.hears(), "n is served by nobody"
    assert gateway.hears(*executor("g2", "gpu", "n"))
    assert gateway.hears(ProcessLeft("executor", "g2", "lost"))
    assert not gateway.hears(ProcessJoined("executor", "g3", pool="gpu"), VersionFailed("g3", "n", 1, 1, "why"))
