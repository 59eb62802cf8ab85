"""What executors hold of one model: which versions, and how many instances of each. Pure."""

from __future__ import annotations

from batcher.scheduling import observations as seen
from charonia.catalog.catalog import ServedVersion


class ExecutorCapacity:
    """The catalog's latest state; `held` are the versions, None before the first one."""

    def __init__(self) -> None:
        self.held: frozenset[int] | None = None
        self._slots: dict[tuple[str, int], tuple[str, int]] = {}

    def change(self, versions: dict[int, ServedVersion]) -> list[seen.Observation]:
        """Takes the catalog's latest state; returns the observations for the scheduler."""
        slots = {
            (executor, version.version): (version.content_hash, count)
            for version in versions.values()
            for executor, count in version.slots.items()
        }
        news: list[seen.Observation] = [seen.VersionWithdrawn(*gone) for gone in self._slots.keys() - slots.keys()]
        for (executor, number), (content_hash, count) in slots.items():
            if self._slots.get((executor, number)) != (content_hash, count):
                news.append(seen.VersionServed(executor, number, content_hash, count))
        self._slots = slots
        self.held = frozenset(versions)
        return news

    def instances(self) -> dict[int, dict[str, int]]:
        """How many instances a version has at each executor."""
        found: dict[int, dict[str, int]] = {}
        for (executor, version), (_, count) in self._slots.items():
            found.setdefault(version, {})[executor] = count
        return found

    def content_hashes(self) -> dict[int, str]:
        """The content hash of each served version."""
        return {version: content_hash for (_, version), (content_hash, _) in self._slots.items()}
