"""`python -m loadtest.walk`: the files, functions and calls that one warm request passes in every process of a server.

A real `charonia serve` counts its own Python calls (`loadtest.bench.calls`) while one caller asks for the identity
model, one request after the other. A function is on the walk when it was called at least once for every second
request, beyond what an idle server calls: heartbeats and housekeeping are off it. `--list` prints every function.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from loadtest.bench import calls
from loadtest.bench.calls import ask, counted
from loadtest.bench.cases import find, write_repository
from loadtest.bench.report import table
from loadtest.model import LoadTestError

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("charonia", "gateway", "batcher", "executors", "protos")
ON_THE_WALK = 0.5


def on_the_walk(by_role: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, calls.Function], float]:
    """The functions of the walk by role: calls per request."""
    return {
        (role, calls.function(name)): count
        for role, functions in by_role.items()
        for name, count in functions.items()
        if count >= ON_THE_WALK
    }


def print_walk(walk: Mapping[tuple[str, calls.Function], float], every: bool) -> None:
    """A table of files, functions and calls by package, and with `every` the functions themselves."""
    rows = [["package", "files", "functions", "calls"]]
    by_package: dict[str, dict[calls.Function, float]] = {}
    for (_, one), count in walk.items():
        functions = by_package.setdefault(calls.package_of(one.file, PACKAGES), {})
        functions[one] = functions.get(one, 0.0) + count
    own: dict[calls.Function, float] = {}
    for package in sorted(by_package, key=lambda name: (name not in PACKAGES, name)):
        functions = by_package[package]
        own |= functions if package in PACKAGES else {}
        rows.append([package, *_counts(functions)])
    rows.insert(1 + sum(name in PACKAGES for name in by_package), ["all of Charonia", *_counts(own)])
    print(table(rows))
    if every:
        for (role, one), count in sorted(walk.items(), key=lambda item: (item[0][0], item[0][1].file, item[0][1].line)):
            print(f"{role}  {count:5.1f}  {one.file}:{one.line} {one.name}")


def _counts(functions: Mapping[calls.Function, float]) -> list[str]:
    return [str(len({one.file for one in functions})), str(len(functions)), f"{sum(functions.values()):.0f}"]


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when the walk could not be counted."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.walk", description=__doc__.split("\n\n")[0])
    parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
    parser.add_argument("--model", choices=["identity", "identity_py"], default="identity")
    parser.add_argument("--requests", type=int, default=300, metavar="N")
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="source tree to serve from")
    parser.add_argument("--list", action="store_true", help="print every function with its calls per request")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="loadtest-models-") as home:
            write_repository(Path(home), find(options.model), ROOT / "examples" / "models")
            checkout = options.checkout.resolve() if options.checkout else None
            with counted(Path(home), (options.model,), checkout) as server:
                by_role = server.count(
                    lambda: ask(server.endpoints, options.model, options.protocol, 1, options.requests),
                    options.requests,
                )
    except (LoadTestError, OSError) as error:
        print(f"loadtest.walk: {error}", file=sys.stderr)
        return 2
    print_walk(on_the_walk(by_role), options.list)
    return 0


if __name__ == "__main__":
    sys.exit(main())
