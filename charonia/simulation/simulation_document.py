"""Puts together what `charonia simulate` found of a model: recording, fit, baseline with its error, what-ifs. Pure.

The document is plain data for JSON; `document_text` is the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from charonia.operations.text.rendering import table

from .processor_shares import ProcessorShares, shares_of, shares_text
from .recorded_requests import Outcome, RecordedRequest, Recording, batches_of, begun_in_turn
from .run_figures import COMPARED, errors, figures
from .service_times import Fit, fitted
from .simulated_run import Setting, rearranged, simulated
from .what_if import WhatIf, changed, settings_text

RATHER_WRONG_PERCENT = 15.0
"""Errors of the baseline above this are said to be large."""
_WORDS = {"rate": "rate", "p50_us": "p50", "p99_us": "p99", "batch_rows": "batch size"}
_MAX_SIZES = 12


def model_document(
    recorded: Recording,
    setting: Setting,
    questions: Sequence[WhatIf],
    seed: int,
    measured: Sequence[RecordedRequest] = (),
) -> dict[str, Any]:
    """The document of one model. `measured` is a recording of the real thing under the last question, whose error is
    then said as well. Raises `InvalidArgument` for what cannot be simulated."""
    if setting.prefetch and not recorded.knows_starts:
        recorded = begun_in_turn(recorded, setting.instances)
    setting = replace(setting, machines=shares_of(recorded.said))
    fit = fitted(recorded, setting.interface, setting.executors * setting.instances)
    kept = [one for one in recorded.requests if one.outcome is not Outcome.LOST]
    before = figures(kept)
    run = simulated(kept, setting, fit, seed)
    baseline = figures(run)
    found: list[dict[str, Any]] = []
    for question in questions:
        then, at = changed(setting, kept, question)
        then, fit_then = rearranged(setting, then, fit)
        after = simulated(at, then, fit_then, seed)
        found.append(
            {
                "what_if": question.text,
                "setting": settings_text(then),
                "figures": figures(after),
                "beyond_percent": _beyond_percent(after, fit),
            }
        )
    if found and measured:
        real = figures([one for one in measured if one.outcome is not Outcome.LOST])
        found[-1] |= {"measured": real, "error_percent": errors(found[-1]["figures"], real)}
    document: dict[str, Any] = {
        "model": recorded.model,
        "source": recorded.source,
        "resolution_us": recorded.resolution_ns / 1000,
        "lost": len(recorded.requests) - len(kept),
        "setting": settings_text(setting),
        "fit": _fit_document(fit),
        "processors": [asdict(one) for one in setting.machines],
        "recorded": before,
        "baseline": baseline,
        "error_percent": errors(baseline, before),
        "what_ifs": found,
    }
    return document | {"notes": _notes(document, recorded, setting)}


def _fit_document(fit: Fit) -> dict[str, Any]:
    service, way = fit.service, fit.way
    return {
        "sizes": [
            {
                "rows": size.rows,
                "count": size.count,
                "median_us": size.median_ns / 1000,
                "p99_us": size.p99_ns / 1000,
            }
            for size in service.sizes
        ],
        "base_us": service.base_ns / 1000,
        "row_us": service.row_ns / 1000,
        "r_squared": service.r_squared,
        "lead_us": median(way.lead_ns) / 1000,
        "turn_us": median(way.turn_ns) / 1000,
        "tail_us": median(way.tail_ns) / 1000,
    }


def _beyond_percent(run: Sequence[RecordedRequest], fit: Fit) -> float:
    """The share of simulated batches of a size beyond all recorded ones: their times come from the line alone."""
    batches = batches_of(run)
    beyond = sum(not fit.service.knows(batch.rows) for batch in batches)
    return 100 * beyond / len(batches) if batches else 0.0


def _notes(document: Mapping[str, Any], recorded: Recording, setting: Setting) -> list[str]:
    notes = []
    large = [
        f"{_WORDS[name]} {percent:+.0f} %"
        for name, percent in document["error_percent"].items()
        if percent is not None and abs(percent) > RATHER_WRONG_PERCENT
    ]
    if large:
        notes.append(
            f"the baseline misses what was recorded ({', '.join(large)}): believe the what-ifs no more than that"
        )
    if not setting.machines and any("cores=" not in one["setting"] for one in document["what_ifs"]):
        notes.append(
            "the recording does not say what the processors did: nothing slows instances that compute on one machine, "
            "unless a question has cores=N"
        )
    most = _most_at_once(recorded)
    slots = setting.executors * setting.instances
    if most > slots:
        notes.append(
            f"{most} batches ran at once in the recording, and the setting has {slots} instances: name the right ones "
            "with --recorded"
        )
    if document["lost"]:
        notes.append(f"{document['lost']} requests without a recorded end are left out")
    for one in document["what_ifs"]:
        if one["beyond_percent"] > 1:
            notes.append(
                f"{one['what_if']}: {one['beyond_percent']:.0f} % of the batches have a size that was never recorded; "
                "their times are those of the fitted line"
            )
    return notes


def _most_at_once(recorded: Recording) -> int:
    """How many batches ran at once for at least a hundredth of the busy time, as clocks of several processes differ."""
    marks: list[tuple[int, int]] = []
    for batch in batches_of(recorded.requests):
        marks += [(batch.started_ns, 1), (batch.computed_ns, -1)]
    marks.sort()
    times: dict[int, int] = {}
    running = last_ns = 0
    for at_ns, step in marks:
        times[running] = times.get(running, 0) + at_ns - last_ns
        running, last_ns = running + step, at_ns
    times.pop(0, None)
    whole = sum(times.values())
    return max((count for count in times if sum(ns for n, ns in times.items() if n >= count) > whole / 100), default=0)


# -- text --------------------------------------------------------------------------------------------------------------

_COLUMNS = (
    ("", "name"),
    ("rate /s", "rate"),
    ("p50 ms", "p50"),
    ("p99 ms", "p99"),
    ("queue p50 ms", "queue"),
    ("batch size", "size"),
    ("busy", "busy"),
    ("refused", "refused"),
)


def document_text(document: Mapping[str, Any]) -> str:
    """The document of all models as text."""
    return "\n".join(_model_text(one) for one in document["models"])


def _model_text(found: Mapping[str, Any]) -> str:
    rows = [_row("recorded", found["recorded"]), _row("simulated as recorded", found["baseline"])]
    rows.append(_error_row("  error", found["error_percent"]))
    for one in found["what_ifs"]:
        rows.append(_row(one["what_if"], one["figures"]))
        if "measured" in one:
            rows.append(_row("  measured", one["measured"]))
            rows.append(_error_row("  error", one["error_percent"]))
    lines = [
        f"{found['model']}: {found['recorded']['requests']} requests of {found['recorded']['seconds']:.1f} s from "
        f"{found['source']}, {found['setting']}",
        "",
        *table(rows, _COLUMNS),
        "",
        fit_text(found["fit"]),
        *(shares_text(ProcessorShares(**one)) for one in found["processors"]),
        *(f"note: {note}" for note in found["notes"]),
    ]
    return "\n".join(lines) + "\n"


def fit_text(fit: Mapping[str, Any]) -> str:
    """The fit in a few lines."""
    sizes = fit["sizes"]
    shown = ", ".join(
        f"{size['rows']}: {size['median_us'] / 1000:.2f} ms ({size['count']})" for size in sizes[:_MAX_SIZES]
    )
    more = f", and {len(sizes) - _MAX_SIZES} more sizes" if len(sizes) > _MAX_SIZES else ""
    return (
        f"service time, median by rows (batches): {shown}{more}\n"
        f"line {fit['base_us'] / 1000:.2f} ms + {fit['row_us'] / 1000:.3f} ms a row, the size explains "
        f"{fit['r_squared'] * 100:.0f} % of the variance; on the way {fit['lead_us'] / 1000:.2f} ms to the scheduler, "
        f"{fit['turn_us'] / 1000:.2f} ms between batches, {fit['tail_us'] / 1000:.2f} ms back"
    )


def _row(name: str, of: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "rate": f"{of['rate']:.1f}",
        "p50": f"{of['p50_us'] / 1000:.2f}",
        "p99": f"{of['p99_us'] / 1000:.2f}",
        "queue": f"{of['queue_p50_us'] / 1000:.2f}",
        "size": f"{of['batch_rows']:.2f}",
        "busy": f"{of['busy']:.2f}",
        "refused": of["refused"],
    }


def _error_row(name: str, percents: Mapping[str, float | None]) -> dict[str, Any]:
    cells = {
        key: "-" if percents[name] is None else f"{percents[name]:+.1f} %"
        for key, name in zip(("rate", "p50", "p99", "size"), COMPARED, strict=True)
    }
    return {"name": name, **cells, "queue": "", "busy": "", "refused": ""}
