"""Draws the times to the first token and between tokens against the number of streams, as one SVG file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from .figures import Row

_WIDTH, _HEIGHT, _LEFT, _TOP = 460, 300, 60, 40
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")


def svg(rows: Sequence[Row], note: str = "") -> str:
    """Two panels beside each other, a line for each way; both axes begin at 0. `note` stands below."""
    panels = (
        _panel(rows, 0, "time to first token, p50, ms", lambda row: row.first_ms)
        + _panel(rows, _WIDTH + 2 * _LEFT, "time between tokens, p50, ms", lambda row: row.between_ms)
        + _legend(rows)
    )
    width, height = 2 * (_WIDTH + 2 * _LEFT), _HEIGHT + 2 * _TOP + 60
    panels.append(_text(_LEFT, height - 10, note))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(panels)}</svg>\n'
    )


def _panel(rows: Sequence[Row], left: int, title: str, value: Callable[[Row], float]) -> list[str]:
    most_x = max(row.streams for row in rows)
    most_y = max(map(value, rows)) or 1.0

    def place(row: Row) -> tuple[float, float]:
        return left + _LEFT + _WIDTH * row.streams / most_x, _TOP + _HEIGHT * (1 - value(row) / most_y)

    bottom = _TOP + _HEIGHT
    parts = [
        _text(left + _LEFT, _TOP - 15, title),
        f'<path d="M{left + _LEFT},{_TOP}V{bottom}h{_WIDTH}" fill="none" stroke="black"/>',
        _text(left + _LEFT + _WIDTH / 2, bottom + 35, "streams", "middle"),
    ]
    for part in (0.25, 0.5, 0.75, 1.0):
        y = _TOP + _HEIGHT * (1 - part)
        parts.append(f'<path d="M{left + _LEFT},{y:.1f}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(_text(left + _LEFT - 5, y + 4, f"{most_y * part:.3g}", "end"))
    for streams in sorted({row.streams for row in rows}):
        parts.append(_text(left + _LEFT + _WIDTH * streams / most_x, bottom + 18, str(streams), "middle"))
    for way, colour in _coloured(rows):
        points = [place(row) for row in rows if row.way == way]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return parts


def _legend(rows: Sequence[Row]) -> list[str]:
    parts = []
    for at, (way, colour) in enumerate(_coloured(rows)):
        x, y = _LEFT + 130 * at, _TOP + _HEIGHT + 60
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, y, way))
    return parts


def _coloured(rows: Sequence[Row]) -> list[tuple[str, str]]:
    ways = list(dict.fromkeys(row.way for row in rows))
    return [(way, _COLOURS[at % len(_COLOURS)]) for at, way in enumerate(ways)]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
