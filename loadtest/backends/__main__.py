"""`python -m loadtest.backends`: each backend's library alone against the server, in turns, round after round.

    python -m loadtest.backends --subjects onnx_resnet18,fil_256 --rounds 5 --seconds 1.5 --json figures.json

Each subject has a server of its own with one model for each kind of isolation, and a process for the library alone. The
first answer of every model is compared with the library's before anything is timed. Subjects whose library is not
installed are left out, and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.bench.points import favour
from loadtest.bench.servers import Charonia
from loadtest.measurement import median
from loadtest.model import LoadTestError

from .bare import Bare
from .comparison import BARE, XGBOOST, Figure, document, lines
from .served import Served, idle_us
from .subjects import ISOLATIONS, Subject, find

ROOT = Path(__file__).resolve().parents[2]
_MODULES = {
    "onnxruntime": ("onnxruntime", "onnx"),
    "openvino": ("openvino", "onnx"),
    "torchscript": ("torch",),
    "pt2": ("torch",),
    "trees": ("xgboost", "treelite", "onnx", "onnxruntime"),
    "litert": ("ai_edge_litert", "charonia_litert", "flatbuffers"),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.backends", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--subjects", default="all", metavar="A,B,…", help="models (default all)")
    parser.add_argument("--isolation", default=",".join(ISOLATIONS), metavar="A,B,…", help="of none, process, sandbox")
    parser.add_argument("--in-flight", type=int, metavar="N", help="requests in flight (default: the subject's)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, metavar="S", help="of a window (default 1.5)")
    parser.add_argument("--checkout", type=Path, default=ROOT, metavar="DIR", help="source tree to serve")
    parser.add_argument("--serve-option", action="append", default=[], metavar="OPTION", help="for charonia serve")
    parser.add_argument("--files", type=Path, metavar="DIR", help="keep the model files there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write medians and rounds to it")
    return parser


def missing(subject: Subject) -> str:
    """The first module that a subject needs and that is not installed; "" when all are."""
    return next((name for name in _MODULES[subject.library] if importlib.util.find_spec(name) is None), "")


def write_repository(subject: Subject, isolations: list[str], files: Path, repository: Path) -> None:
    """A model for each kind of isolation; they share one file. Raises LoadTestError when it cannot be written."""
    file = files / subject.file
    if not file.exists():
        command = [sys.executable, "-m", "loadtest.backends.model_files", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LoadTestError(f"{subject.file} cannot be written: {done.stderr[-600:]}")
    for isolation in isolations:
        home = repository / subject.model(isolation)
        (home / "1").mkdir(parents=True)
        os.link(file, home / "1" / subject.file)
        (home / "config.pbtxt").write_text(subject.config(isolation))


def measure(subject: Subject, options: argparse.Namespace, files: Path) -> dict[str, list[Figure]]:
    """All rounds of one subject, by side. Raises LoadTestError."""
    isolations = [one for one in subject.isolations if one in options.isolation.split(",")]
    rounds: dict[str, list[Figure]] = {}
    with ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loadtest-models-", dir=files)))
        write_repository(subject, isolations, files, repository)
        libraries = {BARE: subject.library} | ({XGBOOST: "xgboost"} if subject.library == "trees" else {})
        bare = {side: stack.enter_context(Bare(subject, library, files)) for side, library in libraries.items()}
        server = stack.enter_context(Charonia(repository, options.serve_option, options.checkout.resolve()))
        served = {isolation: Served(server.endpoints, subject, isolation) for isolation in isolations}
        for one in served.values():
            stack.callback(one.close)
            one.check(bare[BARE].answer)
            one.measure(0.3)
        idle: list[float] = []
        sides = [*bare, *served]
        for number in range(options.rounds):
            idle.append(idle_us(server.endpoints, options.seconds))
            for side in sides if number % 2 == 0 else reversed(sides):
                if side in bare:
                    figure = Figure(*bare[side].measure(options.seconds))
                else:
                    window = served[side].measure(options.seconds)
                    figure = Figure(window.rate, window.total_us, window.cpu_us, window.rows_per_execution)
                rounds.setdefault(side, []).append(figure)
                text = f"{figure.rate:10,.0f} rows/s {figure.cpu_us:10.2f} us"
                print(f"{subject.name} round {number + 1}/{options.rounds} {side:8}{text}", file=sys.stderr)
    return {
        side: [replace(one, idle_us=median(idle)) if side in served else one for one in rounds[side]] for side in sides
    }


def machine() -> dict[str, Any]:
    """Date, cores and load average."""
    return {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load": [round(x, 1) for x in os.getloadavg()]}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All subjects; the medians and rounds of each, and those that failed. Raises LoadTestError for wrong options."""
    if options.rounds < 1 or options.seconds <= 0 or not set(options.isolation.split(",")) <= set(ISOLATIONS):
        raise LoadTestError("--rounds and --seconds must be positive, --isolation of none, process and sandbox")
    subjects = find(options.subjects)
    if options.in_flight:
        subjects = [replace(subject, in_flight=options.in_flight) for subject in subjects]
    favour()
    found: dict[str, Any] = {"machine": {}, "medians": {}, "rounds": {}, "failed": []}
    with ExitStack() as stack:
        files = options.files or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loadtest-files-")))
        files.mkdir(parents=True, exist_ok=True)
        for subject in subjects:
            if name := missing(subject):
                print(f"left out: {subject.name}: {name} is not installed", file=sys.stderr)
                continue
            began = machine()
            try:
                rounds = measure(subject, options, files)
            except LoadTestError as error:
                print(f"FAILED: {subject.name}: {error}", file=sys.stderr)
                found["failed"].append(subject.name)
                continue
            found["medians"][subject.name] = document(rounds)
            found["rounds"][subject.name] = {
                side: [{"rows_per_s": one.rate, "cpu_us_per_row": one.cpu_us} for one in figures]
                for side, figures in rounds.items()
            }
            found["machine"][subject.name] = [began, machine()]
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when the bench could not run or a subject failed."""
    options = parser().parse_args(arguments)
    try:
        found = run(options)
    except (LoadTestError, OSError, ValueError, KeyError) as error:
        print(f"loadtest.backends: {error}", file=sys.stderr)
        return 2
    for name, (began, ended) in found["machine"].items():
        print(f"{name}: {ended['date']}, {ended['cores']} cores, load {began['load'][0]} to {ended['load'][0]}")
    print(lines(found["medians"]))
    return 2 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
