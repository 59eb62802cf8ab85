"""Derives the state of the whole server from all executors: start-up finished, all ready, more to come. Pure. `catalog`
folds the facts.
"""

from __future__ import annotations

from collections.abc import Collection

from .executor_views import AWAITED, LOADING, READY, UNAVAILABLE, UNLOADED, UNLOADING, ExecutorView, index

Views = Collection[ExecutorView]


def may_come(views: Views, model: str) -> bool:
    """Whether a model that no executor holds may be held soon: an executor loads it, is starting, or is missing. Its
    accepted requests wait; after a full restart that may be all that happens.
    """
    live = [view for view in views if not view.away]
    return not live or any(
        view.scan is None
        or not view.scan.ready
        or any(entry.state == LOADING for entry in view.versions.of(model).values())
        for view in live
    )


def started(views: Views, *, awaited: bool) -> bool:
    """Some executor has finished its start-up load; with `awaited`, one that left without a successor counts too,
    because requests for its versions are accepted and wait in the log.
    """
    return any(has_loaded(view) and (awaited or not view.lost) for view in views)


def has_loaded(view: ExecutorView) -> bool:
    """Whether an executor has finished its start-up load."""
    return view.scan is not None and view.scan.ready


def loading(views: Views) -> list[str]:
    """The models that executors load now, sorted."""
    return sorted({model for view in views for model, _, entry in view.versions if entry.state == LOADING})


def all_ready(views: Views, *, awaited: bool) -> bool:
    """R40's strict readiness: no version that should be served failed or is missing; unloaded models do not count. Nor
    do failed loads on demand: a request for a broken model must not make the server not ready; and, as in Triton,
    models whose configuration cannot be used, and ensembles without the models that they need. A load of the same
    version that failed on another executor counts all the same. With `awaited`, versions of an executor that left do
    not count either, until its successor has loaded them.
    """
    left: set[tuple[str, int]] = set()
    excused: set[tuple[str, int]] = set()
    failed: set[tuple[str, int]] = set()
    for view in views:
        for model, version, entry in view.versions:
            if awaited and view.away and entry.loaded is not None:
                left.add((model, version))
            elif entry.state == UNAVAILABLE and (entry.on_demand or entry.unpolled):
                excused.add((model, version))
            elif entry.state == UNAVAILABLE and entry.reason != UNLOADED and not view.away:
                failed.add((model, version))
    excused -= failed
    return all(
        row.state in (READY, "", UNLOADING)
        or row.reason == UNLOADED
        or (row.model, row.version) in excused
        or ((row.model, row.version) in left and (row.state == LOADING or row.reason in AWAITED))
        for row in index(views)
    )
