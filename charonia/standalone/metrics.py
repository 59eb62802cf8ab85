"""One metrics page for all parts of `serve`: scrapes their unix sockets and adds up equal series (design, "Metrics").

How pages are added up is `charonia.exposition`'s.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from charonia.exposition import merge
from charonia.host_metrics import HostMetrics

_TIMEOUT_S = 2.0
_MOST_BYTES = 16 * 1024 * 1024


class MetricsUnion:
    """Merges the pages of every `*.metrics` socket in a directory, and tells of the machine beside them."""

    def __init__(self, directory: Path, host: HostMetrics) -> None:
        self._directory = directory
        self._host = host

    async def render(self) -> bytes:
        """The joint page; a part that does not answer in time is left out of this scrape."""
        sockets = sorted(self._directory.glob("*.metrics"))
        pages = await asyncio.gather(*(_scrape(path) for path in sockets))
        return merge([page for page in pages if page]) + self._host.render()


async def _scrape(path: Path) -> str:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=_MOST_BYTES)
            try:
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: part\r\nConnection: close\r\n\r\n")
                answer = await reader.read(-1)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return ""
    head, _, body = answer.partition(b"\r\n\r\n")
    return body.decode(errors="replace") if b" 200 " in head.split(b"\r\n", 1)[0] else ""
