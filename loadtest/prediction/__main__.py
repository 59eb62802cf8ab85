"""`python -m loadtest.prediction`: has `charonia simulate` predict from a recording, and measures what then comes true.

    python -m loadtest.prediction [--model device|quick-device|computing|FOLDER] [--what-if 'rate=x3 executors=+2']...

A server serves one model and is asked in a Poisson pattern; its requests are recorded as a trace file and in the
journal. From both, `charonia simulate` predicts each question. Then a server that is changed as the question says is
asked in the same pattern, and the errors of the predictions are printed: of rate, p50, p99 and rows of a batch. Each
prediction is compared with what its own source says of that run: the journal has no way to and from the gateway.
`--rounds` records, predicts and measures so many times in turns, and compares the medians of each figure: a machine
differs from minute to minute, when it records as well. Run it on a quiet machine, or with real-time priority (`chrt -r
1 python -m loadtest.prediction`), which its children have too.

Exit status: 0; 1 when an error of a prediction is above `--limit`; 2 when a run could not be made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench.report import table
from loadtest.measurement import median
from loadtest.model import LoadTestError

from .questioned import AS_RECORDED, MODELS, arrivals_us, question
from .real_runs import RealRun, trace_predictions

QUESTIONS = ("executors=+2", "delay=5ms", "instances=2", "rate=x2", "rate=x3", "rate=x3 executors=+2")
"""Asked when none is named."""
COMPARED = {"rate": ("rate /s", 1.0), "p50_us": ("p50 ms", 1e3), "p99_us": ("p99 ms", 1e3), "batch_rows": ("rows", 1.0)}
"""Figures of `charonia simulate` that are compared: heading and divisor."""
SOURCES = ("traces", "journal")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        found = compared(options)
    except LoadTestError as error:
        print(f"loadtest.prediction: {error}", file=sys.stderr)
        return 2
    print(text(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    wrong = [
        f"{one['what_if']} {COMPARED[name][0]} {percent:+.1f} % from the {source}"
        for one in found["what_ifs"]
        for source in SOURCES
        for name, percent in one["error_percent"][source].items()
        if options.limit and abs(percent) > options.limit
    ]
    for words in wrong:
        print(f"above {options.limit:g} %: {words}")
    return 1 if wrong else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.prediction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="device", metavar="MODEL", help=f"{', '.join(MODELS)} or the folder of one (default device)"
    )
    parser.add_argument("--shape", action="append", default=[], metavar="NAME:D,D", help="of free dimensions")
    parser.add_argument("--what-if", action="append", default=[], metavar="'NAME=VALUE ...'", help="instead of "
        + "; ".join(QUESTIONS))  # fmt: skip
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="of each run (default 2000)")
    parser.add_argument("--rate", type=float, default=45.0, metavar="N", help="of the recording, a second (45)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="recordings, and runs of each question (1)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the pattern of arrivals (1)")
    parser.add_argument("--limit", type=float, default=0.0, metavar="PERCENT", help="fail above this error (0: never)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def compared(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of the recording, and of each question as predicted and measured. Raises LoadTestError."""
    if options.rounds < 1 or options.requests < 1 or options.rate <= 0:
        raise LoadTestError("--rounds, --requests and --rate have to be above 0")
    asked = [question(words) for words in options.what_if or QUESTIONS]
    texts = [one.text for one in asked]
    intervals = arrivals_us(options.requests, options.rate, options.seed)
    load = [_load()]
    said: dict[str, list[Mapping[str, Any]]] = {source: [] for source in SOURCES}
    """What `charonia simulate` says of each round's recording: one document with all questions' predictions."""
    measured: dict[str, dict[str, list[Mapping[str, float]]]] = {
        words: {source: [] for source in SOURCES} for words in texts
    }
    model = ""
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="charonia-prediction-") as name:
            folder = Path(name)
            recorded = RealRun(folder / "recorded", options.model, AS_RECORDED)
            model = recorded.model
            with recorded:
                recorded.load(intervals, options.shape)
                said["journal"].append(recorded.journal_predictions(texts))
            predicted: dict[str, Any] = {}
            for one in asked if number % 2 == 0 else asked[::-1]:
                place = folder / one.text
                with RealRun(place, options.model, one) as run:
                    run.load(intervals, options.shape)
                    measured[one.text]["journal"].append(run.journal_predictions(())["recorded"])
                # the product's own comparison: it reads the measured file
                answer = trace_predictions(recorded, one.text, run.trace)
                predicted[one.text] = answer["what_ifs"][-1]
                measured[one.text]["traces"].append(predicted[one.text]["measured"])
                load.append(_load())
            said["traces"].append({**answer, "what_ifs": [predicted[words] for words in texts]})
    recorded_figures = {source: _medians([one["recorded"] for one in said[source]]) for source in SOURCES}
    baseline = {source: _medians([one["baseline"] for one in said[source]]) for source in SOURCES}
    found = []
    for at, words in enumerate(texts):
        guessed = {source: [one["what_ifs"][at]["figures"] for one in said[source]] for source in SOURCES}
        real, predicted = measured[words], {source: _medians(guessed[source]) for source in SOURCES}
        found.append(
            {
                "what_if": words,
                "measured": {source: _medians(real[source]) for source in SOURCES},
                "predicted": predicted,
                "error_percent": {source: _errors(predicted[source], _medians(real[source])) for source in SOURCES},
                "rounds": {
                    source: [
                        {"measured": _compared(came), "predicted": _compared(guess)}
                        for came, guess in zip(real[source], guessed[source], strict=True)
                    ]
                    for source in SOURCES
                },
            }
        )
    return {
        "model": model,
        "requests": options.requests,
        "rounds": options.rounds,
        "load": load,
        "cores": os.cpu_count(),
        "recorded": recorded_figures,
        "baseline": baseline,
        "baseline_error_percent": {source: _errors(baseline[source], recorded_figures[source]) for source in SOURCES},
        "processors": [one["processors"] for one in said["traces"]],
        "what_ifs": found,
    }


