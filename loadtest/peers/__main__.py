"""`python -m loadtest.peers`: sets other model servers up, and measures them side by side with this checkout.

    python -m loadtest.peers setup --peers DIR [--peer NAME …]
    python -m loadtest.peers run --peers DIR [--peer NAME …] [--page docs/performance.md]
    python -m loadtest.peers compare --peers DIR

`setup` makes a directory per peer, outside the repository, from package indexes alone; `run` measures each peer that
is set up in turns with Charonia (`loadtest.bench`), one pair after the other, because some peers are busy even when
idle. It prints the tables, or with `--page` writes them into the page, between the markers of each peer. `compare` asks
Triton and Charonia the same requests and prints what is answered otherwise (`loadtest.peers.likeness`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from loadtest.bench.__main__ import parser as bench_parser
from loadtest.bench.__main__ import run as run_bench
from loadtest.bench.servers import Charonia
from loadtest.model import LoadTestError
from loadtest.peers.compared_calls import calls
from loadtest.peers.compared_models import write_compared_repository
from loadtest.peers.likeness import differences
from loadtest.peers.page import replace_section, section
from loadtest.peers.recipes import RECIPES, running_triton, set_up


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["setup", "run", "compare"])
    parser.add_argument("--peer", action="append", choices=sorted(RECIPES), help="may be repeated (default: all)")
    parser.add_argument("--peers", type=Path, required=True, metavar="DIR", help="outside the repository, about 4 GiB")
    parser.add_argument("--models", default="all", metavar="A,B,…")
    parser.add_argument("--in-flight", default="1,8,64", metavar="N,N,…")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=1.0, metavar="S", help="seconds per point (default 1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append every point to it, one JSON line each")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables into this page")
    return parser


def set_all_up(names: list[str], peers: Path) -> bool:
    """Sets the peers up; False when one could not be."""
    complete = True
    for name in names:
        print(f"setting {name} up in {peers / name}", flush=True)
        try:
            set_up(name, peers)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            complete = False
    return complete


def run_pair(name: str, options: argparse.Namespace) -> str:
    """Measures one peer in turns with this checkout; its section of the page. Raises LoadTestError."""
    words = ["--peer", name, "--peers", str(options.peers), "--no-calls", "--models", options.models]
    words += ["--in-flight", options.in_flight, "--rounds", str(options.rounds), "--duration", str(options.duration)]
    if options.out:
        words += ["--out", str(options.out)]
    results, _ = run_bench(bench_parser().parse_args(words))
    return section(name, RECIPES[name], results, options.rounds, options.duration)


def compare(peers: Path) -> int:
    """Prints what Triton and this checkout answer otherwise; 1 when nothing explains one of them."""
    with tempfile.TemporaryDirectory(prefix="lt-") as scratch:
        models = Path(scratch)
        write_compared_repository(models)
        with running_triton(peers, models) as triton, Charonia(models) as charonia:
            asked = calls()
            found = differences(triton, charonia.endpoints, asked)
    for one in found:
        print(f"{'accepted' if one.reason else 'DIFFERENT'}: {one.name}{f' ({one.reason})' if one.reason else ''}")
        if not one.reason:
            print(f"  Triton:   {one.triton}\n  Charonia: {one.charonia}")
    unexplained = sum(not one.reason for one in found)
    print(f"{len(asked)} calls, {len(asked) - len(found)} answered alike, {unexplained} differ without a reason")
    return 1 if unexplained else 0


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 1 when one of the peers could not be set up or measured."""
    options = parser().parse_args(arguments)
    options.peers = options.peers.resolve()
    if options.action == "compare":
        try:
            return compare(options.peers)
        except LoadTestError as error:
            print(f"loadtest.peers: {error}", file=sys.stderr)
            return 1
    names = options.peer or list(RECIPES)
    if options.action == "setup":
        return 0 if set_all_up(names, options.peers) else 1
    failed = False
    for name in names:
        if not options.peer and not (options.peers / name / "complete").exists():
            print(f"left out: {name} is not set up", file=sys.stderr)
            continue
        try:
            text = run_pair(name, options)
        except (LoadTestError, OSError) as error:
            print(f"loadtest.peers: {name}: {error}", file=sys.stderr)
            failed = True
            continue
        if options.page:
            options.page.write_text(replace_section(options.page.read_text(), name, text))
        print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
