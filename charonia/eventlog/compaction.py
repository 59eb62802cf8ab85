"""Which control facts no reader needs any more: a catalog folded without them is the same. Pure.

`ctl` is read from its beginning by every process that starts, and a log that lives for months would grow with each
process that ever joined. Kinds this release does not know are kept. When to look and what to delete is the batcher's.
"""

from __future__ import annotations

from collections.abc import Sequence

from charonia.events import (
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
    VersionAnnounced,
    VersionFailed,
    VersionHealthChanged,
    VersionHeld,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
)

_OfVersion = VersionStateChanged | VersionLoaded | VersionAnnounced | VersionHeld | VersionFailed | VersionUnloaded


def superseded(facts: Sequence[Fact]) -> list[int]:
    """The positions of facts that may go, ascending; `facts` is the whole stream, oldest first.

    Only those that lie some time back may be deleted: a load request is still answered by who has just read it.
    """
    last_left = {fact.incarnation: at for at, fact in enumerate(facts) if isinstance(fact, ProcessLeft)}
    last_joined = {fact.incarnation: at for at, fact in enumerate(facts) if isinstance(fact, ProcessJoined)}
    gone = {process for process, at in last_left.items() if last_joined.get(process, -1) < at}
    scans = {fact.executor: at for at, fact in enumerate(facts) if isinstance(fact, RepositoryScanned) and fact.ready}
    # an executor that is gone is waited for until another of its pool has said what it serves (`Catalog`)
    pools = {fact.incarnation: fact.pool for fact in facts if isinstance(fact, ProcessJoined)}
    newest_scans: dict[str, int] = {}
    for executor, at in scans.items():
        if executor not in gone and at > last_joined.get(executor, at):
            pool = pools.get(executor, "")
            newest_scans[pool] = max(at, newest_scans.get(pool, -1))
    newest_scan = {process: newest_scans.get(pools.get(process, ""), -1) for process in gone}
    replaced = {process for process in gone if last_left[process] < newest_scan[process]}
    newest: dict[tuple[str, int], int] = {}
    loaded: dict[tuple[str, str, int], int] = {}
    health: dict[tuple[str, str, int], int] = {}
    last_weights = -1
    last_said: dict[tuple[str, str], int] = {}
    for at, fact in enumerate(facts):
        if isinstance(fact, VersionLoaded | VersionAnnounced):
            # whose content hash is the current one
            newest[(fact.model, fact.version)] = loaded[(fact.executor, fact.model, fact.version)] = at
        elif isinstance(fact, VersionHealthChanged):
            health[(fact.executor, fact.model, fact.version)] = at
        elif isinstance(fact, LanesWeighed):
            last_weights = at
        elif isinstance(fact, ExecutorDescribed | ModelExcluded):
            last_said[_about(fact)] = at
    telling = {
        fact.executor for at in newest.values() if isinstance(fact := facts[at], VersionLoaded | VersionAnnounced)
    }
    found: list[int] = []
    for at, fact in enumerate(facts):
        match fact:
            case ModelRequested() | ModelRequestFinished():
                needless = True
            case LanesWeighed():
                needless = at < last_weights
            case ProcessJoined() | ProcessLeft():
                process = fact.incarnation
                is_executor = fact.role == "executor"
                needless = process in gone and (not is_executor or (process in replaced and process not in telling))
            case RepositoryScanned():
                needless = at < scans.get(fact.executor, -1) or (
                    fact.executor in replaced and at < newest_scan[fact.executor] and fact.executor not in telling
                )
            case ExecutorDescribed() | ModelExcluded():
                needless = at < last_said[_about(fact)] or fact.executor in replaced
            case ExecutorDraining():
                needless = fact.executor in replaced
            case (
                VersionStateChanged()
                | VersionLoaded()
                | VersionAnnounced()
                | VersionHeld()
                | VersionFailed()
                | VersionUnloaded()
            ):
                needless = at < loaded.get((fact.executor, fact.model, fact.version), -1) or (
                    fact.executor in replaced
                    and at != newest.get((fact.model, fact.version))
                    and not _tells_others(fact)
                )
            case VersionHealthChanged():
                key = (fact.executor, fact.model, fact.version)
                needless = at < max(loaded.get(key, -1), health[key]) or (
                    fact.executor in replaced and loaded.get(key, -1) != newest.get((fact.model, fact.version))
                )
            case _:
                needless = False
        if needless:
            found.append(at)
    return found


def _about(fact: ExecutorDescribed | ModelExcluded) -> tuple[str, str]:
    return (fact.executor, fact.model if isinstance(fact, ModelExcluded) else "")


def _tells_others(fact: _OfVersion) -> bool:
    """Whether it also says something of executors that are gone (`Catalog._version`)."""
    return isinstance(fact, VersionUnloaded) or (isinstance(fact, VersionStateChanged) and fact.state == "UNLOADING")
