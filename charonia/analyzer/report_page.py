"""The HTML report of `charonia bench`: one page with its style and plots (SVG) in it, dark and light. Pure.

It has no script and loads nothing, so that it can be mailed and kept. What it shows is `bench_report.document`.
The report of `charonia tune` is made of the same plots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

_WIDTH, _HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 30, 46
_COLOURS = 8
"""Of series, `--c0` to `--c7` in the style; more series begin again."""
_MAX_SERIES = 16
_DEPTH = 5
"""Percentiles are drawn up to 99.999 %."""
_PERCENTS = ((0.0, "0"), (log10(2), "50"), (1.0, "90"), (2.0, "99"), (3.0, "99.9"), (4.0, "99.99"), (5.0, "99.999"))
"""Ticks of an axis of percentiles: how many nines, and the percentile."""

STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1c2430;--dim:#5b6675;--line:#d9dee6;--card:#f6f8fa;--bad:#b3261e;
--c0:#0072b2;--c1:#d55e00;--c2:#00805d;--c3:#a4498a;--c4:#8a6d00;--c5:#3b8fc4;--c6:#6b4fbb;--c7:#5b6675}
@media (prefers-color-scheme:dark){:root{--page:#12161c;--ink:#e4e9f0;--dim:#9aa6b5;--line:#333c48;--card:#1a2028;
--bad:#ff8a80;--c0:#56b4e9;--c1:#ff9a4d;--c2:#2fc79b;--c3:#e08cc6;--c4:#e6c229;--c5:#8fd0ff;--c6:#b3a1f5;--c7:#9aa6b5}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:17px;margin:0 0 8px}
.sub{color:var(--dim);margin:0 0 20px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px;margin:0 0 16px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px;min-width:0;margin:0 0 16px}
.grid .card{margin:0}.wide{overflow-x:auto}dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:0}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{text-align:right;padding:4px 8px;font-size:14px;border-bottom:1px solid var(--line)}
th{color:var(--dim);font-weight:600}
th:first-child,td:first-child{text-align:left}.bad{color:var(--bad)}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--dim);font:12px system-ui,sans-serif}.grid-line{stroke:var(--line);stroke-width:1}
@media (max-width:600px){svg text{font-size:16px}}
.key{display:flex;flex-wrap:wrap;gap:2px 14px;margin:6px 0 0;padding:0;list-style:none;color:var(--dim);font-size:13px}
.key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}p{margin:6px 0 0;color:var(--dim)}
""" + "".join(
    f".s{number}{{stroke:var(--c{number})}}.f{number}{{fill:var(--c{number})}}.b{number}{{background:var(--c{number})}}"
    for number in range(_COLOURS)
)


@dataclass(frozen=True, slots=True)
class Series:
    """A named line of points; with `is_line` False points alone. `labels` are what marks say under the pointer."""

    name: str
    points: Sequence[tuple[float, float]]
    marks: bool = True
    is_line: bool = True
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis: its ticks (place, text) and how a value becomes a part of its length."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def part(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5


def page(found: Mapping[str, Any]) -> str:
    """The page of a run's document."""
    levels = found["levels"]
    title = f"{found['model']}: {found['level'].lower()}"
    cards = [card for make in _CARDS if (card := make(found, levels))]
    sub = f"charonia bench, {found['began']}, {found['url']}"
    grid = f'<div class="grid">{"".join(cards)}</div>'
    return whole_page(title, found["model"], sub, f"{_conditions(found)}{_figures(found, levels)}{grid}")


