"""Which control facts no reader needs any more: a catalog folded without them is the same. Pure.

`ctl` is read from its beginning by every process that starts, and a log that lives for months would grow with each
process that ever joined. Kinds this release does not know are kept. When to look and what to delete is the batcher's.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """What the whole stream says; positions in it by executor, model and version."""

    gone: set[str]
    replaced: set[str]
    """Executors that are gone and whose place was taken."""
    scans: dict[str, int]
    replaced_by: set[int]
    """Scans that may have replaced an executor which came back later."""
    newest_scan: dict[str, int]
    """Of those that are gone, when their pool was last scanned by one that is not."""
    waited: dict[str, int]
    """Executors that left without having been replaced since, and when they first did."""
    newest: dict[tuple[str, int], int] = field(default_factory=dict)
    """Whose content hash is the current one."""
    loaded: dict[tuple[str, str, int], int] = field(default_factory=dict)
    held_before: set[int] = field(default_factory=set)
    """What another word of the same kind follows at once."""
    health: dict[tuple[str, str, int], int] = field(default_factory=dict)
    last_said: dict[tuple[str, str], int] = field(default_factory=dict)
    last_weights: int = -1
    last_traced: dict[str, int] = field(default_factory=dict)
    telling: set[str] = field(default_factory=set)


def superseded(facts: Sequence[Fact]) -> list[int]:
    """The positions of facts that may go, ascending; `facts` is the whole stream, oldest first.

    Only those that lie some time back may be deleted: a load request is still answered by who has just read it.
    """
    survey = _processes(facts)
    _versions(facts, survey)
    return [at for at, fact in enumerate(facts) if _is_needless(at, fact, survey)]


def _processes(facts: Sequence[Fact]) -> _Survey:
    last_left = {fact.incarnation: at for at, fact in enumerate(facts) if isinstance(fact, ProcessLeft)}
    last_joined = {fact.incarnation: at for at, fact in enumerate(facts) if isinstance(fact, ProcessJoined)}
    gone = {process for process, at in last_left.items() if last_joined.get(process, -1) < at}
    scans, replacing, returned = _scans(facts)
    # an executor that is gone is waited for until another of its pool has said what it serves (`Catalog`)
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
    """The last complete scan of each executor; those that may have replaced others; and when one last came back.

    A scan of an executor that was taken for lost replaced none (`Catalog._scanned`).
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
                survey.newest[(fact.model, fact.version)] = survey.loaded[key] = at
        elif isinstance(fact, VersionHealthChanged):
            survey.health[(fact.executor, fact.model, fact.version)] = at
        elif isinstance(fact, LanesWeighed):
            survey.last_weights = at
        elif isinstance(fact, TraceSettingChanged):
            survey.last_traced[fact.model] = at
        elif isinstance(fact, ExecutorDescribed | ModelExcluded):
            survey.last_said[_about(fact)] = at
    for at in survey.newest.values():
        fact = facts[at]
        if isinstance(fact, VersionLoaded | VersionAnnounced):
            survey.telling.add(fact.executor)


def _is_needless(at: int, fact: Fact, survey: _Survey) -> bool:
    replaced, telling = survey.replaced, survey.telling
    match fact:
        case ModelRequested() | ModelRequestFinished():
            return True
        case LanesWeighed():
            return at < survey.last_weights
        case TraceSettingChanged():
            return at < survey.last_traced[fact.model]
        case ProcessJoined() | ProcessLeft():
            process = fact.incarnation
            is_executor = fact.role == "executor"
            return process in survey.gone and (not is_executor or (process in replaced and process not in telling))
        case RepositoryScanned():
            executor = fact.executor
            if executor in replaced and at < survey.newest_scan[executor] and executor not in telling:
                return True
            return at < survey.scans.get(executor, -1) and at not in survey.replaced_by
        case ExecutorDescribed() | ModelExcluded():
            return at < survey.last_said[_about(fact)] or fact.executor in replaced
        case ExecutorDraining():
            return fact.executor in replaced
        case VersionHealthChanged():
            key = (fact.executor, fact.model, fact.version)
            told_at = survey.loaded.get(key, -1)
            return at < max(told_at, survey.health[key]) or (
                fact.executor in replaced and told_at != survey.newest.get((fact.model, fact.version))
            )
    if not isinstance(fact, _OfVersion):
        return False
    if at in survey.held_before:
        return True
    told_anew = at < survey.loaded.get((fact.executor, fact.model, fact.version), -1)
    if _tells_others(fact):
        # one that is gone, or was, forgot a version because of it (`Catalog._version`)
        return told_anew and all(left > at for left in survey.waited.values())
    return told_anew or (fact.executor in replaced and at != survey.newest.get((fact.model, fact.version)))


def _about(fact: ExecutorDescribed | ModelExcluded) -> tuple[str, str]:
    return (fact.executor, fact.model if isinstance(fact, ModelExcluded) else "")


def _tells_others(fact: _OfVersion) -> bool:
    """Whether it also says something of executors that are gone (`Catalog._version`)."""
    return isinstance(fact, VersionUnloaded) or (isinstance(fact, VersionStateChanged) and fact.state == "UNLOADING")
