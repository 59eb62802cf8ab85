"""What the states of all executors mean together: whether the start is over, all is ready, more may come. Pure.

Folding what executors say is `catalog`'s.
"""

from __future__ import annotations

from collections.abc import Collection

from .executor_views import AWAITED, LOADING, READY, UNAVAILABLE, UNLOADED, UNLOADING, ExecutorView, index

Views = Collection[ExecutorView]


def may_come(views: Views, model: str) -> bool:
    """Whether a model that no executor holds may be held soon: an executor loads it, still starts, or is missing.

    What was accepted for it waits meanwhile; after a restart of everything that may be all there is to do.
    """
    live = [view for view in views if not view.away]
    return not live or any(
        view.scan is None
        or not view.scan.ready
        or any(entry.state == LOADING for entry in view.versions.of(model).values())
        for view in live
    )


def started(views: Views, *, awaited: bool) -> bool:
    """Some executor has finished its start-up load; with `awaited` one that has left and has no successor counts.

    What such a one served is accepted and waits in the log.
    """
    return any(has_loaded(view) and (awaited or not view.lost) for view in views)


def has_loaded(view: ExecutorView) -> bool:
    """Whether an executor has ended its start-up load."""
    return view.scan is not None and view.scan.ready


def loading(views: Views) -> list[str]:
    """The models that executors load now, sorted."""
    return sorted({model for view in views for model, _, entry in view.versions if entry.state == LOADING})


def all_ready(views: Views, *, awaited: bool) -> bool:
    """R40's strict readiness: nothing that should be served failed or is missing; unloaded models do not count.

    Nor does what could not be loaded on demand: a request for a broken model must not end the readiness of all.
    With `awaited` neither do those whose executor has left, while its successor has not come or still loads them.
    """
    left: set[tuple[str, int]] = set()
    tried: set[tuple[str, int]] = set()
    for view in views:
        for model, version, entry in view.versions:
            if awaited and view.away and entry.loaded is not None:
                left.add((model, version))
            elif entry.on_demand and entry.state == UNAVAILABLE:
                tried.add((model, version))
    return all(
        row.state in (READY, "", UNLOADING)
        or row.reason == UNLOADED
        or (row.model, row.version) in tried
        or ((row.model, row.version) in left and (row.state == LOADING or row.reason in AWAITED))
        for row in index(views)
    )
