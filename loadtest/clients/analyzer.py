"""Runs model_analyzer against a server that is there (its mode `remote`), and checks that it measured what it made.

It writes variants of a model into a repository of the server, loads each by name, has perf_analyzer ask it, and reads
the metrics meanwhile. Models are for CPUs alone; whether windows are stable is no question here, as in `perf`.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.bench.servers import Charonia, Endpoints

from . import models
from .outcome import Outcome, environment, run

WITHIN_S = 600.0
MODEL = "simple"
REPORT = "inferences.csv"


@dataclass(frozen=True)
class Way:
    """One run: its name, its arguments, and how many variants of the model it is to have measured at least."""

    name: str
    arguments: tuple[str, ...]
    variants: int


WAYS = (
    Way("gRPC, brute search", ("--client-protocol", "grpc", "--run-config-search-mode", "brute"), 5),
    Way("HTTP, brute search", ("--client-protocol", "http", "--run-config-search-mode", "brute"), 5),
    Way("HTTP, quick search", ("--client-protocol", "http", "--run-config-search-mode", "quick"), 2),
)
_LIMITS = (
    *("--run-config-search-max-concurrency", "2", "--run-config-search-max-instance-count", "2"),
    *("--run-config-search-min-model-batch-size", "1", "--run-config-search-max-model-batch-size", "2"),
)
_PROFILED = {
    "profile_models": {
        MODEL: {"cpu_only": True, "perf_analyzer_flags": {"stability-percentage": 1_000_000, "max-trials": 3}}
    }
}


def play(
    program: Path, perf: Path, libraries: Sequence[Path], serve: Sequence[str] = (), only: str = ""
) -> Iterator[Outcome]:
    """Runs the program each way; `perf` is perf_analyzer, `libraries` have the shared libraries that it needs."""
    for way in WAYS:
        if only not in way.name:
            continue
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="charonia-analyzer-")))
            for name in ("models", "variants", "checkpoints", "results"):
                (folder / name).mkdir()
            models.write_simple(folder / "models")
            options = ["--model-repository", str(folder / "variants"), "--model-control-mode=explicit", *serve]
            server = stack.enter_context(Charonia(folder / "models", options)).endpoints
            yield _run(way, program, perf, libraries, folder, server)


def _run(way: Way, program: Path, perf: Path, libraries: Sequence[Path], folder: Path, server: Endpoints) -> Outcome:
    settings = folder / "settings.yaml"  # JSON is YAML
    settings.write_text(json.dumps(_PROFILED))
    command = [
        *(str(program), "profile", "-f", str(settings), "--triton-launch-mode", "remote"),
        *("--triton-http-endpoint", str(server.http), "--triton-grpc-endpoint", str(server.grpc)),
        *("--triton-metrics-url", f"http://{server.metrics}/metrics"),
        *("--model-repository", str(folder / "models"), "--perf-analyzer-path", str(perf)),
        *("--output-model-repository-path", str(folder / "variants"), "--override-output-model-repository"),
        *("--checkpoint-directory", str(folder / "checkpoints"), "-e", str(folder / "results")),
        *("--filename-model-inference", REPORT, "--collect-cpu-metrics", *_LIMITS, *way.arguments),
    ]
    outcome, said = run(way.name, command, WITHIN_S, env=environment({}, libraries), cwd=folder)
    if outcome.state != "ok":
        return outcome
    bad = [line.strip() for line in said.splitlines() if "load failed" in line or "no valid requests" in line]
    figures = ""
    try:
        figures = measured(folder / "results" / "results" / REPORT, way.variants)
    except (OSError, KeyError, ValueError) as error:
        bad.append(f"no measurement: {error!r}")
    if bad:
        return replace(outcome, state="failed", reason=" / ".join(bad[:4]))
    return replace(outcome, figures=figures)


def measured(report: Path, variants: int) -> str:
    """The best rate of each variant in a report. Raises ValueError where there are fewer, or one answered nothing."""
    best: dict[str, float] = {}
    with report.open(newline="") as file:
        for row in csv.DictReader(file):
            name, rate = row["Model Config Path"], float(row["Throughput (infer/sec)"])
            best[name] = max(best.get(name, 0.0), rate)
    if len(best) < variants or min(best.values(), default=0.0) <= 0:
        raise ValueError(f"{variants} variants wanted, rates {best}")
    return ", ".join(f"{name}: {rate:.0f}/s" for name, rate in sorted(best.items()))