def text(found: Mapping[str, Any]) -> str:
    """The figures as a table: a row for what was measured, and one for each prediction with its errors."""
    rows = [["", *(heading for heading, _ in COMPARED.values())]]
    for source in SOURCES:
        rows.append([f"recorded, {source}", *_cells(found["recorded"][source])])
        baseline = _cells(found["baseline"][source], found["baseline_error_percent"][source])
        rows.append(["  simulated as recorded", *baseline])
    for one in found["what_ifs"]:
        for source in SOURCES:
            rows.append([f"{one['what_if']}: measured, {source}", *_cells(one["measured"][source])])
            cells = _cells(one["predicted"][source], one["error_percent"][source])
            rows.append([f"  predicted from the {source}", *cells])
    about = f"{found['model']}: {found['rounds']} rounds, {found['requests']} requests a run, {found['cores']} cores"
    load = ", ".join(f"{one:.1f}" for one in found["load"])
    recorded = [f"recorded: {_processors(one)}\n" for one in found["processors"]]
    return f"{about}, load average {load}\n{''.join(recorded)}{table(rows)}"


def _processors(said: Sequence[Mapping[str, Any]]) -> str:
    """What the recording has about processors."""
    words = [
        f"{one['processors']:g} processors, others used {one['others']:.2f}; an execution uses {one['share']:.2f} of "
        f"one, the rest of the server {one['batch_ns'] / 1e6:.2f} ms a batch"
        for one in said
    ]
    return " and ".join(words) or "nothing about processors"


def _cells(figures: Mapping[str, float], errors: Mapping[str, float | None] | None = None) -> list[str]:
    cells = []
    for name, (_, divisor) in COMPARED.items():
        error = errors[name] if errors is not None else None
        cells.append(f"{figures[name] / divisor:.2f}" + (f" ({error:+.1f} %)" if error is not None else ""))
    return cells


def _compared(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: figures[name] for name in COMPARED}


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(one[name] for one in runs) for name in COMPARED}


def _errors(predicted: Mapping[str, float], real: Mapping[str, float]) -> dict[str, float]:
    return {name: (predicted[name] / real[name] - 1) * 100 for name in COMPARED}


def _load() -> float:
    return os.getloadavg()[0]


if __name__ == "__main__":
    raise SystemExit(main())
