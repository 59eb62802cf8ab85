"""Finds control facts that no reader needs: a catalog folded without them is the same. Pure.

Every process reads `ctl` from its beginning when it starts, and without compaction the stream would grow with each
process that ever joined. Facts of kinds unknown to this release are kept. `stream_trimming` deletes what this
finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
    RouteChanged,
    TraceSettingChanged,
    VersionAnnounced,
    VersionFailed,
    VersionHealthChanged,
    VersionHeld,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
)

_OfVersion = VersionStateChanged | VersionLoaded | VersionAnnounced | VersionHeld | VersionFailed | VersionUnloaded


@dataclass(slots=True)
class _Survey:
    """An index of the whole stream: positions by executor, model and version."""

    gone: set[str]
    replaced: set[str]
    """Executors that left and were replaced."""
    scans: dict[str, int]
    replaced_by: set[int]
    """Scans that may have replaced an executor which came back later."""
    newest_scan: dict[str, int]
    """For pools of executors that left: when another executor last scanned the pool."""
    waited: dict[str, int]
    """Executors that left without a replacement, and when they first did."""
    loaded: dict[tuple[str, str, int], int] = field(default_factory=dict)
    held_before: set[int] = field(default_factory=set)
    """Facts that the next fact of the same kind replaces at once."""
    tried_again: set[int] = field(default_factory=set)
    """Attempts at a load that fails again and again, but for the first and the last."""
    health: dict[tuple[str, str, int], int] = field(default_factory=dict)
    last_said: dict[tuple[str, str], int] = field(default_factory=dict)
    last_weights: int = -1
    last_traced: dict[str, int] = field(default_factory=dict)
    routed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each model with a routing rule: the revision that counts, and the fact that has it."""


def superseded(facts: Sequence[Fact]) -> list[int]:
    """The positions of facts that may be deleted, ascending; `facts` is the whole stream, oldest first. Delete only
    those of some age: the process that has just read a load request still answers it.
    """
    survey = _processes(facts)
    _versions(facts, survey)
    survey.tried_again.update(_tried_again(facts))
    return [at for at, fact in enumerate(facts) if _is_needless(at, fact, survey)]


def _processes(facts: Sequence[Fact]) -> _Survey:
    last_left = {fact.incarnation: at for at, fact in enumerate(facts) if isinstance(fact, ProcessLeft)}
    last_joined = {fact.incarnation: at for at, fact in enumerate(facts) if isinstance(fact, ProcessJoined)}
    gone = {process for process, at in last_left.items() if last_joined.get(process, -1) < at}
    scans, replacing, returned = _scans(facts)
    # the catalog waits for an executor that left until another of its pool reports what it serves (`Catalog`)
    pools = {fact.incarnation: fact.pool for fact in facts if isinstance(fact, ProcessJoined)}
    newest_scans: dict[str, int] = {}
    for executor, at in scans.items():
        if executor not in gone and at > last_joined.get(executor, at):
            pool = pools.get(executor, "")
            newest_scans[pool] = max(at, newest_scans.get(pool, -1))
    newest_scan = {process: newest_scans.get(pools.get(process, ""), -1) for process in gone}
    replaced = {process for process in gone if last_left[process] < newest_scan[process]}
    waited: dict[str, int] = {}
    for at, fact in enumerate(facts):
        if isinstance(fact, ProcessLeft) and fact.role == "executor" and fact.incarnation not in replaced:
            waited.setdefault(fact.incarnation, at)
    return _Survey(gone, replaced, scans, {at for at in replacing if at < returned}, newest_scan, waited)


def _scans(facts: Sequence[Fact]) -> tuple[dict[str, int], list[int], int]:
    """The last complete scan of each executor; scans that may have replaced others; when an executor last came back. A
    scan by an executor that was presumed dead replaced none (`Catalog._scanned`).
    """
    scans: dict[str, int] = {}
    replacing: list[int] = []
    returned = -1
    lost: set[str] = set()
    scanned: set[str] = set()
    for at, fact in enumerate(facts):
        if isinstance(fact, RepositoryScanned):
            if fact.ready and fact.executor not in lost:
                scans[fact.executor] = at
                if fact.executor not in scanned:
                    scanned.add(fact.executor)
                    replacing.append(at)
        elif isinstance(fact, ProcessLeft | ProcessJoined) and fact.role == "executor":
            scanned.clear()
            if isinstance(fact, ProcessLeft):
                lost.add(fact.incarnation)
            elif fact.incarnation in lost:
                lost.discard(fact.incarnation)
                returned = at
    return scans, replacing, returned


