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
from charonia.metrics.exposition import counters, merge
from charonia.metrics.host_metrics import HostMetrics


async def first_unready(sockets: Iterable[Path]) -> str:
    """Why one of the parts behind these sockets is not ready, with its name; empty when all are."""
    paths = sorted(set(sockets))
    reasons = await asyncio.gather(*map(unready, paths))
    return next((f"{path.stem}: {reason}" for path, reason in zip(paths, reasons, strict=True) if reason), "")


class MetricsUnion:
    """Merges the pages of every `*.metrics` socket in a directory, and tells of the machine beside them.

    Counters never go back when one of several parts ends: Prometheus would take that for a restart of all, and count
    the others' totals once more. What a part counted after its last scrape is lost with it.
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
        answered = await asyncio.gather(*(self._scrape(path) for path in sockets))
        here = {path for path, known in zip(sockets, answered, strict=True) if known} & self._pages.keys()
        earlier = self._counted_before.copy()
        for path in self._pages.keys() - here:
            earlier.update(counters(self._pages[path]))
        pages = [self._pages[path] for path in sockets if path in here]
        return merge(pages, earlier=earlier) + self._host.render()

    def ended(self, path: Path) -> None:
        """The process behind a socket is gone: keep what it had counted when it was last scraped."""
        self._ends[path] += 1
        self._counted_before.update(counters(self._pages.pop(path, "")))

    async def _scrape(self, path: Path) -> bool:
        """Read a part's page. False when there is none, or when its process has ended meanwhile."""
        ends = self._ends[path]
        page = await scrape(path)
        if not page or self._ends[path] != ends:
            return False
        self._pages[path] = page
        return True
