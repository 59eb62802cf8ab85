"""One metrics page for all parts of `serve`: scrapes their unix sockets and adds up equal series (design, "Metrics").

Parts export only what they did, so a counter of two executors is their sum, and so is a gauge of what each holds.
Histogram buckets add up like counters. Text in, text out; no metrics library is needed.
"""

from __future__ import annotations

import asyncio
from math import inf
from pathlib import Path

from charonia.host_metrics import HostMetrics
from charonia.latencies import joint_quantiles

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


def merge(pages: list[str]) -> bytes:
    """Join text expositions (0.0.4): families keep their first HELP and TYPE, equal series are added."""
    heads: dict[str, list[str]] = {}
    series: dict[str, dict[str, float]] = {}
    for page in pages:
        family = ""
        for line in page.split("\n"):  # and nowhere else: a label value may hold any other line separator
            if line.startswith(("# HELP ", "# TYPE ")):
                _, word, family, *_ = line.split(" ", 3)
                known = heads.setdefault(family, [])
                if not any(head.split(" ", 2)[1] == word for head in known):
                    known.append(line)
                series.setdefault(family, {})
            elif line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                try:
                    amount = float(value)
                except ValueError:
                    continue  # one part's bad line must not cost the page
                values = series.setdefault(family, {})
                values[name] = values.get(name, 0.0) + amount
    lines: list[str] = []
    for family, values in series.items():
        head = heads.get(family, [])
        lines += head
        if f"# TYPE {family} summary" in head:
            values = joint_quantiles(family, values)
        lines += [f"{name} {_number(value)}" for name, value in values.items()]
    return ("\n".join(lines) + "\n").encode()


def _number(value: float) -> str:
    if value != value or value in (inf, -inf):
        return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
