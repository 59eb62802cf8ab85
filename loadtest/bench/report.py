"""Folds rounds into medians and prints them as tables, with ratios of rounds against one of the servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from loadtest.measurement import median

from .points import Calls, Key, Point, Results

Figure = Callable[[Point], float | None]

FIGURES: dict[str, tuple[Figure, int]] = {
    "req/s": (lambda p: p.rate, 0),
    "p50 us": (lambda p: p.p50_us, 0),
    "p99 us": (lambda p: p.p99_us, 0),
    "server us": (lambda p: p.server_us, 1),
    "generator us": (lambda p: p.generator_us, 1),
    "wake-ups": (lambda p: p.wakeups, 2),
    "log commands": (lambda p: p.log_commands, 2),
    "req/entry": (lambda p: p.requests_per_entry, 1),
    "other cores": (lambda p: p.other_cores, 2),
}
"""Columns: how a point's figure is read, and its digits."""

RATIOS = ("req/s", "p50 us", "p99 us", "server us", "wake-ups", "log commands")


def median_of(points: Sequence[Point | None], figure: Figure) -> float | None:
    """Median of the rounds in which the figure is known."""
    known = [value for point in points if point is not None and (value := figure(point)) is not None]
    return median(known) if known else None


def ratio_of(points: Sequence[Point | None], base: Sequence[Point | None], figure: Figure) -> float | None:
    """Median over the rounds of figure / figure of the base in the same round."""
    ratios = []
    for one, other in zip(points, base, strict=False):
        if one is None or other is None:
            continue
        above, below = figure(one), figure(other)
        if above is not None and below:
            ratios.append(above / below)
    return median(ratios) if ratios else None


def text(value: float | None, digits: int) -> str:
    """A figure for a table; "-" when it is not known."""
    return "-" if value is None else f"{value:,.{digits}f}"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows padded into columns; the first `left` columns are aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _label(key: Key) -> list[str]:
    return [key.case, key.protocol, str(key.in_flight)]


def roles_text(points: Sequence[Point | None], calls: Mapping[str, float], least: float = 0.05) -> str:
    """Per request of every role that used any CPU: its us, its voluntary context switches, its Python calls."""
    roles = sorted({role for point in points if point for role in point.cpu_us})
    parts = []
    for role in roles:
        cpu = median_of(points, lambda p, role=role: p.cpu_us.get(role, 0.0))  # type: ignore[misc]
        switches = median_of(points, lambda p, role=role: p.switches.get(role, 0.0))  # type: ignore[misc]
        if cpu is not None and cpu >= least:
            counted = f", {calls[role]:.0f} calls" if calls.get(role, 0) >= 1 else ""
            parts.append(f"{role} {cpu:.1f} us, {switches or 0:.2f} sw{counted}")
    return "; ".join(parts)


def print_report(results: Results, calls: Calls, base: str | None = None) -> None:
    """Three tables: figures, figures by role, and medians of ratios against the server `base`."""
    head = ["model", "protocol", "in flight", "server"]
    rows = [[*head, *FIGURES, "calls", "rounds"]]
    roles = [[*head, "per request by role: CPU, voluntary context switches, Python calls"]]
    ratios = [[*head, *(f"x {name}" for name in RATIOS)]]
    for key, by_server in results.items():
        for name, points in by_server.items():
            good = sum(point is not None for point in points)
            label = [*_label(key), name]
            figures = [text(median_of(points, figure), digits) for figure, digits in FIGURES.values()]
            counts = calls.get((key, name), {})
            figures.append(text(sum(counts.values()) if counts else None, 0))
            wrong = sum(point.wrong for point in points if point)
            note = f"{good}/{len(points)}" + (f", {wrong} wrong answers" if wrong else "")
            rows.append([*label, *figures, note])
            roles.append([*label, roles_text(points, counts)])
            if base in by_server and name != base:
                factors = [text(ratio_of(points, by_server[base], FIGURES[column][0]), 2) for column in RATIOS]
                ratios.append([*label, *factors])
    print(table(rows, 4), end="\n\n")
    print(table(roles, 5))
    if len(ratios) > 1:
        print(f"\nMedians over the rounds of figure / figure of {base}:")
        print(table(ratios, 4))
