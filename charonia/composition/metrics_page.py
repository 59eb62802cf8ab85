"""One metrics page for all parts of `serve`: scrapes their unix sockets and adds up equal series (design, "Metrics").

How pages are added up is `charonia.metrics.exposition`'s. `first_unready` asks the same sockets whether the parts are
ready.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from charonia.metrics.endpoint import scrape, unready
from charonia.metrics.exposition import Version, counters, is_of, merge, restarts
from charonia.metrics.host_metrics import HostMetrics


async def first_unready(sockets: Iterable[Path]) -> str:
    """Why one of the parts behind these sockets is not ready, with its name; empty when all are."""
    paths = sorted(set(sockets))
    reasons = await asyncio.gather(*map(unready, paths))
    return next((f"{path.stem}: {reason}" for path, reason in zip(paths, reasons, strict=True) if reason), "")


class MetricsUnion:
    """Merges the pages of every `*.metrics` socket in a directory, and tells of the machine beside them.

    Counters never go back when one of several parts ends: Prometheus would take that for a restart of all, and count
    the others' totals once more. What a part counted after its last scrape is lost with it. When a version is unloaded
    its counters begin again at 0: a part that is there says so (`RESTARTS`), also when it happened between two scrapes.
    """

    def __init__(self, directory: Path, host: HostMetrics) -> None:
        self._directory = directory
        self._host = host
        self._pages: dict[Path, str] = {}
        self._ends: Counter[Path] = Counter()
        self._counted_before: Counter[str] = Counter()

    async def render(self) -> bytes:
        """The joint page; of a part that does not answer in time it has the counters of its last page alone."""
        sockets = sorted(self._directory.glob("*.metrics"))
        restarted: set[Version] = set()
        answered = await asyncio.gather(*(self._scrape(path, restarted) for path in sockets))
        here = {path for path, known in zip(sockets, answered, strict=True) if known} & self._pages.keys()
        if restarted:
            self._forget(restarted, self._pages.keys() - here)
        earlier = self._counted_before.copy()
        for path in self._pages.keys() - here:
            earlier.update(counters(self._pages[path]))
        pages = [self._pages[path] for path in sockets if path in here]
        return merge(pages, earlier=earlier) + self._host.render()

    def ended(self, path: Path) -> None:
        """The process behind a socket is gone: keep what it had counted when it was last scraped."""
        self._ends[path] += 1
        self._counted_before.update(counters(self._pages.pop(path, "")))

    def _forget(self, versions: set[Version], absent: Iterable[Path]) -> None:
        """Drop what parts had counted of versions that are gone or do not answer now."""
        for series in [series for series in self._counted_before if is_of(series, versions)]:
            del self._counted_before[series]
        for path in absent:
            lines = self._pages[path].split("\n")
            self._pages[path] = "\n".join(line for line in lines if not is_of(line, versions))

    async def _scrape(self, path: Path, restarted: set[Version]) -> bool:
        """Read a part's page; add the versions whose counters it has begun again since the last one.

        False when there is no page, or when its process has ended meanwhile.
        """
        ends = self._ends[path]
        page = await scrape(path)
        if not page or self._ends[path] != ends:
            return False
        before = restarts(self._pages.get(path, ""))
        restarted.update(version for version, count in restarts(page).items() if count > before.get(version, 0))
        self._pages[path] = page
        return True