def whole_page(title: str, heading: str, sub: str, body: str) -> str:
    """A page with this style; `body` is HTML, the other texts are plain."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{escape(heading)}</h1>"
        f'<p class="sub">{escape(sub)}</p>'
        f"{body}</main></body></html>\n"
    )


# -- words -------------------------------------------------------------------------------------------------------------


def _conditions(found: Mapping[str, Any]) -> str:
    load = "closed loop" if found["load"] == "closed" else f"open loop, {found['distribution']}"
    stream = " streams" if found["streaming"] else ""
    judged = f"three windows in a row within {found['stability_percent']:g} %, by rate and {found['judged_by']} latency"
    rows = [
        ("model", f"{found['model']} {found['version'] or '(newest version)'}, batch {found['batch']}"),
        ("protocol", ("gRPC" if found["protocol"] == "grpc" else "HTTP") + stream),
        ("load", f"{load}, {found['processes']} process(es)"),
        ("stable", judged),
        *([("sought", sought)] if (sought := found["latency_threshold_result"]) else []),
        ("load average", ", ".join(f"{value:g}" for value in found["load_average"]) + " of the measuring machine"),
    ]
    return (
        '<div class="card"><dl>'
        + "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows)
        + "</dl></div>"
    )


def _figures(found: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> str:
    heads = [
        found["level"],
        "infer/s",
        "mean",
        "p50",
        "p90",
        "p95",
        "p99",
        "p99.9",
        "max",
        "queue",
        "infer",
        "generator",
    ]
    limit_ms = found["latency_threshold_ms"]
    last = ["failed", "stable", *([f"within {limit_ms:g} ms"] if limit_ms else [])]
    rows = []
    for level in levels:
        latency, server = level["latency_us"], level["server"].get(found["model"])
        cells = [f"{level['level']:g}", number_text(level["rate"])]
        cells += [time_text(latency[name]) for name in ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")]
        cells += [time_text(server[name]) if server else "–" for name in ("queue_us", "compute_infer_us")]
        cells.append(f"{level['generator']['cores'] * 100:.0f} %")
        failed = sum(level["errors"].values())
        cells.append(f'<span class="bad">{failed}</span>' if failed else "0")
        cells.append(_yes_or_no(level["stable"]))
        cells += [_yes_or_no(level["within_threshold"])] if limit_ms else []
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in [*heads, *last])
    said = [f"{level['level']:g}: {note}" for level in levels for note in level["notes"]]
    said += [
        f"{level['level']:g}: failed {count} times: {text}"
        for level in levels
        for text, count in level["errors"].items()
    ]
    words = "".join(f"<p>{escape(text)}</p>" for text in said[:_MAX_SERIES])
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="card wide"><h2>Figures</h2>{table}{words}</div>'


def _yes_or_no(holds: bool) -> str:
    return "yes" if holds else '<span class="bad">no</span>'


def number_text(value: float) -> str:
    """A rate or a count, in few digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def time_text(value_us: float) -> str:
    """Microseconds in a unit that fits."""
    if value_us < 1000:
        return f"{value_us:.0f} µs"
    return f"{value_us / 1000:.2f} ms" if value_us < 100_000 else f"{value_us / 1e6:.2f} s"


# -- cards -------------------------------------------------------------------------------------------------------------


