"""Executions that share cores: while more run than there are cores, each gets an equal part of them. Pure.

An execution is taken to use one core for all of its time. Processor sharing is what an operating system comes to for
processes of equal priority: https://en.wikipedia.org/wiki/Processor_sharing.
"""

from __future__ import annotations

from collections.abc import Iterable


class SharedCores:
    """Who runs, and when each would end. Without `cores` (0) everyone has a core."""

    def __init__(self, cores: float = 0.0) -> None:
        self._cores = cores
        self._left_ns: dict[str, float] = {}
        self._now_ns = 0

    def begin(self, name: str, service_ns: int, now_ns: int) -> None:
        """`name` runs from now on, and takes `service_ns` of a core. `now_ns` never falls."""
        self._advance(now_ns)
        self._left_ns[name] = service_ns

    def end(self, name: str, now_ns: int) -> None:
        """`name` runs no longer."""
        self._advance(now_ns)
        del self._left_ns[name]

    def ends_ns(self, names: Iterable[str] = ()) -> Iterable[tuple[str, int]]:
        """When those of `names` would end, or all who run, if none began or ended before."""
        pace = self._pace()
        for name in names or tuple(self._left_ns):
            yield name, self._now_ns + max(0, round(self._left_ns[name] / pace))

    @property
    def are_short(self) -> bool:
        """Whether more run than there are cores."""
        return bool(self._cores) and len(self._left_ns) > self._cores

    def _pace(self) -> float:
        return self._cores / len(self._left_ns) if self.are_short else 1.0

    def _advance(self, now_ns: int) -> None:
        done_ns = (now_ns - self._now_ns) * self._pace()
        self._now_ns = now_ns
        for name, left_ns in self._left_ns.items():
            self._left_ns[name] = left_ns - done_ns
