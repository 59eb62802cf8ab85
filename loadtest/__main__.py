"""`python -m loadtest`: one closed-loop run against a v2 server, its report on stdout and its progress on stderr.

Leaves the loop to the drivers and the figures to `measurement`. Exit status: 0, 1 when a request failed, 2 when the
run could not be made.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .closed_loop import Driver, Plan, Progress
from .fleet import answer_parent, run_fleet
from .grpc_driver import GrpcDriver
from .http_driver import HttpDriver
from .measurement import Tally, summarise
from .model import LoadTestError, describe_over_grpc, describe_over_http, resolve_shapes, split_url
from .payloads import make_bodies


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="loadtest", description="Closed-loop load on a KServe v2 server.")
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http")
    parser.add_argument("--url", help="HOST:PORT (default 127.0.0.1:8000 for http, 127.0.0.1:8001 for grpc)")
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-version", default="")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests in flight (default 1)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--duration", type=float, metavar="S", help="seconds to measure (default 10)")
    length.add_argument("--requests", type=int, metavar="N", help="requests to measure")
    parser.add_argument("--warmup", type=float, default=0.0, metavar="S", help="seconds before measuring (default 0)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="per request (default 60)")
    parser.add_argument("--batch", type=int, metavar="N", help="value of a dynamic first dimension (default 1)")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="[NAME:]D,D,…", help="dynamic dimensions, first one optional"
    )
    parser.add_argument("--input-data", default="random", metavar="zero|random|FILE", help="FILE: .npy or .json")
    parser.add_argument("--verify", choices=("size", "identity"), default="size", help="identity: outputs equal inputs")
    parser.add_argument("--connections", type=int, metavar="N", help="gRPC channels (default 2); HTTP: one per request")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="generator processes (default 1)")
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE")
    parser.add_argument("--json", action="store_true", help="report as one JSON document")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # INDEX/COUNT, set by the parent of a fleet
    return parser


def _shapes(texts: list[str]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for text in texts:
        name, _, dims = text.rpartition(":")
        try:
            shapes[name] = tuple(int(dim) for dim in dims.split(","))
        except ValueError:
            raise LoadTestError(f"--shape must be [NAME:]D,D,…, got {text!r}") from None
    return shapes


def _headers(texts: list[str]) -> list[tuple[str, str]]:
    headers = []
    for text in texts:
        name, mark, value = text.partition(":")
        if not mark or not name.strip() or "\r" in text or "\n" in text:
            raise LoadTestError(f"--header must be NAME:VALUE, got {text!r}")
        headers.append((name.strip(), value.strip()))
    return headers


def _share(total: int, index: int, count: int) -> int:
    """Part `index` of `total` split as evenly as it goes."""
    return total // count + (index < total % count)


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan of this process, which is a share of the whole for a worker. Raises LoadTestError."""
    for name in ("concurrency", "processes", "requests", "batch", "connections"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise LoadTestError(f"--{name} must be at least 1, got {value}")
    if options.duration is not None and options.duration <= 0:
        raise LoadTestError(f"--duration must be over 0, got {options.duration:g}")
    if options.warmup < 0 or options.timeout <= 0:
        raise LoadTestError("--warmup must not be negative and --timeout must be over 0")
    if options.processes > options.concurrency:
        raise LoadTestError(f"--processes {options.processes} is over --concurrency {options.concurrency}")
    index, count = map(int, options.worker.split("/")) if options.worker else (0, 1)
    requests = options.requests
    return Plan(
        concurrency=_share(options.concurrency, index, count),
        duration_s=None if requests is not None else options.duration or 10.0,
        requests=None if requests is None else _share(requests, index, count),
        warmup_s=options.warmup,
        timeout_s=options.timeout,
        connections=None if options.connections is None else max(1, _share(options.connections, index, count)),
    )


def make_driver(options: argparse.Namespace) -> Driver:
    """A driver for the options, after asking the server what the model takes. Raises LoadTestError."""
    plan = make_plan(options)
    if options.verify == "identity" and options.input_data == "zero":
        raise LoadTestError("--verify identity needs distinct values: use --input-data random or a file")
    over_http = options.protocol == "http"
    default_port = 8000 if over_http else 8001
    host, port = split_url(options.url or f"127.0.0.1:{default_port}", default_port)
    headers = _headers(options.header)
    describe = describe_over_http if over_http else describe_over_grpc
    model = describe(host, port, options.model, options.model_version, headers)
    model = resolve_shapes(model, options.batch, _shapes(options.shape))
    verify = options.verify == "identity"
    seed = int(options.worker.split("/")[0]) if options.worker else 0
    bodies = make_bodies(model, options.input_data, plan.concurrency, serials=verify, seed=seed)
    if over_http:
        return HttpDriver(host, port, model, bodies, plan, verify, headers)
    return GrpcDriver(host, port, model, bodies, plan, verify, headers)


def _run_here(options: argparse.Namespace) -> Tally:
    driver = make_driver(options)
    try:
        driver.connect()
        if options.worker:
            return answer_parent(driver)
        return driver.run(None if options.quiet or options.json else Progress())
    finally:
        driver.close()


def print_report(summary: dict[str, Any]) -> None:
    """The report as text."""
    latency = summary["latency_us"]
    print(f"requests    {summary['requests']} in {summary['window_s']:.3f} s")
    print(f"throughput  {summary['throughput_per_s']:.1f}/s")
    if latency["mean"] is not None:
        print("latency us  " + "  ".join(f"{name} {value:.0f}" for name, value in latency.items()))
    if summary["generator_cpu_us_per_request"] is not None:
        print(f"generator   {summary['generator_cpu_us_per_request']:.1f} us CPU per request")
    print(f"errors      {summary['errors_total']}")
    for text, count in summary["errors"].items():
        print(f"  {count} x {text}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    try:
        if options.processes > 1 and not options.worker:
            make_plan(options)
            tally = run_fleet(arguments, options.processes)
        else:
            tally = _run_here(options)
    except LoadTestError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 2
    if options.worker:
        return 0
    summary = summarise(tally)
    if options.json:
        print(json.dumps(summary, indent=2))
    else:
        print_report(summary)
    return 1 if tally.errors or not tally.latencies_ns else 0


if __name__ == "__main__":
    sys.exit(main())
