"""The log line about progress while the ports wait for the first loads: finished executors, running loads. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from charonia.catalog.executor_views import LOADING, ExecutorView
from charonia.catalog.rollout import has_loaded
from charonia.models.names import name_of

_MAX_NAMED = 10


class StartProgress:
    """The progress of `wanted` executors. Times are seconds of one clock; a load begins when it is first seen."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._since_s: dict[tuple[str, str, int], float] = {}

    def see(self, executors: Mapping[str, ExecutorView], now_s: float) -> None:
        """Update the running loads."""
        found = {
            (executor, model, version)
            for executor, view in executors.items()
            if not view.away
            for model, version, entry in view.versions
            if entry.state == LOADING
        }
        self._since_s = {load: self._since_s.get(load, now_s) for load in sorted(found)}

    def text(self, executors: Mapping[str, ExecutorView], now_s: float) -> str:
        """The text of the log line, the longest load first."""
        done = sum(has_loaded(view) and not view.away for view in executors.values())
        loads = sorted(self._since_s.items(), key=lambda load: load[1])
        loading = [
            f"'{name_of(model)}' version {version} since {now_s - since_s:.0f} s on executor {executor} "
            f"(pid {executors[executor].joined.pid})"
            for (executor, model, version), since_s in loads[:_MAX_NAMED]
        ]
        if len(loads) > _MAX_NAMED:
            loading.append(f"{len(loads) - _MAX_NAMED} more")
        what = "; still loading " + ", ".join(loading) if loading else ""
        return f"the ports stay closed: {done} of {self._wanted} executors have loaded their models{what}"
