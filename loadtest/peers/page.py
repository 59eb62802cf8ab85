"""Writes the tables of a page that compares Charonia with its peers; it measures nothing.

A section lies between the lines `<!-- peer NAME: begin -->` and `<!-- peer NAME: end -->`, so that one peer can be
measured again without the others.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from loadtest.bench.points import Key, Point, Results
from loadtest.bench.report import FIGURES, median_of, ratio_of, text
from loadtest.model import LoadTestError
from loadtest.peers.recipes import Recipe

LEVEL = 0.15
"""Rates closer than this are called level: points of the same server differ as much on a shared machine."""


def machine() -> str:
    """Cores, processor and system, for the head of a section."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{os.cpu_count()} cores ({model}), CPython {platform.python_version()}"


def verdict(ratio: float | None) -> str:
    """Charonia's rate over the peer's, in a word."""
    if ratio is None:
        return "-"
    return "win" if ratio > 1 + LEVEL else "loss" if ratio < 1 / (1 + LEVEL) else "level"


def _row(key: Key, own: list[Point | None], peer: list[Point | None]) -> tuple[str, str]:
    """A line of the table, and its verdict."""
    cells = [key.case, key.protocol, str(key.in_flight)]
    for name, digits in (("req/s", 0), ("p50 us", 0), ("p99 us", 0), ("server us", 0)):
        figure: Callable[[Point], float | None] = FIGURES[name][0]
        cells += [text(median_of(points, figure), digits) for points in (own, peer)]
    ratio = ratio_of(own, peer, FIGURES["req/s"][0])
    word = verdict(ratio)
    wrong = sum(point.wrong for point in peer if point)
    note = f" ({wrong} wrong)" if wrong else ""
    return "| " + " | ".join([*cells, text(ratio, 2), word + note]) + " |", word


def section(name: str, recipe: Recipe, results: Results, rounds: int, duration_s: float) -> str:
    """The section of one peer."""
    rows, words = [], []
    for key, by_server in results.items():
        if "own" in by_server and name in by_server:
            row, word = _row(key, by_server["own"], by_server[name])
            rows.append(row)
            words.append(word)
    other = [p.other_cores for servers in results.values() for points in servers.values() for p in points if p]
    counts = ", ".join(f"{words.count(word)} {label}" for word, label in
                       (("win", "won"), ("level", "level"), ("loss", "lost")))  # fmt: skip
    busy = f"{sorted(other)[len(other) // 2]:.2f}" if other else "-"
    return "\n".join(
        [
            f"{time.strftime('%Y-%m-%d', time.gmtime())}, {machine()}; {recipe.what}; {rounds} interleaved rounds of "
            f"{duration_s:g} s; other work took {busy} cores (median). **{counts}** of {len(words)} points.",
            "",
            f"| model | protocol | in flight | req/s | {name} | p50 us | {name} | p99 us | {name} | CPU us | {name} "
            "| rate ratio | |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    )


def replace_section(page: str, name: str, section_text: str) -> str:
    """The page with the text between a peer's markers replaced. Raises LoadTestError without them."""
    begin, end = f"<!-- peer {name}: begin -->\n", f"<!-- peer {name}: end -->"
    if begin not in page or end not in page:
        raise LoadTestError(f"the page has no lines {begin.strip()} and {end}")
    head, _, rest = page.partition(begin)
    return head + begin + "\n" + section_text + "\n\n" + end + rest.partition(end)[2]
