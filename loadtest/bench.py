"""`python -m loadtest.bench`, the body of `make bench`: Charonia and two bare echoes in interleaved rounds.

It composes: servers from `server_under_test`, load from `python -m loadtest` as a process of its own, CPU from
`processes`, counters from `scrape`, verdicts from `budgets`, text from `bench_report`. Interleaving puts every target
into the same weather, so that ratios hold on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .bench_report import Round, print_report, report
from .budgets import BUDGET_IN_FLIGHT
from .calibration import measure_appends
from .model import LoadTestError
from .processes import cpu_ns_by_role, load_roles, pss_bytes_by_role
from .scrape import read_appends, read_executions
from .server_under_test import Charonia, Echo, Endpoints

MODEL = "identity"


@dataclass(frozen=True)
class Target:
    """One front to load: its name in the report, protocol and address, and where its processes and counters are."""

    name: str
    protocol: str
    address: str
    pids: dict[int, str] = field(default_factory=dict)
    endpoints: Endpoints = field(default_factory=Endpoints)

    def roles(self) -> dict[int, str]:
        """Role by pid, read anew each time because processes may be replaced."""
        path = self.endpoints.processes_file
        return dict(self.pids) if path is None else load_roles(path)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="loadtest.bench", description="CPU per request and rates, with verdicts.")
    parser.add_argument("--model-repository", type=Path, default=Path("examples/models"))
    parser.add_argument("--url", help="HOST:PORT of a running server's HTTP front, instead of starting one")
    parser.add_argument("--grpc-url", help="its gRPC front")
    parser.add_argument("--metrics-url", help="its metrics port")
    parser.add_argument("--processes-file", type=Path, help="its STATE_DIR/processes.json")
    parser.add_argument(
        "--serve-option", action="append", default=[], metavar="OPTION", help="passed to charonia serve"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=2.0, metavar="S", help="seconds per cell (default 2)")
    parser.add_argument("--in-flight", default="1,8,64", metavar="N,N,…")
    parser.add_argument("--no-baselines", action="store_true", help="leave the echo servers out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument("--check", action="store_true", help="exit 1 when a budget at 64 in flight is missed")
    parser.add_argument("--tolerance", type=float, default=1.5, help="factor that --check allows (default 1.5)")
    return parser


def generate(target: Target, concurrency: int, duration_s: float) -> dict[str, Any]:
    """One run of the generator; its JSON report. Raises LoadTestError when it cannot run or an answer was wrong."""
    command = [
        sys.executable, "-m", "loadtest", "--protocol", target.protocol, "--url", target.address, "--model", MODEL,
        "--concurrency", str(concurrency), "--duration", str(duration_s), "--verify", "identity", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode == 2 or not done.stdout:
        raise LoadTestError(f"no load on {target.name} at {concurrency} in flight; the reason is above")
    summary: dict[str, Any] = json.loads(done.stdout)
    if summary["errors_total"] or not summary["requests"]:
        raise LoadTestError(f"{target.name} at {concurrency} in flight: wrong answers {summary['errors']}")
    return summary


def measure(target: Target, concurrency: int, duration_s: float) -> Round:
    """One cell of one round: counters are read before and after, and divided by all requests that were answered."""
    http, metrics = target.endpoints.http, target.endpoints.metrics
    executions_before = read_executions(http, MODEL) if http else None
    appends_before = read_appends(metrics) if metrics else None
    roles_before = target.roles()
    cpu_before = cpu_ns_by_role(roles_before)
    summary = generate(target, concurrency, duration_s)
    roles_after = target.roles()
    if roles_after != roles_before:
        raise LoadTestError(f"a process of {target.name} was replaced while it was measured")
    cpu_after = cpu_ns_by_role(roles_after)
    appends = read_appends(metrics) if metrics else None
    executions = read_executions(http, MODEL) if http else None

    requests = summary["completed_total"]
    per_entry = batch = backend_us = None
    if appends and appends_before and appends[1] > appends_before[1]:
        per_entry = (appends[0] - appends_before[0]) / (appends[1] - appends_before[1])
    if executions and executions_before:
        delta = executions.since(executions_before)
        if delta.executions:
            batch = delta.inferences / delta.executions
            backend_us = delta.compute_infer_ns / 1e3 / requests
    return Round(
        throughput_per_s=summary["throughput_per_s"],
        p50_us=summary["latency_us"]["p50"],
        p99_us=summary["latency_us"]["p99"],
        generator_us=summary["generator_cpu_us_per_request"],
        cpu_us={role: (cpu_after[role] - cpu_before.get(role, 0)) / 1e3 / requests for role in cpu_after},
        backend_us=backend_us,
        requests_per_entry=per_entry,
        batch_size=batch,
    )


@contextmanager
def targets(options: argparse.Namespace) -> Iterator[tuple[list[Target], float | None]]:
    """The targets while they run, and how long our server took to become ready (None: it was running)."""
    with ExitStack() as stack:
        if options.url:
            ready_s = None
            endpoints = Endpoints(options.url, options.grpc_url, options.metrics_url, options.processes_file)
        else:
            server = stack.enter_context(Charonia(options.model_repository, options.serve_option))
            ready_s, endpoints = server.ready_s, server.endpoints
        found = []
        for protocol, address in (("http", endpoints.http), ("grpc", endpoints.grpc)):
            if address is not None:
                found.append(Target(f"charonia {protocol}", protocol, address, endpoints=endpoints))
            if not options.no_baselines:
                echo = stack.enter_context(Echo(f"loadtest.echo_{protocol}"))
                found.append(Target(f"echo {protocol}", protocol, echo.address, {echo.pid: "echo"}))
        yield found, ready_s


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; the report as a document. Raises LoadTestError."""
    try:
        levels = [int(level) for level in options.in_flight.split(",")]
    except ValueError:
        raise LoadTestError(f"--in-flight must be N,N,…, got {options.in_flight!r}") from None
    if options.rounds < 1 or options.duration <= 0 or min(levels) < 1:
        raise LoadTestError("--rounds, --duration and --in-flight must be positive")
    if options.check and BUDGET_IN_FLIGHT not in levels:
        raise LoadTestError(f"--check needs {BUDGET_IN_FLIGHT} among --in-flight, where the budgets hold")
    cells: dict[tuple[str, str, int], list[Round]] = {}
    with targets(options) as (found, ready_s):
        ours = next(target for target in found if target.name.startswith("charonia"))
        pss_idle = pss_bytes_by_role(ours.roles())
        for target in found:  # connections, caches and code paths warm up outside the rounds
            generate(target, max(levels), min(0.5, options.duration))
        for number in range(1, options.rounds + 1):
            for level in levels:
                for target in found:
                    print(f"round {number}/{options.rounds}: {target.name}, {level} in flight", file=sys.stderr)
                    result = measure(target, level, options.duration)
                    cells.setdefault((target.name, target.protocol, level), []).append(result)
        pss_after = pss_bytes_by_role(ours.roles())
        log_servers = [pid for pid, role in ours.roles().items() if role == "redis"]
        append_us = measure_appends(log_servers[0]) if log_servers and not options.no_baselines else None
    document = report(cells, options.tolerance, ready_s, pss_idle, pss_after, append_us)
    document["machine"] = {"cpus": os.cpu_count(), "load_average": os.getloadavg(), "unix_s": round(time.time())}
    return document


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 with --check when a budget is missed beyond the tolerance; 2 when the bench could not run."""
    options = parser().parse_args(arguments)
    try:
        document = run(options)
    except (LoadTestError, OSError, ValueError) as error:
        print(f"loadtest.bench: {error}", file=sys.stderr)
        return 2
    print_report(document)
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if options.check and document["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
