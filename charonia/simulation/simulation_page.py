"""The HTML report of `charonia simulate`: one page with plots that loads nothing and has no script. Pure.

It shows what `simulation_document` holds, with the plots of `charonia.analyzer.report_page`.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from math import log10
from typing import Any

from charonia.analyzer.report_page import Scale, Series, card, linear, lines, time_text, whole_page

from .processor_shares import ProcessorShares, shares_text
from .simulation_document import RATHER_WRONG_PERCENT, fit_text

_MAX_WHAT_IFS = 6
"""In plots; the table has all."""
_PERCENTS = ((0.0, "0"), (log10(2), "50"), (1.0, "90"), (2.0, "99"))


def page(document: Mapping[str, Any]) -> str:
    """The page of a run's document."""
    names = ", ".join(found["model"] for found in document["models"])
    body = "".join(_model(found) for found in document["models"])
    return whole_page(f"What if: {names}", names, f"charonia simulate, seed {document['seed']}", body)


def _model(found: Mapping[str, Any]) -> str:
    notes = "".join(f'<p class="bad">{escape(note)}</p>' for note in found["notes"])
    recorded = found["recorded"]
    rows = [
        ("recorded", f"{recorded['requests']} requests of {recorded['seconds']:.1f} s, from {found['source']}"),
        ("setting", found["setting"]),
        ("fit", fit_text(found["fit"])),
        *(("processors", shares_text(ProcessorShares(**one))) for one in found["processors"]),
    ]
    about = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows).replace("\n", "<br>")
    plots = [_latency_card(found), _time_card(found), _size_card(found), _fit_card(found)]
    return (
        f'<div class="card"><h2>{escape(found["model"])}</h2><dl>{about}</dl>{notes}</div>'
        f'{_table(found)}<div class="grid">{"".join(plots)}</div>'
    )


def _shown(found: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    shown = [("recorded", found["recorded"]), ("simulated as recorded", found["baseline"])]
    for one in found["what_ifs"][:_MAX_WHAT_IFS]:
        shown.append((one["what_if"], one["figures"]))
        if "measured" in one:
            shown.append((f"{one['what_if']}, measured", one["measured"]))
    return shown


def _table(found: Mapping[str, Any]) -> str:
    head = ("", "rate", "mean", "p50", "p90", "p95", "p99", "queue p50", "queue p99", "batch size", "busy", "refused")
    rows = [_row("recorded", found["recorded"]), _row("simulated as recorded", found["baseline"])]
    rows.append(_errors(found["error_percent"], len(head)))
    for one in found["what_ifs"]:
        rows.append(_row(one["what_if"], one["figures"]))
        if "measured" in one:
            rows += [_row("measured", one["measured"]), _errors(one["error_percent"], len(head))]
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<div class="card wide"><h2>Figures</h2><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(name: str, of: Mapping[str, Any]) -> str:
    cells = [escape(name), f"{of['rate']:.1f}"]
    cells += [time_text(of[key]) for key in ("mean_us", "p50_us", "p90_us", "p95_us", "p99_us")]
    cells += [time_text(of[key]) for key in ("queue_p50_us", "queue_p99_us")]
    cells += [f"{of['batch_rows']:.2f}", f"{of['busy']:.2f}", str(of["refused"])]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _errors(percents: Mapping[str, float | None], width: int) -> str:
    places = {1: "rate", 3: "p50_us", 6: "p99_us", 9: "batch_rows"}
    cells = []
    for place in range(width):
        percent = percents.get(places.get(place, ""))
        text = "error" if not place else "" if percent is None else f"{percent:+.1f} %"
        bad = percent is not None and abs(percent) > RATHER_WRONG_PERCENT
        cells.append(f'<td class="bad">{text}</td>' if bad else f"<td>{text}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _latency_card(found: Mapping[str, Any]) -> str:
    series = [
        Series(name, [(-log10(1 - share / 100), us / 1000) for share, us in of["latency_shares"]], marks=False)
        for name, of in _shown(found)
    ]
    across = Scale(0, 2.0, tuple((at, f"{text} %") for at, text in _PERCENTS))
    return card("Latency by percentile", lines(series, "percentile", "ms", linear, across), series)


def _time_card(found: Mapping[str, Any]) -> str:
    series = [
        Series(name, [(at, mean_us / 1000) for at, mean_us, _ in of["over_time"]], marks=False)
        for name, of in _shown(found)
    ]
    return card("Mean latency by time of arrival", lines(series, "seconds", "ms", linear), series)


def _size_card(found: Mapping[str, Any]) -> str:
    series = []
    for name, of in _shown(found):
        whole = sum(of["sizes"].values()) or 1
        points = [(float(rows), 100 * count / whole) for rows, count in of["sizes"].items()]
        series.append(Series(name, points))
    return card("Share of batches by size", lines(series, "rows", "%", linear), series)


def _fit_card(found: Mapping[str, Any]) -> str:
    fit = found["fit"]
    sizes = fit["sizes"]
    widest = float(sizes[-1]["rows"])
    line = [(0.0, fit["base_us"] / 1000), (widest, (fit["base_us"] + fit["row_us"] * widest) / 1000)]
    series = [
        Series("median", [(float(size["rows"]), size["median_us"] / 1000) for size in sizes], is_line=False),
        Series("p99", [(float(size["rows"]), size["p99_us"] / 1000) for size in sizes], is_line=False),
        Series("line", line, marks=False),
    ]
    note = f"The size explains {fit['r_squared'] * 100:.0f} % of the variance."
    return card("Service time by rows", lines(series, "rows", "ms", linear), series, note)
