"""Runs perf_analyzer in each of its ways of asking a server, and checks what it measured.

The program is in the wheel tritonclient 2.50.0, below `data/bin`; it needs libb64 and the CUDA runtime's library even
where there is no GPU. Windows are short and any deviation between them is taken for stable: whether all requests of a
way succeed is the question here, not how fast they are.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.bench.servers import Charonia, Endpoints

from . import models
from .outcome import Outcome, environment, run

WITHIN_S = 180.0
WINDOWS = ("-p", "500", "-s", "1000000", "-r", "4")
FOLDER = "FOLDER/"
"""Stands for the directory with the input files among the arguments."""
GRPC = ("-i", "grpc")
STREAM = (*GRPC, "--streaming")
SHARED = ("--shared-memory", "system")
REPORT, EXPORT = "report.csv", "export.json"


@dataclass(frozen=True)
class Way:
    """One run: its name, the model, the arguments, and whether it leaves requests in an export, not a report."""

    name: str
    model: str
    arguments: tuple[str, ...]
    exports: bool = False


def _ways() -> list[Way]:
    levels = ("--concurrency-range", "1:4:3")
    one = ("--concurrency-range", "4")
    texts = ("--shape", "INPUT0:16")
    sequences = ("--concurrency-range", "3", "--sequence-length", "8")
    repeats = ("--input-data", FOLDER + "repeat.json", "--profile-export-file", FOLDER + EXPORT)
    return [
        Way("HTTP", "simple", levels),
        Way("HTTP, asynchronous", "simple", (*one, "--async")),
        Way("HTTP, JSON tensors", "simple", (*one, "--input-tensor-format=json", "--output-tensor-format=json")),
        Way("HTTP, batches of 4, zeros, a header", "simple", (*one, "-b", "4", "--input-data", "zero", "-H", "X-A:b")),
        Way("HTTP, version 1, 99th percentile", "simple", (*one, "-x", "1", "--percentile", "99")),
        Way("gRPC", "simple", (*GRPC, *levels)),
        Way("gRPC, asynchronous", "simple", (*GRPC, *one, "--async")),
        Way("gRPC, gzip", "simple", (*GRPC, *one, "--grpc-compression-algorithm", "gzip")),
        Way("gRPC, deflate", "simple", (*GRPC, *one, "--grpc-compression-algorithm", "deflate")),
        Way("gRPC stream", "simple", (*STREAM, *levels)),
        Way("gRPC stream, decoupled model", "repeat_int32", (*STREAM, *one, *repeats)),
        Way("gRPC stream, rising concurrency", "repeat_int32",
            (*STREAM, *repeats, "--periodic-concurrency-range", "1:6:1", "--request-period", "2"), exports=True),
        Way("system shared memory, HTTP", "simple", (*SHARED, *levels)),
        Way("system shared memory, gRPC", "simple", (*SHARED, *GRPC, *levels)),
        Way("system shared memory, gRPC stream", "simple", (*SHARED, *STREAM, *one)),
        Way("system shared memory, strings", "simple_identity",
            (*SHARED, *GRPC, *one, *texts, "--output-shared-memory-size", "8192")),
        Way("sequences, HTTP", "simple_sequence", sequences),
        Way("sequences, gRPC stream", "simple_sequence", (*STREAM, *sequences)),
        Way("sequences, oldest, range of ids, by rate", "simple_dyna_sequence",
            (*STREAM, "--request-rate-range", "60", "--num-of-sequences", "3", "--sequence-id-range", "100:200")),
        Way("sequences, one request at a time", "simple_sequence",
            (*STREAM, "--request-rate-range", "40", "--num-of-sequences", "3", "--serial-sequences")),
        Way("sequences of given steps", "simple_sequence", (*STREAM, *one, "--input-data", FOLDER + "sequences.json")),
        Way("request rate, constant", "simple", ("--request-rate-range", "50:100:50")),
        Way("request rate, Poisson", "simple",
            (*GRPC, "--async", "--request-rate-range", "80", "--request-distribution", "poisson")),
        Way("intervals of a file", "simple", ("--request-intervals", FOLDER + "intervals")),
        Way("binary search by concurrency", "simple",
            ("--concurrency-range", "1:8:2", "--binary-search", "-l", "2000")),
        Way("binary search by rate", "simple",
            (*GRPC, "--request-rate-range", "20:100:20", "--binary-search", "-l", "2000")),
        Way("windows by count", "simple", (*one, "--measurement-mode", "count_windows")),
        Way("number of requests", "simple", (*GRPC, *one, "--request-count", "200")),
        Way("inputs of a JSON file, results compared", "simple", (*one, "--input-data", FOLDER + "pairs.json")),
        Way("inputs of a directory", "simple", (*GRPC, *one, "--input-data", FOLDER + "tensors")),
        Way("random strings", "simple_identity", (*one, *texts, "--string-length", "40")),
        Way("a given string", "simple_string", (*GRPC, *one, "--string-data", "7")),
        Way("strings of a JSON file", "simple_identity", (*one, "--input-data", FOLDER + "texts.json")),
        Way("parameters of requests", "simple", (*GRPC, *one, "--request-parameter", "mine:3:int")),
        Way("an ensemble", "preprocess_inception_ensemble",
            (*GRPC, "--concurrency-range", "2", "--input-data", FOLDER + "picture.json")),
        Way("traces", "simple", (*GRPC, *one, "--trace-level", "TIMESTAMPS", "--trace-rate", "10")),
        Way("metrics collected", "simple", (*one, "--collect-metrics", "--metrics-interval", "200")),
        Way("metrics in the report", "simple", (*GRPC, *one, "--collect-metrics", "--verbose-csv")),
    ]  # fmt: skip


def play(program: Path, libraries: Sequence[Path], serve: Sequence[str] = (), only: str = "") -> Iterator[Outcome]:
    """Runs the program in each way; `libraries` have the shared libraries it needs, `serve` more options."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="charonia-perf-")))
        repository = folder / "models"
        repository.mkdir()
        models.write_simple(repository)
        models.write_others(repository)
        _write_inputs(folder)
        options = ["--allow-client-shm=true", f"--trace-config=triton,file={folder}/traces", "--http-address=127.0.0.1"]
        options += ["--grpc-address=127.0.0.1", *serve]
        server = stack.enter_context(Charonia(repository, options)).endpoints
        for way in _ways():
            if only in way.name:
                yield _run(way, program, libraries, folder, server)