def _versions(facts: Sequence[Fact], survey: _Survey) -> None:
    before: dict[tuple[str, str, int], int] = {}
    for at, fact in enumerate(facts):
        if isinstance(fact, _OfVersion):
            key = (fact.executor, fact.model, fact.version)
            if isinstance(fact, VersionHeld) and key in before and isinstance(facts[before[key]], VersionHeld):
                survey.held_before.add(before[key])
            before[key] = at
            if isinstance(fact, VersionLoaded | VersionAnnounced):
                survey.loaded[key] = at
        elif isinstance(fact, VersionHealthChanged):
            survey.health[(fact.executor, fact.model, fact.version)] = at
        elif isinstance(fact, LanesWeighed):
            survey.last_weights = at
        elif isinstance(fact, TraceSettingChanged):
            survey.last_traced[fact.model] = at
        elif isinstance(fact, RouteChanged):
            if fact.revision > survey.routed.get(fact.model, (0, 0))[0]:
                survey.routed[fact.model] = fact.revision, at
        elif isinstance(fact, ExecutorDescribed | ModelExcluded):
            survey.last_said[_about(fact)] = at


def _tried_again(facts: Sequence[Fact]) -> Iterator[int]:
    """Which attempts at a load change nothing. After the first failure in a row of them only the last attempt counts.

    Facts that may change the version or its executor in between end the row.
    """
    rows: dict[tuple[str, int], dict[str, list[int]]] = {}
    """Positions by model and version, and executor."""
    for at, fact in enumerate(facts):
        ended: list[list[int]] = []
        if isinstance(fact, RepositoryScanned) or (
            isinstance(fact, ProcessJoined | ProcessLeft) and fact.role == "executor"
        ):
            ended = [row for of_version in rows.values() for row in of_version.values()]
            rows.clear()
        elif isinstance(fact, _OfVersion):
            of_version = rows.setdefault((fact.model, fact.version), {})
            if _is_attempt(fact):
                of_version.setdefault(fact.executor, []).append(at)
            elif _tells_others(fact):
                ended = list(of_version.values())
                of_version.clear()
            else:
                ended = [of_version.pop(fact.executor, [])]
        for row in ended:
            yield from _between(facts, row)
    for of_version in rows.values():
        for row in of_version.values():
            yield from _between(facts, row)


def _is_attempt(fact: Fact) -> bool:
    return isinstance(fact, VersionFailed) or (isinstance(fact, VersionStateChanged) and fact.state == "LOADING")


def _between(facts: Sequence[Fact], row: Sequence[int]) -> list[int]:
    """What is between the first failure in a row of attempts and the last attempt."""
    failed = [at for at in row if isinstance(facts[at], VersionFailed)]
    if not failed:
        return []
    begun = [at for at in row if at > failed[0] and not isinstance(facts[at], VersionFailed)]
    kept = {failed[0], failed[-1], *begun[-1:]}
    return [at for at in row if at > failed[0] and at not in kept]


def _is_needless(at: int, fact: Fact, survey: _Survey) -> bool:
    replaced = survey.replaced
    match fact:
        case ModelRequested() | ModelRequestFinished():
            return True
        case LanesWeighed():
            return at < survey.last_weights
        case TraceSettingChanged():
            return at < survey.last_traced[fact.model]
        case RouteChanged():
            # one that lost against the fact that counts has to go before that fact does
            return at < survey.routed.get(fact.model, (0, -1))[1]
        case ProcessJoined() | ProcessLeft():
            process = fact.incarnation
            is_executor = fact.role == "executor"
            return process in survey.gone and (not is_executor or process in replaced)
        case RepositoryScanned():
            executor = fact.executor
            if executor in replaced and at < survey.newest_scan[executor]:
                return True
            return at < survey.scans.get(executor, -1) and at not in survey.replaced_by
        case ExecutorDescribed() | ModelExcluded():
            return at < survey.last_said[_about(fact)] or fact.executor in replaced
        case ExecutorDraining():
            return fact.executor in replaced
        case VersionHealthChanged():
            key = (fact.executor, fact.model, fact.version)
            told_at = survey.loaded.get(key, -1)
            return at < max(told_at, survey.health[key]) or fact.executor in replaced
    if not isinstance(fact, _OfVersion):
        return False
    if at in survey.held_before or at in survey.tried_again:
        return True
    told_anew = at < survey.loaded.get((fact.executor, fact.model, fact.version), -1)
    if _tells_others(fact):
        # an executor that left, now or earlier, dropped a version because of it (`Catalog._version`)
        return told_anew and all(left > at for left in survey.waited.values())
    return told_anew or fact.executor in replaced


def _about(fact: ExecutorDescribed | ModelExcluded) -> tuple[str, str]:
    return (fact.executor, fact.model if isinstance(fact, ModelExcluded) else "")


def _tells_others(fact: _OfVersion) -> bool:
    """Whether it also concerns executors that left (`Catalog._version`)."""
    return isinstance(fact, VersionUnloaded) or (isinstance(fact, VersionStateChanged) and fact.state == "UNLOADING")