def _rate_card(found: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> str:
    if len(levels) < 2:
        return ""
    series = [
        Series(name, [(level["rate"], level["latency_us"][name] / 1000) for level in levels])
        for name in ("p50", "p95", "p99")
    ]
    return card("Latency over throughput", lines(series, "inferences a second", "ms", linear), series)


def _level_card(found: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> str:
    if len(levels) < 2:
        return ""
    series = [Series("inferences a second", [(level["level"], level["rate"]) for level in levels])]
    return card(f"Throughput by {found['level'].lower()}", lines(series, found["level"].lower(), "infer/s", linear), [])


def _percentile_card(found: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> str:
    return _distribution("Latency by percentile", "latency_us", found, levels)


def _service_card(found: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> str:
    note = "From the real sending: what a generator that waits would have shown."
    return _distribution("Service time by percentile", "service_us", found, levels, note)


def _first_card(found: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> str:
    return _distribution("Time to the first response", "first_response_us", found, levels)


def _gap_card(found: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> str:
    return _distribution("Time between responses", "inter_response_us", found, levels)


def _distribution(
    title: str, name: str, found: Mapping[str, Any], levels: Sequence[Mapping[str, Any]], note: str = ""
) -> str:
    series = []
    for level in levels[:_MAX_SERIES]:
        shares = level.get(name, {}).get("shares")
        if shares and level[name]["max"]:
            deepest = min(_DEPTH, log10(max(10, level[name]["count"])))
            points = [(min(deepest, -log10(max(1 - share, 10**-_DEPTH))), value / 1000) for value, share in shares]
            series.append(Series(f"{found['level'].lower()} {level['level']:g}", points, marks=False))
    if not series:
        return ""
    highest = max(point[0] for line in series for point in line.points)
    ticks = [(at, text) for at, text in _PERCENTS if at <= highest + 0.01]
    across = Scale(0, max(highest, 1.0), tuple((at, f"{text} %") for at, text in ticks))
    return card(title, lines(series, "percentile", "ms", linear, across), series, note)


def _split_card(found: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> str:
    names = ("send, receive", "network, other", "queue", "compute input", "infer", "output", "cache")
    bars = []
    for level in levels[:_MAX_SERIES]:
        server = level["server"].get(found["model"])
        if not server:
            return ""
        total = level.get("service_us", level["latency_us"])["mean"]
        own = level["client_us"]["send_receive"]
        parts = [server[f"{name}_us"] for name in ("queue", "compute_input", "compute_infer", "compute_output")]
        parts.append(server["cache_hit_us"] + server["cache_miss_us"])
        bars.append((f"{level['level']:g}", [own, max(0.0, total - own - sum(parts)), *parts]))
    key = [Series(name, ()) for name in names]
    return card(f"Where the time goes, by {found['level'].lower()}", _stacked(bars, names), key)


def _window_card(found: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> str:
    series = [
        Series(
            f"{found['level'].lower()} {level['level']:g}",
            [(at, w["rate"]) for at, w in enumerate(level["windows"], 1)],
        )
        for level in levels[:_MAX_SERIES]
    ]
    note = "The last three windows of each level are its figures."
    longest = max((len(line.points) for line in series), default=1)
    across = Scale(1, max(2, longest), tuple((at, str(at)) for at in range(1, max(2, longest) + 1)))
    return card("Throughput of each window", lines(series, "window", "infer/s", linear, across), series, note)


_CARDS: tuple[Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], str], ...] = (
    _rate_card,
    _level_card,
    _percentile_card,
    _service_card,
    _first_card,
    _gap_card,
    _split_card,
    _window_card,
)


def card(title: str, plot: str, series: Sequence[Series], note: str = "") -> str:
    """A card of the page: a plot, the key of its series, and a note."""
    key = "".join(
        f'<li><i class="b{number % _COLOURS}"></i>{escape(line.name)}</li>' for number, line in enumerate(series)
    )
    key = f'<ul class="key">{key}</ul>' if key else ""
    words = f"<p>{escape(note)}</p>" if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{plot}{key}{words}</section>'


# -- plots -------------------------------------------------------------------------------------------------------------


def linear(low: float, high: float) -> Scale:
    """An axis from `low` to at least `high`, with about five round ticks."""
    if high <= low:
        high = low + 1
    rough = (high - low) / 5
    unit = 10 ** floor(log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough * (1 - 1e-9))
    first, last = floor(low / step), ceil(high / step - 1e-9)
    ticks = tuple((number * step, _tick(number * step)) for number in range(first, last + 1))
    return Scale(first * step, last * step, ticks)


def _tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def lines(
    series: Sequence[Series],
    x_name: str,
    y_name: str,
    scale: Callable[[float, float], Scale],
    across: Scale | None = None,
) -> str:
    """Lines and points over two axes, as SVG; without `across` the one below begins at 0."""
    points = [point for line in series for point in line.points]
    if across is None:
        across = scale(0, max((x for x, _ in points), default=1))
    up = scale(0, max((y for _, y in points), default=1))
    drawn = []
    for number, line in enumerate(series):
        colour = number % _COLOURS
        places = [_place(across, up, x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        if line.is_line:
            drawn.append(f'<polyline class="s{colour}" points="{path}" fill="none" stroke-width="2"/>')
        if line.marks:
            for at, ((x, y), (value_x, value_y)) in enumerate(zip(places, line.points, strict=True)):
                name = line.labels[at] if line.labels else line.name
                said = escape(f"{name}: {_tick(value_x)} {x_name}, {_tick(value_y)} {y_name}")
                drawn.append(
                    f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{said}</title></circle>'
                )
    return _svg(across, up, x_name, y_name, "".join(drawn))


def _place(across: Scale, up: Scale, x: float, y: float) -> tuple[float, float]:
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    return _LEFT + across.part(x) * width, _TOP + (1 - up.part(y)) * height


def _stacked(bars: Sequence[tuple[str, Sequence[float]]], names: Sequence[str]) -> str:
    up = linear(0, max((sum(parts) for _, parts in bars), default=1) / 1000)
    across = Scale(0, len(bars), tuple((number + 0.5, name) for number, (name, _) in enumerate(bars)))
    drawn = []
    for number, (_, parts) in enumerate(bars):
        below = 0.0
        for colour, (name, value_us) in enumerate(zip(names, parts, strict=True)):
            left, top = _place(across, up, number + 0.2, below + value_us / 1000)
            right, bottom = _place(across, up, number + 0.8, below)
            below += value_us / 1000
            if value_us > 0:
                drawn.append(
                    f'<rect class="f{colour}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
                    f'height="{max(0.0, bottom - top):.1f}"><title>{escape(name)}: {time_text(value_us)}</title></rect>'
                )
    return _svg(across, up, "", "ms", "".join(drawn))


def _svg(across: Scale, up: Scale, x_name: str, y_name: str, drawn: str) -> str:
    parts = []
    for at, text in up.ticks:
        _, y = _place(across, up, across.low, at)
        parts.append(f'<line class="grid-line" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    base = _HEIGHT - _BOTTOM
    for at, text in across.ticks:
        x, _ = _place(across, up, at, up.low)
        parts.append(f'<text x="{x:.1f}" y="{base + 18}" text-anchor="middle">{escape(text)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    parts.append(f'<text x="{_LEFT - 8}" y="14" text-anchor="end">{escape(y_name)}</text>')
    label = escape(f"{y_name} over {x_name}" if x_name else y_name)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}{drawn}</svg>'