def _run(way: Way, program: Path, libraries: Sequence[Path], folder: Path, server: Endpoints) -> Outcome:
    for name in (REPORT, EXPORT):
        (folder / name).unlink(missing_ok=True)
    url = server.grpc if "grpc" in way.arguments else server.http
    arguments = [word.replace(FOLDER, f"{folder}/") for word in way.arguments]
    if "--collect-metrics" in arguments:
        arguments += ["--metrics-url", f"{server.metrics}/metrics"]
    command = [str(program), "-m", way.model, "-u", str(url), "-f", str(folder / REPORT), *WINDOWS, *arguments]
    outcome, said = run(way.name, command, WITHIN_S, env=environment({}, libraries), cwd=folder)
    if outcome.state != "ok":
        return outcome
    bad = [line.strip() for line in said.splitlines() if _is_bad(line)]
    try:
        figures = exported(folder / EXPORT) if way.exports else measured(folder / REPORT)
    except (OSError, KeyError, ValueError) as error:
        bad.append(f"no measurement: {error!r}")
        figures = ""
    if bad:
        return replace(outcome, state="failed", reason=" / ".join(bad[:4]))
    return replace(outcome, figures=figures)


def _is_bad(line: str) -> bool:
    """Warnings about metrics of GPUs are what a machine without one gets."""
    if line.startswith("WARNING: Unable to parse 'nv_gpu_"):
        return False
    return any(word in line.lower() for word in ("error", "failed", "mismatch", "unable to"))


def measured(report: Path) -> str:
    """The rate of each level of a report. Raises ValueError when a level had no request."""
    with report.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["Inferences/Second"]) for row in rows]
    if not rates or min(rates) <= 0:
        raise ValueError(f"rates {rates}")
    level = next(iter(rows[0]))
    return ", ".join(f"{row[level]}: {rate:.0f}/s" for row, rate in zip(rows, rates, strict=True))


def exported(export: Path) -> str:
    """The numbers of requests and responses of an export. Raises ValueError when there are none."""
    requests = [one for run in json.loads(export.read_bytes())["experiments"] for one in run["requests"]]
    answers = sum(len(one["response_timestamps"]) for one in requests)
    if not answers:
        raise ValueError("no response")
    return f"{len(requests)} requests, {answers} responses"


def _write_inputs(folder: Path) -> None:
    """The files that ways name: intervals in microseconds, tensors as JSON and as a directory."""
    import base64
    import struct

    import numpy as np

    from .examples import draw

    write: Callable[[str, Any], int] = lambda name, data: (folder / name).write_text(json.dumps(data))  # noqa: E731
    (folder / "intervals").write_text("10000\n20000\n5000\n")
    numbers, ones = list(range(models.WIDTH)), [1] * models.WIDTH
    sums = [number + 1 for number in numbers]
    differences = [number - 1 for number in numbers]
    pair = {"INPUT0": numbers, "INPUT1": {"content": ones, "shape": [models.WIDTH]}}
    write("pairs.json", {"data": [pair], "validation_data": [{"OUTPUT0": sums, "OUTPUT1": differences}]})
    write("texts.json", {"data": [{"INPUT0": {"content": ["one", "zwei", "trois", ""], "shape": [4]}}]})
    write("sequences.json", {"data": [[{"INPUT": [at]} for at in range(length)] for length in (3, 5)]})
    write("repeat.json", {"data": [{
        "IN": {"content": [4, 5, 6], "shape": [3]}, "DELAY": {"content": [5, 5, 5], "shape": [3]}, "WAIT": [1],
    }]})  # fmt: skip
    draw(folder / "picture.png")
    picture = (folder / "picture.png").read_bytes()
    element = base64.b64encode(struct.pack("<I", len(picture)) + picture).decode()
    write("picture.json", {"data": [{"INPUT": {"b64": element}}]})
    (folder / "tensors").mkdir()
    for name in ("INPUT0", "INPUT1"):
        np.arange(models.WIDTH, dtype=np.int32).tofile(folder / "tensors" / name)
